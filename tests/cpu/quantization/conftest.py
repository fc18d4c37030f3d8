"""Fixtures of the tests of quantization."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from quantization_models import write_texts


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As each of two processes has: the order of sums depends on the number of threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibration data."""
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl")


@pytest.fixture(scope="session")
def verses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Less of it, for the tiny model of `make_model`."""
    path = tmp_path_factory.mktemp("verses") / "verses.jsonl"
    path.write_text("\n".join(json.dumps({"text": "床前明月光，疑是地上霜。"}, ensure_ascii=False) for _ in range(4)))
    return path
