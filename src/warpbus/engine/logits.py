"""Logits processors: penalties, biases and masks of requests, applied before a token is sampled.

They run for the rows that need them: in this file, `[rows, vocabulary]` counts these rows only. Nothing waits for the
GPU: data of the host is copied from pinned memory.
"""

import os
from collections import abc
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from warpbus.engine.sequence import Sequence

_OF_PROMPT = 1 << 30
"""Added to the count of each token of the prompt."""

_MOST_THREADS = 8
_ALONE = 4  # up to so many sequences, masks are computed without threads


@dataclass(frozen=True)
class LogitsRow:
    """A row of a batch: a sequence, and the draft tokens between its last token and the one that the row samples."""

    sequence: Sequence
    drafts: tuple[int, ...] = ()

    @property
    def penalized(self) -> bool:
        return self.sequence.params.penalized

    @property
    def too_short(self) -> bool:
        """Stop tokens are not allowed yet."""
        return len(self.sequence.token_ids) + len(self.drafts) < self.sequence.params.min_tokens

    @property
    def masked(self) -> bool:
        return self.sequence.matcher is not None or self.too_short

    @property
    def processed(self) -> bool:
        return self.penalized or bool(self.sequence.params.logit_bias) or self.masked


def to_device(
    values: abc.Sequence[float] | abc.Sequence[int] | abc.Sequence[abc.Sequence[int]] | np.ndarray,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Copy values of the host to a tensor of the device; to a GPU, asynchronously."""
    host = torch.as_tensor(values, dtype=dtype)
    return pinned(host).to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def pinned(host: Tensor) -> Tensor:
    """A copy in pinned memory; `Tensor.pin_memory` would use the wrong device while a remote one is connected."""
    return torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)


class Penalties:
    """Counts the tokens of the penalized rows, and lowers their logits.

    The counts of sequences that stay in the batch are kept on the device; those of new ones come from the host.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows: list[LogitsRow] = []
        self._counted: list[int] = []  # counted tokens of each row's answer, drafts excluded
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._where = torch.zeros(0, dtype=torch.int64, device=device)
        self._factors = torch.zeros(3, 0, 1, device=device)

    def arrange(self, rows: abc.Sequence[LogitsRow], where: abc.Sequence[int]) -> None:
        """Set the penalized rows.

        Args:
            where: their indices in the batch.
        """
        before = {id(row.sequence): at for at, row in enumerate(self._rows) if not row.drafts}
        sources = [before.get(id(row.sequence), -1) for row in rows]
        counted = [self._counted[source] if source >= 0 else 0 for source in sources]
        if sources != list(range(len(self._rows))):
            kept = [at for at, source in enumerate(sources) if source >= 0]
            counts = torch.zeros(len(rows), self._vocab_size, dtype=torch.int32, device=self._device)
            if kept:
                old = self._counts.index_select(0, self._index([sources[at] for at in kept]))
                counts.index_copy_(0, self._index(kept), old)
            self._counts = counts
        self._rows, self._counted = list(rows), counted
        self._where = self._index(where)
        params = [row.sequence.params for row in rows]
        factors = [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in params]
        self._factors = to_device(
            np.array(factors, dtype=np.float32).reshape(-1, 3).T.copy(), torch.float32, self._device
        )
        self._factors = self._factors[:, :, None]
        prompts = [(at, set(row.sequence.prompt)) for at, row in enumerate(rows) if sources[at] < 0]
        self._add(prompts, _OF_PROMPT)
        self._add([(at, row.drafts) for at, row in enumerate(rows)], 1)
        self._catch_up()

    def saw(self, tokens: Tensor) -> None:
        """Count the sampled tokens `[batch]`, which the host need not know yet."""
        if not self._rows:
            return
        chosen = tokens.index_select(0, self._where)
        self._counts.scatter_add_(1, chosen[:, None], torch.ones_like(chosen, dtype=torch.int32)[:, None])
        self._counted = [count + 1 for count in self._counted]

    def apply(self, scores: Tensor) -> Tensor:
        """The penalized logits, float32 `[rows, vocabulary]`."""
        self._catch_up()
        repetition, presence, frequency = self._factors
        scores = torch.where(
            self._counts > 0, torch.where(scores > 0, scores / repetition, scores * repetition), scores
        )
        answered = self._counts & (_OF_PROMPT - 1)
        return scores - frequency * answered - presence * (answered > 0)

    def _catch_up(self) -> None:
        """Count the tokens of the sequences that were not passed to `saw`: accepted drafts."""
        self._add([(at, row.sequence.token_ids[self._counted[at] :]) for at, row in enumerate(self._rows)], 1)
        self._counted = [
            max(count, len(row.sequence.token_ids)) for count, row in zip(self._counted, self._rows, strict=True)
        ]

    def _add(self, tokens: abc.Sequence[tuple[int, Iterable[int]]], amount: int) -> None:
        indices = [at * self._vocab_size + token for at, of_row in tokens for token in of_row]
        if indices:
            index = self._index(indices)
            self._counts.view(-1).scatter_add_(0, index, torch.full_like(index, amount, dtype=torch.int32))

    def _index(self, indices: abc.Sequence[int]) -> Tensor:
        return to_device(indices, torch.int64, self._device)


class Biases:
    """The logit biases of rows."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._indices: Tensor | None = None
        self._values = torch.zeros(0, device=device)

    def arrange(self, rows: abc.Sequence[LogitsRow]) -> None:
        """Set the rows."""
        found = [
            # An id outside the vocabulary, which `SamplingParams.check_ids` refuses, would change the next row.
            (at * self._vocab_size + token, bias)
            for at, row in enumerate(rows)
            for token, bias in row.sequence.params.logit_bias.items()
            if token < self._vocab_size
        ]
        self._indices = to_device([index for index, _ in found], torch.int64, self._device) if found else None
        self._values = to_device([bias for _, bias in found], torch.float32, self._device)

    def add(self, scores: Tensor) -> None:
        """Add the biases in place to contiguous logits, float32 `[rows, vocabulary]`."""
        if self._indices is not None:
            scores.view(-1).scatter_add_(0, self._indices, self._values)


class Masks:
    """Masks the tokens that a grammar or `min_tokens` forbids: one bit per token, computed for every step."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._words = (vocab_size + 31) // 32
        self._device = device
        self._powers = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
        # Grammars compute their masks without the GIL.
        self._threads = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "grammar")

    def apply(self, rows: abc.Sequence[LogitsRow], scores: Tensor) -> None:
        """Set the logits of forbidden tokens to -inf, in place, float32 `[rows, vocabulary]`.

        Args:
            rows: the rows of one sequence are consecutive, each with one more draft.
        """
        indices = [at for at, row in enumerate(rows) if row.masked]
        if not indices:
            return
        masks = torch.full((len(indices), self._words), -1, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        pairs = zip(masks.numpy(), [rows[at] for at in indices], strict=True)
        each = [list(own) for _, own in groupby(pairs, key=lambda pair: id(pair[1].sequence))]
        list((self._threads.map if len(each) > _ALONE else map)(self._fill, each))
        bits = masks.to(self._device, non_blocking=True).view(torch.uint8)[:, :, None] & self._powers
        forbidden = (bits == 0).view(len(indices), -1)[:, : self._vocab_size]
        if len(indices) == len(rows):
            scores.masked_fill_(forbidden, -torch.inf)
        else:
            index = to_device(indices, torch.int64, self._device)
            scores.index_copy_(0, index, scores.index_select(0, index).masked_fill_(forbidden, -torch.inf))

    def _fill(self, masks: abc.Sequence[tuple[np.ndarray, LogitsRow]]) -> None:
        """Compute the masks of one sequence; an error of its grammar fails this sequence alone."""
        with masks[0][1].sequence.contain_faults():
            for mask, row in masks:
                self._fill_one(mask, row)

    def _fill_one(self, mask: np.ndarray, row: LogitsRow) -> None:
        sequence, matcher = row.sequence, row.sequence.matcher
        finished = False
        if matcher is not None:
            followed = 0
            for token in row.drafts:
                if not matcher.accept(token):
                    break
                followed += 1
            # Nothing after a forbidden draft is kept: the mask may allow everything.
            if followed == len(row.drafts):
                matcher.fill(mask)
                finished = matcher.finished
            matcher.rollback(followed)
        if row.too_short and not finished:
            others = mask.view(np.uint32).copy()
            for token in sequence.stop_ids:
                if token < self._vocab_size:
                    others[token // 32] &= ~np.uint32(1 << token % 32)
            # If a grammar allows stop tokens only, it has precedence over `min_tokens`.
            if others.any():
                mask.view(np.uint32)[:] = others
