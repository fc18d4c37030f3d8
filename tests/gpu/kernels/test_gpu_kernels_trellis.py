"""The search of a path through a trellis, and what is dequantized, on a GPU."""

import pytest
import torch

from warpbus.kernels.ops.trellis import trellis_search
from warpbus.qtensor import QTensor, Scheme
from warpbus.qtensor.trellis import code_deviation, code_table, pack_symbols, states_of
from warpbus.quantization.algorithms.gptq import gptq

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("bits", [2, 3])
def test_paths_are_as_near_as_those_of_the_cpu(bits):
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(bits)) * code_deviation()
    costs = []
    for device in (CPU, GPU):
        symbols = trellis_search(x.to(device), bits)
        read = code_table(device)[states_of(symbols, bits)].flatten(1)
        costs.append((x.to(device) - read).square().sum(1).cpu())
    torch.testing.assert_close(costs[1], costs[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [2, 3])
def test_matrices_are_dequantized_to_the_same_numbers(bits):
    generator = torch.Generator().manual_seed(bits)
    symbols = torch.randint(2 ** (2 * bits), (6 * 16, 128), dtype=torch.uint8, generator=generator)
    scheme, scales = Scheme(bits, None, element="trellis"), torch.rand(96, 1, generator=generator)
    weight = QTensor(scheme, pack_symbols(symbols, bits, 256), scales, None, (96, 256))
    torch.testing.assert_close(weight.to(GPU).dequantize().cpu(), weight.dequantize())


@pytest.mark.parametrize("bits", [2, 3])
def test_gptq_loses_what_it_loses_on_the_cpu(bits):
    generator = torch.Generator().manual_seed(bits)
    weight = torch.randn(64, 384, generator=generator) * 0.05
    inputs = torch.randn(900, 384, generator=generator) @ (torch.randn(384, 384, generator=generator) * 0.1)
    hessian, scheme = inputs.T @ inputs, Scheme(bits, None, element="trellis")
    losses = []
    for device in (CPU, GPU):
        found = gptq(weight.to(device), hessian.to(device), scheme, scale_dtype=torch.float32)
        change = found.dequantize(torch.float32).cpu() - weight
        losses.append(float((change @ hessian * change).sum()))
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
