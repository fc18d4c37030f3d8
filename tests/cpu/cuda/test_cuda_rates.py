"""The probe of a device's speed."""

from collections.abc import Callable, Iterator

import pytest
import torch

from warpbus.cuda import rates
from warpbus.cuda.rates import matmul_rates

CPU = torch.device("cpu")


def test_the_fastest_sample_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does in the others."""
    scripts: dict[torch.dtype, Iterator[float]] = {
        torch.float32: iter([0.5, 0.01, 0.3, 0.2, 0.02]),
        torch.bfloat16: iter([0.004, 0.4, 0.4, 0.4, 0.4]),
    }

    def sample(device: torch.device, dtype: torch.dtype) -> Callable[[], float]:
        return lambda: next(scripts[dtype])

    monkeypatch.setattr(rates, "_sample", sample)
    threads = torch.get_num_threads()
    flop = 2 * 512**3 * threads
    assert matmul_rates(CPU, list(scripts)) == {
        torch.float32: pytest.approx(flop / 0.01),
        torch.bfloat16: pytest.approx(flop / 0.004),
    }


def test_the_settings_of_torch_are_as_before() -> None:
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    found = matmul_rates(CPU, [torch.float32], tf32=True)
    assert found[torch.float32] > 1e6
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == before


def test_samples_are_computed_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several, each would count the time in which it waits for the others."""
    seen: list[int] = []

    def sample(device: torch.device, dtype: torch.dtype) -> Callable[[], float]:
        seen.append(torch.get_num_threads())
        return lambda: 1.0

    monkeypatch.setattr(rates, "_sample", sample)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert matmul_rates(CPU, [torch.float32]) == {torch.float32: 2 * 2 * 512**3}
    finally:
        torch.set_num_threads(threads)
    assert seen == [1]
