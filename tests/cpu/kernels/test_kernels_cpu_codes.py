"""The CPU's kernels for activations in 8 bits against float64, every variant that this CPU runs."""

import pytest
import torch
from cpu_weights import assert_same_weight, random_weight
from torch.nn import functional as F

from warpbus.cuda.host_compiler import VARIANTS
from warpbus.errors import TensorError
from warpbus.kernels.ops.cpu_codes import codes_linear, fuses_gates, pack_codes
from warpbus.kernels.ops.cpu_library import SCALES
from warpbus.qtensor import QTensor, Scheme

HERE = [variant for variant in VARIANTS if variant.runs_here]
SCHEMES = [
    f"w{bits}a16{group}{asym}"
    for bits in (2, 3, 4, 5, 6, 8)
    for group in ("", "-g32", "-g128")
    for asym in ("", "-asym")
]
BLOCK = 128  # columns that share a scale of x


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1)


def blocks_of(x, weight):
    """x by blocks, `[rows, groups, blocks of a group, BLOCK]`, the last one of a group padded with zeros."""
    grouped = x.unflatten(1, (weight.scales.shape[1], -1))
    return F.pad(grouped, (0, -grouped.shape[2] % BLOCK)).unflatten(2, (-1, BLOCK))


def rounding_bound(x, weight):
    """How far rounding x to 8 bits can move each product: half a step of each block times the weights' magnitudes."""
    half_steps = blocks_of(x.double(), weight).abs().amax(-1) / 254
    magnitudes = blocks_of(weight.dequantize(torch.float64).abs(), weight).sum(-1)
    return torch.einsum("mgb,ngb->mn", half_steps, magnitudes)


def exact(x, weight):
    return x.double() @ weight.dequantize(torch.float64).T


def assert_close(found, wanted, bound):
    # Beside the rounding of x there are the sums in float32, of at most a few hundred blocks.
    error, sums = (found.double() - wanted).abs(), 1e-5 * wanted.abs().max()
    assert bool((error <= bound + sums).all()), (error - bound).max().item()


def test_this_cpu_runs_the_plain_variant_at_least():
    assert HERE[-1].name == "plain"


@pytest.mark.parametrize("variant", HERE, ids=lambda variant: variant.name)
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme(name, variant):
    for n, k in ((1, 128), (37, 384), (130, 128)):
        weight = random_weight(name, n, k)
        packed = pack_codes(weight)
        assert_same_weight(packed.unpack(), weight)
        for rows in (1, 5, 19):
            x = torch.randn(rows, k) + 0.5
            found = codes_linear(x, packed, variant=variant)
            assert_close(found, exact(x, weight), rounding_bound(x, weight))


@pytest.mark.parametrize("name", ["w2a16", "w3a16", "w4a16-asym", "w8a16"])
def test_any_number_of_columns(name):
    for k in (1, 7, 300, 3425):
        weight = random_weight(name, 19, k)
        packed = pack_codes(weight)
        assert_same_weight(packed.unpack(), weight)
        x = torch.randn(2, k)
        assert_close(codes_linear(x, packed), exact(x, weight), rounding_bound(x, weight))


def test_many_rows_are_packed_in_parts():
    weight = random_weight("w4a16-g32-asym", 4100, 32)
    packed = pack_codes(weight)
    assert_same_weight(packed.unpack(), weight)
    x = torch.randn(3, 32)
    assert_close(codes_linear(x, packed), exact(x, weight), rounding_bound(x, weight))


@pytest.mark.parametrize("dtype", SCALES)
@pytest.mark.parametrize("variant", HERE, ids=lambda variant: variant.name)
def test_dtypes_of_scales(dtype, variant):
    weight = random_weight("w4a16-g64", 40, 192, dtype)
    x = torch.randn(3, 192)
    packed = pack_codes(weight)
    assert packed.scales.dtype == dtype
    assert_close(codes_linear(x, packed, variant=variant), exact(x, weight), rounding_bound(x, weight))


@pytest.mark.parametrize("variant", HERE, ids=lambda variant: variant.name)
def test_small_and_zero_scales_in_float16(variant):
    scheme = Scheme.parse("w8a16-g32")
    scales = torch.tensor([[6e-8], [3e-6], [0.0], [6e4], [1.0]]).half().repeat(4, 1)
    weight = QTensor.from_codes(scheme, torch.randint(0, 256, (20, 32), dtype=torch.uint8), scales)
    x = torch.ones(1, 32)
    found, wanted = codes_linear(x, pack_codes(weight), variant=variant), exact(x, weight)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_of_activations(dtype):
    weight = random_weight("w4a16-g64-asym", 60, 192)
    x, bias = torch.randn(4, 192).to(dtype), torch.randn(60).to(dtype)
    found = codes_linear(x, pack_codes(weight), bias)
    assert found.dtype == dtype
    wanted = exact(x, weight) + bias.double()
    half_a_unit = torch.finfo(dtype).eps / 2
    assert_close(found, wanted, rounding_bound(x, weight) * (1 + half_a_unit) + wanted.abs() * half_a_unit)


