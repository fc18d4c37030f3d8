"""Documents of different lengths as padded batches."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from warpbus.models.documents import Document


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
