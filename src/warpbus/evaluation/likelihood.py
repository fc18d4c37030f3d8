"""Perplexity, and the divergence of models from a reference, over the same documents in batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from warpbus.errors import DataError, NumericError
from warpbus.models import Decoder
from warpbus.models.documents import Document
from warpbus.models.layers import CausalAttention, WholeAttention


def grouped(lengths: Sequence[int], tokens: int = 8192) -> Iterator[list[int]]:
    """The numbers of rows of similar length, at most `tokens` tokens each time they are padded to one length."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    while order:
        count = max(1, tokens // max(1, lengths[order[-1]]))
        picked, order = order[-count:], order[:-count]
        yield picked


def batches(
    documents: Sequence[Document], device: torch.device, tokens: int = 8192
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Batches of documents of similar length, padded on the right, at most `tokens` tokens each.

    Padding needs no mask: attention is causal, so no token sees what stands to its right.

    Yields:
        the documents' indexes, their ids int64 `[batch, longest]`, and bool `[batch, longest]`: true where the token
        is to be predicted (never the first of a document, which has nothing before it).
    """
    for picked in grouped([len(document.ids) for document in documents], tokens):
        longest = len(documents[picked[-1]].ids)
        ids = torch.zeros(len(picked), longest, dtype=torch.int64)
        predicted = torch.zeros(len(picked), longest, dtype=torch.bool)
        for row, index in enumerate(picked):
            document = documents[index]
            ids[row, : len(document.ids)] = torch.tensor(document.ids)
            predicted[row, : len(document.ids)] = torch.tensor(document.answers)
        predicted[:, 0] = False
        yield picked, ids.to(device), predicted.to(device)


@dataclass(frozen=True)
class Score:
    """The scores of a model on some documents.

    Attributes:
        perplexity: exp of the mean negative log-likelihood per token.
        divergence: mean Kullback-Leibler divergence of the model from the reference, in nats per token.
        agreement: share of tokens for which model and reference have the same most likely token.
        tokens: number of predicted tokens.
        by_position: perplexity and divergence of the predicted tokens with so many tokens before them, by a text such
            as "512-2,047", if there are several such ranges; else None.
        likelihoods: negative log-likelihood of each document, the sum over its predicted tokens.
        divergences: divergence of each document, the sum over its predicted tokens.
        counts: predicted tokens of each document.
    """

    perplexity: float
    divergence: float
    agreement: float
    tokens: int
    by_position: dict[str, list[float]] | None = None
    likelihoods: tuple[float, ...] = ()
    divergences: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()


_Context = TypeVar("_Context", bound=WholeAttention)

# Logits in memory at a time, per model: 256 MiB in float32.
_HELD = 2**26

_RANGES = (0, 512, 2048, 8192, 32768)
"""Where ranges of positions begin; the last one has no end."""


@torch.no_grad()
def score(
    models: Mapping[str, Decoder],
    documents: Sequence[Document],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Score]:
    """Score models on documents; the first model is the reference of the others.

    A model with scales for an 8-bit KV cache attends to keys and values that are rounded so, as in decoding. Models may
    be on different devices; likelihoods are computed in float32 and summed in float64.

    Args:
        models: by name, all with the same vocabulary.
        documents: not empty; their answers are predicted, except a document's first token.
        progress: called with the number of finished documents and their total.

    Raises:
        DataError: the documents have nothing to predict.
        NumericError: a model's scores are NaN or infinite.
    """
    device = {name: next(model.parameters()).device for name, model in models.items()}
    sums = {name: torch.zeros(len(_RANGES), 3, dtype=torch.float64) for name in models}
    counts = torch.zeros(len(_RANGES), dtype=torch.int64)
    of_documents = {name: torch.zeros(len(documents), 3, dtype=torch.float64) for name in models}
    lengths = torch.zeros(len(documents), dtype=torch.int64)
    reference_name = next(iter(models))
    predicted_tokens = done = 0
    for picked, ids, predicted in batches(documents, device[reference_name]):
        hidden, targets = {}, ids[:, 1:][predicted[:, 1:]]
        rows, before = predicted[:, 1:].cpu().nonzero().unbind(1)
        before = before + 1  # tokens before each target
        owners = torch.tensor(picked)[rows]  # the document of each target
        ranges = torch.bucketize(before, torch.tensor(_RANGES), right=True) - 1
        counts += torch.bincount(ranges, minlength=len(_RANGES))
        lengths += torch.bincount(owners, minlength=len(documents))
        for name, model in models.items():
            # The logits of a position predict the token after it.
            chosen = predicted[:, 1:].to(device[name])
            states = model.hidden(ids.to(device[name]), context=as_cached(CausalAttention(), model))
            hidden[name] = states[:, :-1][chosen]
        at_once = max(1, _HELD // models[reference_name].config.vocab_size)
        for start in range(0, len(targets), at_once):
            piece = slice(start, start + at_once)
            reference = models[reference_name].logits(hidden[reference_name][piece]).float().log_softmax(-1)
            for name, model in models.items():
                log_probs = reference
                if name != reference_name:
                    log_probs = model.logits(hidden[name][piece]).float().log_softmax(-1)
                found = _scores(log_probs, reference.to(device[name]), targets[piece].to(device[name])).cpu()
                sums[name].index_add_(0, ranges[piece], found)
                of_documents[name].index_add_(0, owners[piece], found)
        predicted_tokens += len(targets)
        done += len(picked)
        progress(done, len(documents))
    if predicted_tokens == 0:
        raise DataError("the documents have nothing to predict: expected texts, or conversations with answers")
    scores = {}
    for name, total in sums.items():
        mean = total.sum(0) / predicted_tokens
        if not mean.isfinite().all():
            raise NumericError(
                f"{name}: its scores are NaN or infinite: the checkpoint is damaged, or its values overflow the "
                "dtype (try bfloat16 or float32)"
            )
        perplexity, divergence, agreement = float(mean[0].exp()), float(mean[1]), float(mean[2])
        # Rounding can make a divergence of zero slightly negative.
        by_position = _by_position(total, counts.tolist())
        likelihoods, divergences, _ = (tuple(column) for column in of_documents[name].T.tolist())
        scores[name] = Score(
            perplexity,
            max(0.0, divergence),
            agreement,
            predicted_tokens,
            by_position,
            likelihoods,
            divergences,
            tuple(lengths.tolist()),
        )
    return scores


def as_cached(context: _Context, model: Decoder) -> _Context:
    """The context, with keys and values as an 8-bit KV cache has them if the model's checkpoint has scales for one."""
    if model.kv_scales is not None:
        context.stored = model.kv_scales.rounded
    return context


def _by_position(sums: Tensor, counts: Sequence[int]) -> dict[str, list[float]] | None:
    """See `Score`, from the sums of `_scores` over each range."""
    found = {}
    for start, end, total, count in zip(_RANGES, (*_RANGES[1:], None), sums, counts, strict=True):
        if count:
            text = f"{start:,} and more" if end is None else f"{start:,}-{end - 1:,}"
            found[text] = [float((total[0] / count).exp()), max(0.0, float(total[1] / count))]
    return found if len(found) > 1 else None


def _scores(log_probs: Tensor, reference: Tensor, targets: Tensor) -> Tensor:
    """Of each row `[tokens, vocabulary]`: negative log-likelihood, divergence from the reference, whether both agree;
    float64 `[tokens, 3]`."""
    likelihood = -log_probs.gather(1, targets[:, None])[:, 0]
    divergence = (reference.exp() * (reference - log_probs)).sum(-1)
    agreements = reference.argmax(-1) == log_probs.argmax(-1)
    return torch.stack([each.double() for each in (likelihood, divergence, agreements)], dim=1)
