"""Perplexity, and the divergence of models from a reference, over the same documents."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.errors import DataError, NumericError
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


# Scores of the whole vocabulary that are held at a time, for each model: 256 MiB in float32.
_HELD = 2**26


@torch.no_grad()
def score(
    models: Mapping[str, Decoder],
    documents: Sequence[Document],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Score]:
    """Score models on documents; the first model is the reference of the others.

    Each model may be on a device of its own; likelihoods are computed in float32 and summed in float64.

    Args:
        models: of one vocabulary, by name.
        documents: none empty; their answers are what is predicted, but never a document's first token.
        progress: called with the documents that are done and all there are.

    Raises:
        DataError: if nothing in the documents is to be predicted.
        NumericError: if a model's scores are NaN or infinite.
    """
    device = {name: next(model.parameters()).device for name, model in models.items()}
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in models}
    reference_name = next(iter(models))
    predicted_tokens = done = 0
    for picked, ids, predicted in batches(documents, device[reference_name]):
        hidden, targets = {}, ids[:, 1:][predicted[:, 1:]]
        for name, model in models.items():
            # The logits of a position predict the token after it.
            chosen = predicted[:, 1:].to(device[name])
            hidden[name] = model.hidden(ids.to(device[name]))[:, :-1][chosen]
        rows = max(1, _HELD // models[reference_name].config.vocab_size)
        for start in range(0, len(targets), rows):
            piece = slice(start, start + rows)
            reference = models[reference_name].logits(hidden[reference_name][piece]).float().log_softmax(-1)
            for name, model in models.items():
                log_probs = reference
                if name != reference_name:
                    log_probs = model.logits(hidden[name][piece]).float().log_softmax(-1)
                sums[name] += _sums(log_probs, reference.to(device[name]), targets[piece].to(device[name])).cpu()
        predicted_tokens += len(targets)
        done += len(picked)
        progress(done, len(documents))
    if predicted_tokens == 0:
        raise DataError("the documents hold nothing to predict: expected texts, or conversations with answers")
    scores = {}
    for name, total in sums.items():
        mean = total / predicted_tokens
        if not mean.isfinite().all():
            raise NumericError(
                f"{name}: its scores are NaN or infinite: the checkpoint is damaged, or its numbers do not fit the "
                "dtype (try bfloat16 or float32)"
            )
        perplexity, divergence, agreement = float(mean[0].exp()), float(mean[1]), float(mean[2])
        # Rounding can leave a divergence of nothing a little below zero.
        scores[name] = Score(perplexity, max(0.0, divergence), agreement, predicted_tokens)
    return scores


def _sums(log_probs: Tensor, reference: Tensor, targets: Tensor) -> Tensor:
    """Over the rows `[tokens, vocabulary]`: negative log-likelihood, divergence from the reference, agreements."""
    likelihood = log_probs.gather(1, targets[:, None]).sum(dtype=torch.float64)
    divergence = (reference.exp() * (reference - log_probs)).sum(-1).sum(dtype=torch.float64)
    agreements = (reference.argmax(-1) == log_probs.argmax(-1)).sum(dtype=torch.float64)
    return torch.stack([-likelihood, divergence, agreements])
