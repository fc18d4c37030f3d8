"""Rounding to FP8 on a GPU against the reference on the CPU, bit by bit: codes, columns, padding and scale."""

import pytest
import torch

from warpbus.cuda.jit import architecture
from warpbus.cuda.kernel import runs_on
from warpbus.errors import DeviceError
from warpbus.kernels.ops.fp8 import FORMATS, round_to_fp8
from warpbus.kernels.reference import fp8 as reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

HAS_E4M3 = torch.cuda.is_available() and runs_on(architecture(0), "sm_89")
needs_fp8 = pytest.mark.skipif(not HAS_E4M3, reason="needs sm_89")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [
    (1, 16),
    (16, 16),
    (15, 128),
    (37, 64),
    (127, 144),
    (128, 128),
    (129, 112),
    (257, 272),
    (1000, 1040),
    (100, 27392),
    (2047, 13696),
    (8192, 4096),
]


@pytest.fixture(autouse=True)
def _seed(seed):
    """Each test has random numbers of its own."""


def spread(m, n, of):
    """Numbers of many magnitudes, so that there are codes of all kinds, with some zeros of both signs."""
    x = torch.randn(m, n, device="cuda") * 10 ** torch.empty(m, n, device="cuda").uniform_(-7, 2)
    x[0, 0], x[-1, -1] = -0.0, 0.0
    return x.to(of)


def poison(m, n, padded):
    """What the operator allocates next is likely to be this."""
    for size in (m * n, n * padded, 4):
        torch.full((size,), 0xA5, dtype=torch.uint8, device="cuda")


def same_codes(found, expected):
    """Bit by bit, but for the sign of NaN."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    found, numbers = found.cpu(), ~expected.float().isnan()
    assert torch.equal(found.float().isnan(), ~numbers)
    assert torch.equal(found.view(torch.uint8)[numbers], expected.view(torch.uint8)[numbers])


def check(x, dtype):
    codes, columns, scale = reference.round_to_fp8(x.cpu(), dtype, True)
    for transposed in (True, False):
        poison(*x.shape, columns.shape[1])
        found = round_to_fp8(x, dtype, transposed=transposed)
        same_codes(found[0], codes)
        same_codes(found[1], columns if transposed else columns[:, :0])
        assert found[2].shape == ()
        torch.testing.assert_close(found[2].cpu(), scale, rtol=0, atol=0, equal_nan=True)


@needs_fp8
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("of", DTYPES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_the_bits_of_the_reference(dtype, of, shape):
    check(spread(*shape, of), dtype)


@needs_fp8
@pytest.mark.parametrize("of", DTYPES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_zeros_subnormal_numbers_and_no_numbers(dtype, of):
    m, n = 131, 144
    check(torch.zeros(m, n, device="cuda", dtype=of), dtype)
    smallest = torch.finfo(of).smallest_normal
    check((torch.randn(m, n, device="cuda") * smallest).to(of), dtype)
    check((torch.randn(m, n, device="cuda") * smallest / 50).to(of), dtype)
    for value in (torch.nan, -torch.nan, torch.inf, -torch.inf, torch.finfo(of).max, torch.finfo(of).min):
        for at in ((0, 0), (m - 1, n - 1), (77, 100)):
            x = torch.randn(m, n, device="cuda", dtype=of)
            x[at] = value
            check(x, dtype)
    both = torch.randn(m, n, device="cuda", dtype=of)
    both[3, 5], both[130, 7] = torch.inf, torch.nan
    check(both, dtype)


@needs_fp8
@pytest.mark.parametrize("of", DTYPES)
def test_a_largest_magnitude_anywhere(of):
    """In each of the chunks that a thread reads at a time, and in what is left after them."""
    x = torch.randn(3000, 2064, device="cuda", dtype=of)
    for at in [*torch.randint(x.numel(), (50,)).tolist(), 0, x.numel() - 1]:
        before = x.view(-1)[at].item()
        x.view(-1)[at] = -1000 - at % 64
        scale = round_to_fp8(x, FORMATS[0])[2]
        assert scale.item() == (x.view(-1)[at].cpu().float().abs() / 448).item()
        x.view(-1)[at] = before


@needs_fp8
def test_views():
    flat = torch.randn(50 * 96 + 32, device="cuda", dtype=torch.bfloat16)
    check(flat[1 : 1 + 50 * 96].view(50, 96), FORMATS[0])
    check(flat[16 : 16 + 50 * 96].view(50, 96), FORMATS[0])
    check(torch.randn(96, 50, device="cuda").t(), FORMATS[1])
    check(torch.randn(50, 96, device="cuda")[:, 16:64], FORMATS[1])
    check(torch.randn(1, 96, device="cuda").expand(50, 96), FORMATS[1])


@needs_fp8
def test_on_another_stream_and_in_a_graph():
    x = spread(300, 272, torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        check(x, FORMATS[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = round_to_fp8(x, FORMATS[0], transposed=True)
    for factor in (1000, 1, 0.001):
        x.copy_(spread(300, 272, torch.bfloat16) * factor)
        graph.replay()
        codes, columns, scale = reference.round_to_fp8(x.cpu(), FORMATS[0], True)
        same_codes(found[0], codes)
        same_codes(found[1], columns)
        assert found[2].cpu() == scale


@needs_fp8
def test_more_elements_than_32_bits_count():
    m, n = 131077, 16400
    if torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("needs 12 GB of free memory")
    x = torch.empty(m, n, device="cuda", dtype=torch.bfloat16).normal_()
    x[-1, -1] = 1000
    codes, columns, scale = round_to_fp8(x, FORMATS[0], transposed=True)
    assert columns.shape == (n, 131088)
    assert scale.cpu() == torch.tensor(1000.0) / 448
    inverse = scale.cpu().reciprocal()
    for rows in (slice(0, 200), slice(m - 200, m)):
        expected = (x[rows].cpu().float() * inverse).to(FORMATS[0])
        same_codes(codes[rows], expected)
        same_codes(columns[:, rows].view(torch.uint8).t().contiguous().view(FORMATS[0]), expected)
    last = columns[-32:, :m].view(torch.uint8)
    assert torch.equal(last, codes[:, -32:].view(torch.uint8).t())
    assert not columns[:, m:].view(torch.uint8).any()


@pytest.mark.skipif(HAS_E4M3, reason="this GPU has fp8")
def test_older_gpus_are_refused():
    with pytest.raises(DeviceError, match=r"fp8/cast\.cu .* needs sm_89, this GPU is"):
        round_to_fp8(torch.ones(2, 16, device="cuda"), FORMATS[0])
