"""The cross-entropy in place of its scores on a GPU: against float64, at odd widths and addresses, and at extremes."""

import pytest
import torch

from warpbus.kernels.ops.cross_entropy import cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [
    (3, 130_528),
    (33, 65_024),
    (2, 151_552),
    (5, 151_936),
    (300, 1000),
    (300, 257),
    (130, 37),
    (19, 8),
    (300, 1),
    (1, 32_768),
    (7, 32_771),
    (1, 4097),
]
INFINITY, NAN = float("inf"), float("nan")


def drawn(rows, vocabulary, dtype, *, scale=4.0, offset=0):
    """Scores that begin `offset` elements after a multiple of 16 bytes, between other numbers, and targets."""
    generator = torch.Generator("cuda").manual_seed(rows + vocabulary)
    around = torch.full((rows * vocabulary + offset + 16,), 7.0, device="cuda", dtype=dtype)
    scores = around[offset : offset + rows * vocabulary].view(rows, vocabulary)
    scores.copy_(scale * torch.randn(rows, vocabulary, generator=generator, device="cuda"))
    targets = torch.randint(vocabulary, (rows,), generator=generator, device="cuda")
    targets[0], targets[-1] = 0, vocabulary - 1
    return around, scores, targets


def exact(scores, targets):
    """Losses and gradient in float64."""
    likelihoods = torch.log_softmax(scores.double(), -1)
    chosen = likelihoods.gather(1, targets[:, None])
    return -chosen.squeeze(1), likelihoods.exp().scatter_(1, targets[:, None], torch.expm1(chosen))


def poison(rows):
    """NaN in the memory that the next losses are given."""
    torch.full((rows,), NAN, device="cuda")


def check(found, losses, expected, gradient):
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    # One rounding; the exponential's error grows with the exponent. What is near zero may lie below the normal numbers
    # of float16, and of float32 the kernel's exponential has none below.
    tiny = torch.finfo(found.dtype).smallest_normal * (torch.finfo(found.dtype).eps if found.itemsize == 2 else 4)
    tolerance = torch.finfo(found.dtype).eps + 3e-5
    torch.testing.assert_close(found.double(), gradient, rtol=tolerance, atol=max(tiny, 4e-38))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocabulary"), SHAPES)
def test_against_float64(rows, vocabulary, dtype):
    _, scores, targets = drawn(rows, vocabulary, dtype)
    expected, gradient = exact(scores, targets)
    before = scores.clone()
    poison(rows)
    read = cross_entropy(scores, targets, differentiated=False)
    assert torch.equal(scores, before)
    poison(rows)
    losses = cross_entropy(scores, targets, differentiated=True)
    assert losses.dtype == torch.float32
    assert torch.equal(read, losses)
    # The target's own part is expm1 of a loss of which float32 has the last bits where it is near 0.
    own = targets[:, None]
    torch.testing.assert_close(
        scores.gather(1, own).double(), gradient.gather(1, own), rtol=torch.finfo(dtype).eps + 1e-5, atol=2e-6
    )
    scores.scatter_(1, own, 0.0)
    check(scores, losses, expected, gradient.scatter_(1, own, 0.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 3, 7])
