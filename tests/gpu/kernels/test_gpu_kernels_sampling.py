"""Argmax and sampling on a GPU: against the sorted probabilities in float64, alone and in batches, in graphs."""

import pytest
import torch

from warpbus.kernels.ops.sampling import argmax, sample
from warpbus.kernels.reference import sampling as reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = [1, 2, 7, 1003, 8192, 65_024, 151_553, 152_064]
# temperature, top_k, top_p, min_p
CONTROLS = [(1.0, 0, 1.0, 0.0), (0.7, 0, 0.8, 0.0), (1.3, 50, 1.0, 0.0), (1.0, 1000, 0.5, 0.0), (2.0, 1, 0.3, 0.0)]
CONTROLS += [(50.0, 0, 0.999, 0.0), (1.5, 0, 1.0, 0.1), (2.0, 300, 0.9, 0.03), (1.0, 0, 0.9, 1.0)]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def scores(kind, rows, width, dtype):
    drawn = random(rows, width)
    if kind == "ties":
        drawn = drawn.round()  # with zeros of both signs
    elif kind == "equal":
        drawn = torch.zeros_like(drawn)
    elif kind == "forbidden":
        drawn[:, 1::3] = float("-inf")
    return (drawn * 4).to(dtype)


def columns(rows, temperature, top_k, top_p, min_p=0.0, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    uniform = torch.rand(rows, generator=generator, device="cuda")
    uniform[-1:] = 1.0  # what float32 makes of the largest numbers of float64
    uniform[:-1][-1:] = 0.0
    return (
        torch.full((rows,), temperature, device="cuda"),
        torch.full((rows,), top_k, dtype=torch.int32, device="cuda"),
        torch.full((rows,), top_p, device="cuda"),
        torch.full((rows,), min_p, device="cuda"),
        uniform,
    )


def poison(rows):
    """Other bits in the memory that the next tokens and best scores are given."""
    held = torch.full((rows,), -1, device="cuda"), torch.full((rows,), float("nan"), device="cuda")
    del held


def check(tokens, logits, temperature, top_k, top_p, min_p, uniform):
    """A token is right if the random number falls into its part of the probabilities, up to the error of the sums.

    Each weight has an error of a few units of float32: its exponent, at most 32, times the errors of 1 / temperature,
    of the product and of the exponential, so 4e-6 together; and 2^-32 of the largest by rounding to an integer, of
    which there are as many as tokens. The sums themselves are exact.
    """
    width = logits.shape[1]
    tolerance = 4e-6 + width * 2**-32
    order = (logits.float() + 0.0).sort(dim=-1, descending=True, stable=True).indices
    scaled = logits.double().gather(1, order) / temperature.double()[:, None]
    kept = torch.where((top_k > 0) & (top_k < width), top_k, width)
    scaled[torch.arange(width, device="cuda") >= kept[:, None]] = float("-inf")
    rank = (order == tokens[:, None]).double().argmax(-1, keepdim=True)
    assert (tokens >= 0).all()
    assert (tokens < width).all()
    assert (rank[:, 0] < kept).all()
    # Tokens within the error of min_p may stay or not.
    ratios = (scaled - scaled[:, :1]).exp()
    right = torch.zeros_like(tokens, dtype=torch.bool)
    for slack in (-1e-5, 1e-5):
        outside = ratios < min_p.double()[:, None] * (1 + slack)
        outside[:, 0] = False
        probabilities = scaled.masked_fill(outside, float("-inf")).softmax(-1)
        cumulated = probabilities.cumsum(-1)
        before = cumulated - probabilities
        before[:, 0] = float("-inf")  # the first always stays
        limit = top_p.double()[:, None]
        least, most = (cumulated.masked_fill(before >= limit + sign * tolerance, 0).amax(-1) for sign in (-1, 1))
        first, last = (sums.gather(1, rank)[:, 0] for sums in (before, cumulated))
        right |= (
            ~outside.gather(1, rank)[:, 0]
            & (first < top_p + tolerance)
            & (first <= uniform * most + tolerance)
            & (last >= uniform * least - tolerance)
        )
    assert right.all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 5])
