"""The peers of quantized weights multiply the same matrix as ours: else there were nothing to compare."""

import importlib.util

import pytest
import torch

from warpbus.bench import Run
from warpbus.bench.peers import Humming, Tinygemm
from warpbus.bench.quantized import W8A8, WNA16, random_weight
from warpbus.qtensor import Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = torch.device("cuda", 0)


def off(product, expected):
    return ((product.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", ["w4a16-g128", "w4a16-g32-asym"])
def test_tinygemm(name):
    weight = random_weight(Scheme.parse(name), 512, 1024, DEVICE)
    x = torch.randn(16, 1024, device=DEVICE, dtype=torch.bfloat16)
    expected = x.double() @ weight.dequantize(torch.float64).T
    assert off(Tinygemm.of(weight)(x), expected) < 1e-2


@pytest.mark.skipif(importlib.util.find_spec("humming") is None, reason="humming-kernels is not installed")
@pytest.mark.parametrize("name", ["w4a16-g128", "w4a16-g128-asym", "w8a16-g128"])
def test_humming(name):
    weight = random_weight(Scheme.parse(name), 512, 1024, DEVICE)
    layer = Humming.of(weight, torch.float16, (1, 64))
    for m in (1, 64):
        x = torch.randn(m, 1024, device=DEVICE, dtype=torch.float16)
        assert off(layer(x), x.double() @ weight.dequantize(torch.float64).T) < 5e-3


def test_ours_multiplies_the_same_matrix():
    settings = Run(DEVICE, "warpbus bench wna16", sizes=(8,), quick=True)
    for prepare in WNA16.cases(settings):
        case = prepare()
        inputs = case.make()
        expected = inputs[0].double() @ inputs[2].dense.double().T
        assert off(case.ours(*inputs), expected) < 5e-3
        for rival in case.rivals:
            assert off(rival.call(*inputs), expected) < 2e-2
        assert {"cuBLAS", "tinygemm"} <= {rival.name for rival in case.rivals}


def test_products_of_8_bits():
    settings = Run(DEVICE, "warpbus bench w8a8", sizes=(32,), quick=True)
    for prepare in W8A8.cases(settings):
        case = prepare()
        x, quantized, weight = inputs = case.make()
        expected = x.double() @ weight[0].double().T
        assert off(case.ours(*inputs), expected) < 6e-2
        cublas, torch_8_bit = case.rivals
        assert off(cublas.call(*inputs), expected) < 1e-2
        product = torch_8_bit.call(*inputs)
        if torch_8_bit.name == "torch._int_mm":
            product = product * quantized[1][:, None] * weight[2]
        assert off(product, expected) < 6e-2