@pytest.mark.parametrize("vocabulary", [1, 5, 8, 257, 1000, 4096, 33_001])
def test_rows_that_begin_anywhere(vocabulary, offset, dtype):
    around, scores, targets = drawn(9, vocabulary, dtype, offset=offset)
    expected, gradient = exact(scores, targets)
    losses = cross_entropy(scores, targets, differentiated=True)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.double(), gradient, rtol=torch.finfo(dtype).eps + 1e-5, atol=2e-6)
    assert torch.equal(around[:offset], torch.full_like(around[:offset], 7.0))
    assert torch.equal(around[offset + 9 * vocabulary :], torch.full_like(around[:16], 7.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_rows(dtype):
    _, scores, targets = drawn(300, 777, dtype)
    expected, _ = exact(scores, targets)
    for rows in range(1, 301):
        torch.testing.assert_close(
            cross_entropy(scores[:rows], targets[:rows], differentiated=False).double(),
            expected[:rows],
            rtol=1e-5,
            atol=1e-5,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [37, 1000, 65_024])
def test_far_out(vocabulary, dtype):
    scores = torch.zeros(6, vocabulary, device="cuda", dtype=dtype)
    targets = torch.full((6,), 20, device="cuda")
    scores[0] = 1e4  # all equal
    scores[1] = -1e4
    scores[2, 20] = 1e4  # known
    scores[3, 21] = 1e4  # another is
    scores[4, 20:] = -1e4
    scores[5] = -INFINITY
    scores[5, 20] = 3.0
    expected, gradient = exact(scores, targets)
    losses = cross_entropy(scores, targets, differentiated=True)
    check(scores, losses, expected, gradient)
    assert losses[2] == losses[5] == 0
    assert not scores[5].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [37, 257, 20_000])
def test_what_is_not_finite(vocabulary, dtype):
    _, scores, targets = drawn(9, vocabulary, dtype)
    targets[:] = 11
    scores[0, 11] = -INFINITY  # the target cannot be
    scores[1, ::2] = -INFINITY
    scores[2] = -INFINITY
    scores[3, 11] = NAN
    scores[4, vocabulary - 1] = NAN
    scores[5, 0] = INFINITY
    scores[6, 11] = INFINITY
    scores[7] = NAN
    wide = scores.double()
    expected, gradient = exact(wide, targets)
    losses = cross_entropy(scores, targets, differentiated=True)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert losses[0] == INFINITY
    assert losses[[2, 3, 4, 5, 6, 7]].isnan().all()
    assert losses[[1, 8]].isfinite().all()
    assert scores[0, 11] == -1
    torch.testing.assert_close(scores.double(), gradient, rtol=torch.finfo(dtype).eps + 1e-5, atol=2e-6, equal_nan=True)


def test_targets_out_of_range_write_nothing_else():
    around, scores, targets = drawn(4, 101, torch.float32, offset=4)
    softmax = torch.softmax(scores.double(), -1)
    targets[:] = torch.tensor([-1, 101, 2**40, -(2**40)], device="cuda")
    losses = cross_entropy(scores, targets, differentiated=True)
    assert losses.isnan().all()
    torch.testing.assert_close(scores.double(), softmax, rtol=2e-5, atol=1e-9)
    assert torch.equal(around[:4], torch.full_like(around[:4], 7.0))
    assert torch.equal(around[4 + 404 :], torch.full_like(around[:16], 7.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [257, 65_024])
def test_the_same_bits_at_every_run(vocabulary, dtype):
    _, scores, targets = drawn(64, vocabulary, dtype)
    first = scores.clone()
    losses = cross_entropy(first, targets, differentiated=True)
    for _ in range(5):
        again = scores.clone()
        assert torch.equal(cross_entropy(again, targets, differentiated=True), losses)
        assert torch.equal(again, first)


def test_scores_past_two_billion():
    rows, vocabulary = 33_100, 65_024
    if torch.cuda.mem_get_info()[0] < 6e9:
        pytest.skip("needs 6 GB of memory")
    scores = torch.zeros(rows, vocabulary, device="cuda", dtype=torch.bfloat16)
    targets = torch.arange(rows, device="cuda")
    for part, own in zip(scores.split(8192), targets.split(8192), strict=True):
        part.scatter_(1, own[:, None], 12.0)
    losses = cross_entropy(scores, targets, differentiated=True)
    expected, gradient = exact(torch.zeros(1, vocabulary, device="cuda").index_fill_(1, targets[:1], 12.0), targets[:1])
    torch.testing.assert_close(losses.double(), expected.expand(rows), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores[-1, rows - 1].double(), gradient[0, 0], rtol=8e-3, atol=0)
    torch.testing.assert_close(scores[-1, -1].double(), gradient[0, -1], rtol=8e-3, atol=0)


def test_no_rows_and_float64():
    empty = torch.empty(0, dtype=torch.int64, device="cuda")
    assert cross_entropy(torch.empty(0, 8, device="cuda"), empty, differentiated=True).shape == (0,)
    _, scores, targets = drawn(3, 10, torch.float64)
    expected, gradient = exact(scores, targets)
    losses = cross_entropy(scores, targets, differentiated=True)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(scores, gradient)


def test_streams_and_graphs():
    _, scores, targets = drawn(5, 2000, torch.bfloat16)
    expected, _ = exact(scores, targets)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        losses = cross_entropy(scores, targets, differentiated=False)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        losses = cross_entropy(scores, targets, differentiated=False)
    scores.neg_()
    graph.replay()
    torch.testing.assert_close(losses.double(), exact(scores, targets)[0], rtol=1e-5, atol=1e-5)
