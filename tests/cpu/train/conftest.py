"""Fixtures of the tests of training."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def data(tmp_path: Path, write_lines: Callable[..., Path]) -> Path:
    """Conversations with answers of different lengths."""
    verses = ("床前明月光", "疑是地上霜", "举头望明月", "低头思故乡", "光")

    def conversation(index: int) -> dict[str, object]:
        turns = [{"role": "user", "content": f"写诗{index}"}, {"role": "assistant", "content": verses[index % 5]}]
        return {"messages": turns}

    return write_lines(tmp_path / "data.jsonl", *map(conversation, range(15)))
