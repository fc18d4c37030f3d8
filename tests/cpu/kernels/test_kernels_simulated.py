"""The project's CUDA kernels on the CPU, thread by thread, compared with their references in PyTorch.

What `tests/gpu/kernels` tests on a GPU for many shapes is here a few small ones of each kernel, so that a machine
without a GPU finds a kernel that computes something else, reads outside of its arguments, or waits in vain.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import simulated as simulated_kernels
import torch
from cpu_weights import random_weight
from latent_cases import latent_problem, queries_problem
from simulated import simulated
from test_kernels_attention import problem
from test_kernels_gptq import Block, round_again, round_columns
from test_kernels_moe import matrices, stacked
from test_kernels_trellis_linear import trellis
from torch import Tensor

from warpbus.kernels.ops import elementwise, gemm, gemv, network, norm, sampling, w8a8, wna8
from warpbus.kernels.ops.activation import gelu, swiglu
from warpbus.kernels.ops.attention import decode_attention
from warpbus.kernels.ops.attention_merge import merge_attention
from warpbus.kernels.ops.cross_entropy import cross_entropy
from warpbus.kernels.ops.mla import mla_attention, mla_queries
from warpbus.kernels.ops.moe_mlp import moe_mlp
from warpbus.kernels.ops.moe_router import moe_route
from warpbus.kernels.ops.packed import pack, unpack
from warpbus.kernels.ops.trellis_linear import trellis_linear
from warpbus.kernels.ops.trellis_packed import pack_trellis
from warpbus.kernels.ops.wna16 import wna16_linear
from warpbus.kernels.ops.wna16_embedding import wna16_embedding
from warpbus.kernels.reference.wna8 import wna8_linear as reference_wna8

Call = Callable[[], Any]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def halves(*shape, dtype=torch.float16):
    return torch.randn(shape).to(dtype)


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [each for each in result if isinstance(each, Tensor)]


def check(
    kernels: list[str], function: Callable[..., Any], *given: Any, arch="sm_90a", error=1e-3, **named: Any
) -> None:
    """The operator gives on the small GPU what it gives on the CPU, by these kernels."""
    expected = function(*copy.deepcopy(given), **copy.deepcopy(named))
    with simulated(arch) as simulation:
        found = function(*given, **named)
    assert simulation.launched == kernels
    for result, other in zip(tensors(found), tensors(expected), strict=True):
        assert (result.dtype, result.shape) == (other.dtype, other.shape)
        assert torch.isfinite(result.double()).all()
        away = (result.double() - other.double()).norm() / other.double().norm().clamp(min=1e-9)
        assert away.item() <= error, f"{away.item():.2g} away from the reference"


@pytest.mark.parametrize("width", [64, 1000])
def test_norms(width):
    x, weight, bias = halves(3, width), halves(width), halves(width)
    check(["rms_norm"], norm.rms_norm, x, weight, 1e-5)
    check(["layer_norm"], norm.layer_norm, x, weight, bias, 1e-5, halves(3, width))


def test_elementwise():
    check(["vector_add_vectorised"], elementwise.vector_add, torch.randn(1003), torch.randn(1003))
    check(["swiglu"], swiglu, halves(3, 72))
    check(["gelu"], gelu, halves(3, 72))


def test_a_small_network():
    check(["bias_add"], network.bias_add, torch.randn(5, 40), torch.randn(40))
    check(["cross_entropy"], cross_entropy, halves(3, 70), torch.tensor([1, 69, 5]), differentiated=False)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_sampling(arch):
    logits = torch.randn(3, 500)
    check(["argmax"], sampling.argmax, logits, arch=arch)
    top_k, uniform = torch.tensor([0, 5, 0], dtype=torch.int32), torch.tensor([0.3, 0.6, 0.2])
    controls = torch.tensor([1.0, 0.7, 0.0]), top_k, torch.tensor([0.9, 1.0, 1.0]), torch.zeros(3), uniform
    check(["sample"], sampling.sample, logits, *controls, arch=arch)


def test_a_vector_times_a_matrix():
    check(["hgemv"], gemv.gemv, halves(40, 136), halves(136))


@pytest.mark.parametrize(("arch", "kernel", "rows"), [("sm_80", "sm80_hgemm", 40), ("sm_90a", "sm90_hgemm", 140)])
def test_products_of_16_bits(arch, kernel, rows):
    check([kernel], gemm.linear, halves(rows, 72), halves(136, 72), halves(136), arch=arch)


@pytest.mark.parametrize(
    ("arch", "kernel", "codes"),
    [
        ("sm_80", "sm80_w8a8", torch.int8),
        ("sm_90a", "sm90_w8a8", torch.int8),
        ("sm_90a", "sm90_w8a8", torch.float8_e4m3fn),
    ],
)
def test_products_of_8_bits(arch, kernel, codes):
    weight, scales = w8a8.quantize_rows(halves(80, 64), codes)
    check(["quantize", kernel], w8a8.w8a8_linear, halves(20, 64), weight, scales, halves(80), arch=arch)


def packed(scheme, n, k, dtype):
    return pack(random_weight(scheme, n, k, dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("arch", "kernel", "rows", "scheme"),
    [
        ("sm_90a", "wna16_decode", 3, "w4a16-g64"),
        ("sm_90a", "wna16_decode", 16, "w8a16-asym"),
        ("sm_90a", "sm90_wna16", 40, "w4a16-g32-asym"),
        ("sm_90a", "sm90_wna16", 150, "w3a16-g64"),
        ("sm_80", "sm80_wna16", 20, "w2a16-g32-asym"),
    ],
)
def test_products_of_few_bits(arch, kernel, rows, scheme, dtype):
    weight, x, residual = packed(scheme, 160, 128, dtype), halves(rows, 128, dtype=dtype), halves(rows, 80, dtype=dtype)
    error = 2 * torch.finfo(dtype).eps
    check([kernel], wna16_linear, x, weight, halves(160, dtype=dtype), arch=arch, error=error)
    if arch == "sm_90a":
        around = {"norm": halves(128, dtype=dtype), "eps": 1e-5, "residual": residual, "activation": "swiglu"}
        kernels = [kernel] if rows <= 16 else ["rms_norm", kernel]
        check(kernels, wna16_linear, x, weight, error=error, **around)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_choice_of_experts(arch):
    router, bias, scale = halves(9, 64), torch.rand(9), halves(64)
    choice = {"norm": scale, "eps": 1e-5, "top_k": 3, "shared": True}
    check(["moe_route"], moe_route, halves(3, 64), router, bias, arch=arch, **choice)


@pytest.mark.parametrize(
    ("tokens", "arch", "products"),
    [
        (1, "sm_90a", ["wna16_decode_experts", "wna16_decode_experts"]),
        (7, "sm_90a", ["sm90_wna16", "sm90_wna16"]),
        (7, "sm_80", ["sm80_wna16_experts", "swiglu", "sm80_wna16_experts"]),
    ],
)
def test_experts(tokens, arch, products):
    gate_up, down = stacked(matrices("w4a16-g32", 4, 128, 96)), stacked(matrices("w4a16-g32", 4, 96, 64))
    experts, weights = torch.rand(tokens, 3).argsort(1)[:, :2].int(), torch.rand(tokens, 2)
    sorts = tokens > 1
    kernels = ["moe_sort", "moe_permute"] * sorts + products + ["moe_combine"] * sorts
    given = halves(tokens, 96), experts, weights, gate_up, down
    check(kernels, moe_mlp, *given, arch=arch, residual=halves(tokens, 96))


@pytest.mark.parametrize(
    ("cache", "dtype", "error"),
    [(None, torch.float16, 1e-3), (torch.int8, torch.float16, 1e-3), (torch.float8_e4m3fn, torch.bfloat16, 8e-3)],
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_decode_attention(arch, cache, dtype, error):
    given = problem([5, 70, 0], size=64, rotary=32, dtype=dtype, cache=cache)
    check(["decode_attention"], decode_attention, arch=arch, error=error, **given)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_latent_attention(arch, coded):
    given = latent_problem([0, 15, 70], dtype=torch.bfloat16, coded=coded)
    check(["mla_attention", "mla_outputs"], mla_attention, arch=arch, error=8e-3, **given)


def test_latent_queries():
    check(["mla_queries"], mla_queries, error=8e-3, **queries_problem(3, dtype=torch.bfloat16))


@pytest.mark.parametrize(("bits", "rows", "arch"), [(2, 16, "sm_90a"), (3, 1, "sm_90a"), (3, 5, "sm_80")])
def test_trellises(bits, rows, arch):
    weight = pack_trellis(trellis(bits, 48, 160), torch.float16)
    check(["trellis_decode"], trellis_linear, halves(rows, 160), weight, halves(48), arch=arch)


@pytest.mark.parametrize(
    ("arch", "kernel", "codes"),
    [("sm_80", "sm80_wna8", torch.int8), ("sm_90a", "sm90_wna8", torch.float8_e4m3fn)],
)
def test_activations_of_8_bits(arch, kernel, codes):
    x, weight, bias = halves(40, 256), packed("w4a16-g128", 160, 256, torch.float16), halves(160)
    out = torch.full((40, 160), torch.nan, dtype=torch.float16)
    with simulated(arch) as simulation:
        wna8.multiply(x, weight, bias, out, codes)
    assert simulation.launched == ["quantize_wna8", kernel]
    expected = reference_wna8(x, unpack(weight), bias, codes)
    assert ((out.double() - expected.double()).norm() / expected.double().norm()).item() < 1e-3


def test_quantized_embedding():
    weight, tokens = packed("w4a16-g32", 48, 96, torch.float16), torch.tensor([3, 0, 47])
    check(["wna16_embedding"], wna16_embedding, tokens, weight, torch.float16)


def test_rounding_of_gptq():
    block = Block(2, 64, 40)
    check(["round_columns"], round_columns, *block.columns())
    check(["round_again"], round_again, block.gradient(), block.corner, block.centred.float(), *block.grid())


def test_merged_attention():
    check(
        ["merge_attention"], merge_attention, halves(3, 5, 16), halves(3, 5, 16), torch.randn(5, 3), torch.randn(5, 3)
    )


@pytest.mark.parametrize(
    ("right", "wrong", "seen"),
    [
        ("sum += Centered ? element : element * element", "sum += 2.0f * element * element", "away from the reference"),
        ("row.load(chunk)", "row.load(chunk + 4096)", "outside"),
    ],
)
def test_a_wrong_kernel_is_found(monkeypatch, right, wrong, seen):
    flat = simulated_kernels._flat

    def changed(*source):
        text = flat(*source)
        return text.replace(right, wrong)

    monkeypatch.setattr(simulated_kernels, "_flat", changed)
    with pytest.raises(AssertionError, match=seen):
        check(["rms_norm"], norm.rms_norm, halves(3, 64), halves(64), 1e-5)
