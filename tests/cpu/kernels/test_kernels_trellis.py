"""The search of a path through a trellis: the CPU's kernel, its reference, and an exhaustive search."""

import pytest
import torch
from torch import Tensor

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops.cpu_library import is_available
from warpbus.kernels.ops.trellis import trellis_search
from warpbus.kernels.reference.trellis import _search
from warpbus.kernels.reference.trellis import trellis_search as reference
from warpbus.qtensor.trellis import STATES, code_deviation, code_table, states_of

CPU = torch.device("cpu")


def random_tiles(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(seed)) * code_deviation()


def numbers(symbols: Tensor, bits: int) -> Tensor:
    return code_table(CPU)[states_of(symbols, bits)].flatten(1)


@pytest.mark.parametrize("bits", [2, 3])
def test_the_kernel_finds_the_paths_of_the_reference(bits):
    if not is_available():
        pytest.skip("no C++ compiler")
    x = random_tiles(3)
    assert torch.equal(trellis_search(x, bits), reference(x, bits))


@pytest.mark.parametrize(("bits", "stretch", "most"), [(2, 1.05, 0.078), (3, 1.15, 0.023)])
def test_normal_numbers_lose_little_more_than_the_best_code_could(bits, stretch, most):
    x = random_tiles(12) / stretch
    lost = (x - numbers(trellis_search(x, bits), bits)).square().mean() / x.square().mean()
    assert 4.0**-bits < lost < most  # the rate-distortion bound; rounding to 2^bits levels loses 0.119 and 0.035


@pytest.mark.parametrize("bits", [2, 3])
def test_numbers_that_are_a_path_are_found_again(bits):
    symbols = torch.randint(2 ** (2 * bits), (2, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    x = numbers(symbols, bits)
    assert torch.equal(numbers(trellis_search(x, bits), bits), x)


def test_the_first_steps_are_the_best_of_all():
    pairs = random_tiles(1).view(1, -1, 2)[:, :2]
    states = _search(pairs, 6, None)[0]
    table = code_table(CPU)
    costs = [(pairs[0, i] - table).square().sum(1) for i in (0, 1)]
    following = (torch.arange(STATES)[:, None] << 6 | torch.arange(64)) & (STATES - 1)
    best = (costs[0][:, None] + costs[1][following]).min()
    torch.testing.assert_close(costs[0][states[0]] + costs[1][states[1]], best)
    assert int(states[1]) in following[states[0]].tolist()


def test_what_is_wrong_is_said():
    with pytest.raises(TensorError, match=r"expected torch.float32 \[tiles, 256\]"):
        trellis_search(torch.zeros(2, 128), 3)
    with pytest.raises(UsageError, match="bits is 4: give one of 2, 3"):
        trellis_search(torch.zeros(2, 256), 4)
    assert trellis_search(torch.zeros(0, 256), 2).shape == (0, 128)
