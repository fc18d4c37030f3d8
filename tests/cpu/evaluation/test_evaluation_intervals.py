"""Confidence intervals: against the normal approximation, and what they are for one document and for equal models."""

import math
from dataclasses import replace

import pytest
import torch

from warpbus.evaluation import Score, confidence

DOCUMENTS = 400


def scored(likelihoods: torch.Tensor, divergences: torch.Tensor, counts: torch.Tensor) -> Score:
    total = int(counts.sum())
    return Score(
        perplexity=math.exp(float(likelihoods.sum()) / total),
        divergence=float(divergences.sum()) / total,
        agreement=1.0,
        tokens=total,
        likelihoods=tuple(likelihoods.tolist()),
        divergences=tuple(divergences.tolist()),
        counts=tuple(counts.tolist()),
    )


@pytest.fixture
def pair() -> tuple[Score, Score]:
    """A model and its reference, whose losses differ from document to document by far more than from each other."""
    generator = torch.Generator().manual_seed(3)
    counts = torch.randint(10, 100, (DOCUMENTS,), generator=generator)
    common = counts * (3.5 + torch.randn(DOCUMENTS, generator=generator, dtype=torch.float64))
    own = counts * (0.02 + 0.05 * torch.randn(DOCUMENTS, generator=generator, dtype=torch.float64))
    divergence = counts * (0.03 + 0.01 * torch.randn(DOCUMENTS, generator=generator, dtype=torch.float64))
    return scored(common + own, divergence, counts), scored(common, torch.zeros_like(divergence), counts)


def test_intervals_are_those_of_the_normal_approximation(pair: tuple[Score, Score]) -> None:
    found, reference = pair
    sure = confidence(found, reference)
    assert sure is not None
    counts = torch.tensor(found.counts, dtype=torch.float64)
    for limits, sums in (
        (
            [math.log1p(limit) for limit in sure.change],
            torch.tensor(found.likelihoods) - torch.tensor(reference.likelihoods),
        ),
        (list(sure.divergence), torch.tensor(found.divergences)),
    ):
        # The delta method for a ratio of sums.
        mean = sums.sum() / counts.sum()
        error = float((sums - mean * counts).square().sum().sqrt() / counts.sum())
        assert limits[0] == pytest.approx(float(mean) - 1.96 * error, abs=0.3 * error)
        assert limits[1] == pytest.approx(float(mean) + 1.96 * error, abs=0.3 * error)


def test_interval_is_narrow_because_documents_are_paired(pair: tuple[Score, Score]) -> None:
    found, reference = pair
    sure = confidence(found, reference)
    shuffled = tuple(torch.tensor(reference.likelihoods)[torch.randperm(DOCUMENTS)].tolist())
    unpaired = confidence(found, replace(reference, likelihoods=shuffled))
    assert sure is not None
    assert unpaired is not None
    assert sure.change[1] - sure.change[0] < 0.2 * (unpaired.change[1] - unpaired.change[0])


def test_same_seed_gives_the_same_interval_in_any_number_of_pieces(
    pair: tuple[Score, Score], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert confidence(*pair, seed=1) == confidence(*pair, seed=1) != confidence(*pair, seed=2)
    whole = confidence(*pair)
    monkeypatch.setattr("warpbus.evaluation.intervals._HELD", 7 * DOCUMENTS)
    assert confidence(*pair) == whole


def test_equal_models_differ_by_nothing(pair: tuple[Score, Score]) -> None:
    sure = confidence(pair[0], pair[0])
    assert sure is not None
    assert sure.change == sure.divergence == (0.0, 0.0)


def test_one_document_has_no_interval() -> None:
    three, counts = torch.tensor([3.0, 0.0, 0.0]), torch.tensor([5, 0, 0])
    assert confidence(scored(three, three, counts), scored(three, three, counts)) is None