def test_argmax(rows, width, dtype):
    for kind in ("normal", "ties", "equal", "forbidden"):
        logits = scores(kind, rows, width, dtype)
        poison(rows)
        tokens, best = argmax(logits)
        expected, expected_best = reference.argmax(logits.cpu())
        assert torch.equal(tokens.cpu(), expected)
        assert torch.equal(best.cpu(), expected_best)


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_of_many_rows(dtype):
    logits = scores("ties", 256, 65_024, dtype)
    tokens, best = argmax(logits)
    assert torch.equal(best, logits.float().amax(-1))
    assert torch.equal(tokens, (logits == logits.amax(-1, keepdim=True)).double().argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_sample(width, dtype):
    for kind in ("normal", "ties", "equal", "forbidden"):
        logits = scores(kind, 6, width, dtype)
        for control in CONTROLS:
            controls = columns(6, *control)
            poison(6)
            tokens, best = sample(logits, *controls)
            check(tokens, logits, *controls)
            assert torch.equal(best, logits.float().amax(-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_what_the_sorted_probabilities_draw(dtype):
    logits = random(1000, 500, dtype=dtype) * 4
    for control in CONTROLS:
        controls = columns(1000, *control)
        expected, _ = reference.sample(logits.cpu(), *(column.cpu() for column in controls))
        # A random number within the error of a sum may fall to the neighbour.
        assert (sample(logits, *controls)[0].cpu() != expected).sum() <= 3


def test_controls_of_each_row():
    logits = random(len(CONTROLS), 65_024, dtype=torch.bfloat16) * 3
    controls = [torch.cat(parts) for parts in zip(*(columns(1, *control) for control in CONTROLS), strict=True)]
    controls[4] = torch.linspace(0.1, 0.9, len(CONTROLS), device="cuda")
    together, _ = sample(logits, *controls)
    check(together, logits, *controls)
    for row in range(len(CONTROLS)):
        here = slice(row, row + 1)
        assert torch.equal(sample(logits[here], *(column[here] for column in controls))[0], together[here])


@pytest.mark.parametrize("dtype", DTYPES)
def test_controls_beyond_their_ranges(dtype):
    logits = random(1000, 500, dtype=dtype) * 4
    logits[:, ::3] = float("-inf")
    for temperature, min_p in ((float("inf"), 0.0), (float("nan"), 0.0), (1.0, 1.5), (float("inf"), 7.0)):
        controls = columns(1000, temperature, 0, 1.0, min_p)
        expected, _ = reference.sample(logits.cpu(), *(column.cpu() for column in controls))
        poison(1000)
        tokens = sample(logits, *controls)[0].cpu()
        assert ((tokens >= 0) & (tokens < 500) & (tokens % 3 > 0)).all()
        assert (tokens != expected).sum() <= 3


def test_the_same_at_every_run():
    logits = scores("normal", 64, 152_064, torch.float16)
    controls = columns(64, 1.0, 0, 0.95)
    first, _ = sample(logits, *controls)
    assert all(torch.equal(sample(logits, *controls)[0], first) for _ in range(20))


def test_greedy_is_argmax():
    logits = scores("ties", 33, 65_024, torch.float16)
    tokens, best = argmax(logits)
    greedy = sample(logits, *columns(33, 1.0, 1, 1.0))
    assert torch.equal(greedy[0], tokens)
    assert torch.equal(greedy[1], best)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bad_scores_show(dtype):
    logits = random(4, 9001).to(dtype)
    logits[0, 8000], logits[1, 4], logits[2] = float("nan"), float("inf"), float("-inf")
    for best in (argmax(logits)[1], sample(logits, *columns(4, 1.0, 0, 0.9))[1]):
        assert best.isfinite().tolist() == [False, False, False, True]
        assert best[0].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_begin_anywhere(dtype):
    logits = (random(4 * 8192 + 1) * 3).to(dtype)[1:].view(4, 8192)
    controls = columns(4, 1.0, 0, 0.9)
    for view in (logits, logits[:, ::2], logits[:, 5:]):
        check(sample(view, *controls)[0], view, *controls)
        assert torch.equal(argmax(view)[1], view.float().amax(-1))


def test_no_rows():
    assert argmax(torch.empty(0, 5, device="cuda"))[0].shape == (0,)
    assert sample(torch.empty(0, 5, device="cuda"), *columns(0, 1.0, 0, 1.0))[0].shape == (0,)


def test_streams_and_graphs():
    logits, controls = scores("normal", 3, 65_024, torch.float16), columns(3, 0.8, 0, 0.8)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tokens, _ = sample(logits, *controls)
        best, _ = argmax(logits)
    torch.cuda.current_stream().wait_stream(stream)
    check(tokens, logits, *controls)
    assert torch.equal(best, logits.argmax(-1))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        best, _ = argmax(logits)
        tokens, _ = sample(logits, *controls)
    for seed in range(3):
        logits.copy_(random(3, 65_024, seed=seed + 1) * 4)
        controls[4].uniform_()
        graph.replay()
        check(tokens, logits, *controls)
        assert torch.equal(best, logits.argmax(-1))
