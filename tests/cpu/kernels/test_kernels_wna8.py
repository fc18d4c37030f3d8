"""`wna8` without a GPU: what it supports, its plans, and what its tilings take of a multiprocessor."""

import pytest
import torch

from warpbus.kernels.ops import wna8, wna8_sm80
from warpbus.kernels.reference.w8a8 import quantize
from warpbus.kernels.reference.wna8 import wna8_linear
from warpbus.qtensor import QTensor, Scheme

A100, ADA = 164 * 1024, 100 * 1024  # bytes of shared memory of a multiprocessor
INT8, E4M3 = torch.int8, torch.float8_e4m3fn
TILINGS = {"large": wna8_sm80.LARGE, "medium": wna8_sm80.MEDIUM}
NARROW = ["w4a16-g128", "w4a16-g64-asym", "w4a16", "w3a16-g64", "w2a16-asym"]
FORM = wna8_sm80.KernelForm(torch.bfloat16, INT8, 4, 128, True)


def quantized(scheme, n, k):
    parsed = Scheme.parse(scheme)
    shape = n, parsed.groups(k)
    codes = torch.randint(0, parsed.max_code + 1, (n, k), dtype=torch.uint8)
    zeros = torch.randint(0, parsed.max_code + 1, shape, dtype=torch.uint8)
    return QTensor.from_codes(parsed, codes, torch.rand(shape) + 0.5, None if parsed.symmetric else zeros)


def test_what_is_supported():
    others = ["w4a16-g32", "w8a16", "w8a16-g128", "w8a16-asym", "w6a16"]
    found = {
        codes: {name for name in (*NARROW, *others) if wna8.supports(Scheme.parse(name), codes)}
        for codes in (INT8, E4M3)
    }
    assert found == {E4M3: set(NARROW), INT8: {*NARROW, "w8a16", "w8a16-g128"}}


@pytest.mark.parametrize(
    ("arch", "int8", "e4m3", "joins"),
    [
        ("sm_75", False, False, False),
        ("sm_80", True, False, False),
        ("sm_86", True, False, False),
        ("sm_89", True, True, False),
        ("sm_90a", True, True, True),
        ("sm_120a", True, True, False),
    ],
)
def test_which_gpu_takes_which(arch, int8, e4m3, joins):
    assert (wna8.runs_on(arch, INT8), wna8.runs_on(arch, E4M3)) == (int8, e4m3)
    assert wna8.joins_gates(arch, E4M3) == joins
    assert not wna8.joins_gates(arch, INT8)


@pytest.mark.parametrize("scheme", [*NARROW, "w8a16-g64"])
def test_the_reference_of_int8_is_that_of_the_rounded_tokens(scheme):
    x, weight, bias = torch.randn(5, 256), quantized(scheme, 24, 256), torch.randn(24)
    codes, scales = quantize(x, INT8)
    exact = codes.double() * scales.double()[:, None] @ weight.dequantize(torch.float64).T + bias.double()
    assert (wna8_linear(x, weight, bias, INT8).double() - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("form", wna8_sm80._FORMS, ids=str)
@pytest.mark.parametrize("name", TILINGS)
def test_tilings_fit_every_gpu(name, form):
    tiling = TILINGS[name]
    assert tiling.shared(form) <= 99 * 1024
    assert tiling.tile_m % tiling.warp_m == tiling.tile_n % tiling.warp_n == 0


@pytest.mark.parametrize("codes", [INT8, E4M3])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True)])
@pytest.mark.parametrize("name", TILINGS)
def test_kernels_keep_their_registers(name, bits, symmetric, codes):
    pytest.importorskip("cuda.core", reason="the compiler comes with the extra cuda")
    if bits == 8 and codes == E4M3:
        pytest.skip("int8 alone")
    tiling = TILINGS[name]
    form = wna8_sm80.KernelForm(torch.bfloat16, codes, bits, 128, symmetric)
    resources = tiling.kernel(form).resources("sm_80" if codes == INT8 else "sm_89")
    assert (resources.spill_stores, resources.spill_loads, resources.stack) == (0, 0, 0)
    assert resources.registers * tiling.threads * tiling.resident <= 65_536


@pytest.mark.parametrize("shared_memory", [A100, ADA])
@pytest.mark.parametrize("multiprocessors", [16, 84, 108, 132])
@pytest.mark.parametrize(
    "size", [(1, 1, 16), (512, 4096, 13696), (1024, 27392, 4096), (4096, 4096, 4096), (64, 64, 100_000)]
)
def test_plans_cover_k(size, multiprocessors, shared_memory):
    tiling, part = wna8_sm80.plan(*size, FORM, multiprocessors, shared_memory)
    assert tiling in wna8_sm80.TILINGS
    assert part > 0
    assert part % tiling.tile_k == 0
    assert part < size[2] + tiling.tile_k


def test_many_tiles_are_not_split():
    assert wna8_sm80.plan(4096, 27392, 4096, FORM, 108, A100)[1] == 4096