@pytest.mark.parametrize("variant", HERE, ids=lambda variant: variant.name)
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_norm_bias_and_residual(rows, variant):
    weight = random_weight("w4a16-g32", 72, 96)
    x, norm, bias, residual = torch.randn(rows, 96), torch.rand(96) + 0.5, torch.randn(72), torch.randn(rows, 72)
    packed = pack_codes(weight)
    found = codes_linear(x, packed, bias, norm=norm, eps=1e-5, residual=residual, variant=variant)
    normed = F.rms_norm(x.double(), (96,), norm.double(), 1e-5)
    wanted = exact(normed, weight) + bias.double() + residual.double()
    # A normed element may be rounded the other way than in float64: one more step, of the float32 norm's error.
    assert_close(found, wanted, rounding_bound(normed, weight) * 1.001)


@pytest.mark.parametrize("variant", HERE, ids=lambda variant: variant.name)
@pytest.mark.parametrize(("rows", "n"), [(1, 32), (1, 160), (2, 1056), (21, 96)])
def test_gates(rows, n, variant):
    weight = random_weight("w4a16-g32", n, 64)
    x, residual = 100 * torch.randn(rows, 64), torch.randn(rows, n // 2)
    packed = pack_codes(weight)
    plain = codes_linear(x, packed, variant=variant).double()
    found = codes_linear(x, packed, residual=residual, gated=True, variant=variant)
    gate, up = plain.chunk(2, dim=1)
    assert float(gate.max()) > 15
    assert float(gate.min()) < -15  # silu where e^-gate is small and where it is large
    torch.testing.assert_close(found.double(), F.silu(gate) * up + residual.double(), rtol=2e-6, atol=1e-4)


@pytest.mark.parametrize("variant", HERE, ids=lambda variant: variant.name)
@pytest.mark.parametrize("name", ["w2a16-g32", "w4a16-g128-asym", "w8a16"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(name, variant):
    packed = pack_codes(random_weight(name, 544, 256))
    x = torch.randn(27, 256)
    for gated in (False, True):
        together = codes_linear(x, packed, gated=gated, variant=variant)
        assert torch.equal(codes_linear(x, packed, gated=gated, variant=variant), together)
        for first, last in ((0, 1), (3, 5), (5, 12), (20, 27)):
            assert torch.equal(codes_linear(x[first:last], packed, gated=gated, variant=variant), together[first:last])


@pytest.mark.parametrize("variant", HERE, ids=lambda variant: variant.name)
@pytest.mark.parametrize("name", ["w4a16-g128-asym", "w2a16-g32", "w3a16", "w5a16", "w6a16-g32", "w8a16"])
@pytest.mark.parametrize("k", [128, 416])
def test_many_rows_have_the_bits_of_few(name, k, variant):
    """Strips of every size: 12 and more rows go through tiles where the CPU has them."""
    k = 384 if "-g" in name and k > 128 else k
    weight = random_weight(name, 53, k)
    packed, x = pack_codes(weight), torch.randn(145, k)
    few = torch.cat([codes_linear(part, packed, variant=variant) for part in x.split(5)])
    assert_close(few, exact(x, weight), rounding_bound(x, weight))
    for rows in (11, 12, 15, 16, 17, 31, 64, 65, 76, 145):
        assert torch.equal(codes_linear(x[:rows], packed, variant=variant), few[:rows])


def test_the_number_of_threads_does_not_matter():
    packed = pack_codes(random_weight("w4a16-g32", 700, 96))
    x, threads = torch.randn(5, 96), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(codes_linear(x, packed))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_shapes():
    weight = random_weight("w4a16-g32", 48, 64)
    packed = pack_codes(weight)
    x = torch.randn(2, 3, 128)[..., ::2]
    found = codes_linear(x, packed)
    assert found.shape == (2, 3, 48)
    assert torch.equal(found[1, 2], codes_linear(x[1, 2].contiguous(), packed))
    assert codes_linear(x[0, 0], packed).shape == (48,)
    assert codes_linear(x[:0], packed).shape == (0, 3, 48)


def test_rows_of_zeros_and_of_no_numbers():
    packed = pack_codes(random_weight("w4a16-g32", 20, 64))
    x = torch.zeros(4, 64)
    x[1, 3], x[2, 60], x[3] = float("inf"), float("nan"), 1e-42
    found = codes_linear(x, packed)
    assert torch.equal(found[0], torch.zeros(20))
    assert bool(found[1:3].isnan().all())
    assert float(found[3].abs().max()) < 1e-38


def test_memory():
    for name in ("w2a16-g128", "w4a16-g128", "w4a16-g128-asym", "w8a16"):
        weight = random_weight(name, 1024, 512)
        assert pack_codes(weight).nbytes == weight.nbytes


def test_rejects():
    packed = pack_codes(random_weight("w4a16-g32", 40, 64))
    x = torch.ones(2, 64)
    with pytest.raises(TensorError, match=r"x has shape \[63\], the weight expects 64"):
        codes_linear(torch.ones(63), packed)
    with pytest.raises(TensorError, match=r"x is torch.float64 on cpu, expected"):
        codes_linear(x.double(), packed)
    for name, expected in (("bias", [40]), ("norm", [64]), ("residual", [2, 40])):
        with pytest.raises(TensorError, match=rf"{name} has shape \[1\] on cpu, expected \[{str(expected)[1:-1]}\]"):
            codes_linear(x, packed, **{name: torch.ones(1)})
    assert not fuses_gates(packed)
    with pytest.raises(TensorError, match="halves are multiples of 16 rows; this one has 40 rows: compute them apart"):
        codes_linear(x, packed, gated=True)
    with pytest.raises(TensorError, match="this one has 32 rows and a bias"):
        codes_linear(x, pack_codes(random_weight("w4a16-g32", 32, 64)), torch.ones(32), gated=True)
