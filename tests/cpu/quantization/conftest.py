"""Fixtures of the tests of quantization."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As each of two processes has: the order of sums depends on the number of threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
