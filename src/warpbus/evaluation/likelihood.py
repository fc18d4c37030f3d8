"""Perplexity, and the divergence of models from a reference, over the same documents."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from warpbus.evaluation.batches import batches
from warpbus.models import Decoder
from warpbus.models.documents import Document


@dataclass(frozen=True)
class Score:
    """What a model makes of the predicted tokens of some documents.

    Attributes:
        perplexity: exp of the mean negative log-likelihood of a token.
        divergence: mean Kullback-Leibler divergence of the model from the reference, in nats a token.
        agreement: share of tokens where the model's likeliest token is the reference's.
        tokens: how many tokens were predicted.
    """

    perplexity: float
    divergence: float
    agreement: float
    tokens: int


@torch.no_grad()
def score(
    models: Mapping[str, Decoder],
    documents: Sequence[Document],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Score]:
    """Score models on documents; the first model is the reference of the others.

    Each model may be on a device of its own; likelihoods are summed in float64.
    """
    device = {name: next(model.parameters()).device for name, model in models.items()}
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in models}
    reference_name = next(iter(models))
    predicted_tokens = done = 0
    for picked, ids, predicted in batches(documents, device[reference_name]):
        reference = None
        for name, model in models.items():
            tokens, chosen = ids.to(device[name]), predicted.to(device[name])
            # The logits of a position predict the token after it.
            hidden = model.hidden(tokens)[:, :-1][chosen[:, 1:]]
            log_probs = model.logits(hidden).float().log_softmax(-1)
            targets = tokens[:, 1:][chosen[:, 1:]]
            if reference is None:
                reference = log_probs
                predicted_tokens += len(targets)
            there = reference.to(device[name])
            nll = -log_probs.gather(1, targets[:, None]).sum(dtype=torch.float64)
            divergence = (there.exp() * (there - log_probs)).sum(dtype=torch.float64)
            agreement = (there.argmax(-1) == log_probs.argmax(-1)).sum(dtype=torch.float64)
            sums[name] += torch.stack([nll, divergence, agreement]).cpu()
        done += len(picked)
        progress(done, len(documents))
    scores = {}
    for name, total in sums.items():
        nll_mean, divergence_mean, agreement_share = (total / max(1, predicted_tokens)).tolist()
        scores[name] = Score(math.exp(nll_mean), max(0.0, divergence_mean), agreement_share, predicted_tokens)
    return scores
