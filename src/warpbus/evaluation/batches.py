"""Documents of different lengths as padded batches."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from warpbus.models.documents import Document


def batches(
    documents: Sequence[Document], device: torch.device, tokens: int = 8192
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Batches of documents of similar length, padded on the right, at most `tokens` tokens each.

    Padding needs no mask: attention is causal, so no token sees what stands to its right.

    Yields:
        the documents' indexes, their ids int64 `[batch, longest]`, and bool `[batch, longest]`: true where the token
        is to be predicted (never the first of a document, which has nothing before it).
    """
    order = sorted(range(len(documents)), key=lambda index: len(documents[index].ids))
    while order:
        longest = len(documents[order[-1]].ids)
        count = max(1, tokens // longest)
        picked, order = order[-count:], order[:-count]
        ids = torch.zeros(len(picked), longest, dtype=torch.int64)
        predicted = torch.zeros(len(picked), longest, dtype=torch.bool)
        for row, index in enumerate(picked):
            document = documents[index]
            ids[row, : len(document.ids)] = torch.tensor(document.ids)
            predicted[row, : len(document.ids)] = torch.tensor(document.answers)
        predicted[:, 0] = False
        yield picked, ids.to(device), predicted.to(device)
