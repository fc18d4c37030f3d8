"""The search of paths through a trellis on a GPU, against the reference's on random tiles."""

import pytest
import torch

from warpbus.kernels.ops.trellis import trellis_search
from warpbus.kernels.reference.trellis import trellis_search as reference_search
from warpbus.qtensor import QTensor, Scheme
from warpbus.qtensor.trellis import code_table, pack_symbols, states_of
from warpbus.quantization.algorithms.gptq import gptq

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GPU = torch.device("cuda")


def errors(x, symbols, bits):
    """The squared error of each tile, float64."""
    numbers = code_table(x.device)[states_of(symbols, bits)].flatten(1)
    return (numbers.double() - x.double()).square().sum(1)


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("tiles", [1, 2, 133, 700])
def test_paths_are_the_nearest(tiles, bits, seed):
    x = torch.randn(tiles, 256, device=GPU) * torch.rand(tiles, 1, device=GPU) * 2
    x[0, :5] = torch.tensor([0.0, 30.0, -30.0, 1e-8, 2.0])
    found = trellis_search(x, bits)
    assert (found.shape, found.dtype) == ((tiles, 128), torch.uint8)
    assert int(found.max()) < 4**bits
    assert torch.equal(trellis_search(x, bits), found)  # the same bits at every run
    some = slice(0, 40)  # the reference is slow
    expected = reference_search(x[some], bits)
    assert (found[some] == expected).double().mean() > 0.98  # of two equally near paths either may be found
    torch.testing.assert_close(errors(x[some], found[some], bits), errors(x[some], expected, bits), rtol=1e-4, atol=0)


def test_tiles_do_not_depend_on_each_other(seed):
    x = torch.randn(300, 256, device=GPU)
    assert torch.equal(trellis_search(x, 3)[7:9], trellis_search(x[7:9], 3))
    assert torch.equal(trellis_search(x.repeat(1, 2)[:, 256:], 2), trellis_search(x, 2))  # any strides


@pytest.mark.parametrize("name", ["w2a16-trellis", "w3a16-trellis"])
def test_gptq_is_as_near_as_on_the_cpu(name, seed):
    x = torch.randn(600, 128) @ torch.randn(128, 128)
    weight, moments, scheme = torch.randn(64, 128), x.T @ x, Scheme.parse(name)
    error = []
    for device in ("cpu", GPU):
        found = gptq(weight.to(device), moments.to(device), scheme, scale_dtype=torch.float32)
        change = found.dequantize(torch.float32).cpu() - weight
        error.append(float((change @ x.T).norm() / (weight @ x.T).norm()))
    assert error[1] == pytest.approx(error[0], rel=0.05)


@pytest.mark.parametrize("bits", [2, 3])
def test_matrices_are_dequantized_to_the_numbers_of_the_cpu(bits, seed):
    symbols = torch.randint(4**bits, (6 * 16, 128), dtype=torch.uint8)
    scheme = Scheme(bits, None, element="trellis")
    weight = QTensor(scheme, pack_symbols(symbols, bits, 256), torch.rand(96, 1), None, (96, 256))
    torch.testing.assert_close(weight.to(GPU).dequantize().cpu(), weight.dequantize())
