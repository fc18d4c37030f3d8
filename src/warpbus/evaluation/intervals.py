"""Confidence intervals of a model's scores: how much they depend on which documents were drawn.

Two models that are scored on the same documents share most of the noise, because a document that is difficult for one
is difficult for the other. So the bootstrap (Efron, 1979) is paired: each resample draws documents with replacement and
computes the scores of the model and of its reference on the same draw.
"""

from dataclasses import dataclass

import torch

from warpbus.evaluation.likelihood import Score

DRAWS = 2000
"""Resamples; more of them change a limit by less than a twentieth of the interval."""

LEVEL = 0.95
"""The share of resamples within an interval."""

_HELD = 2**22  # documents of resamples in memory at a time

Interval = tuple[float, float]


@dataclass(frozen=True)
class Confidence:
    """Intervals that contain `LEVEL` of the resamples.

    Attributes:
        change: of the relative change of the perplexity from the reference's.
        divergence: of the model's mean divergence minus the reference's, in nats per token. Where the reference is the
            unquantized model, whose divergence is zero, this is the model's mean divergence.
    """

    change: Interval
    divergence: Interval


def confidence(found: Score, reference: Score, *, draws: int = DRAWS, seed: int = 0) -> Confidence | None:
    """Compare a model with a reference by the paired bootstrap.

    Args:
        found, reference: of the same documents, from one call of `score`.
        draws: resamples.
        seed: of the draws; the same seed gives the same intervals.

    Returns:
        the intervals; None if fewer than two documents have predicted tokens.
    """
    counts = torch.tensor(found.counts, dtype=torch.float64)
    used = counts > 0
    if int(used.sum()) < 2:
        return None
    columns = [
        torch.tensor(found.likelihoods) - torch.tensor(reference.likelihoods),
        torch.tensor(found.divergences) - torch.tensor(reference.divergences),
        counts,
    ]
    sums = torch.stack([column.double() for column in columns], dim=1)[used]
    generator = torch.Generator().manual_seed(seed)
    drawn, documents = [], len(sums)
    at_once = max(1, _HELD // documents)
    for start in range(0, draws, at_once):
        picked = torch.randint(documents, (min(at_once, draws - start), documents), generator=generator)
        drawn.append(sums[picked].sum(1))
    likelihood, divergence, tokens = torch.cat(drawn).unbind(1)
    changes, divergences = (likelihood / tokens).expm1(), divergence / tokens
    ends = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    limits = [tuple(each.quantile(ends).tolist()) for each in (changes, divergences)]
    return Confidence(*limits)
