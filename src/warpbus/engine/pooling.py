"""Vectors of prompts: embeddings from their hidden states, and the logits of some tokens after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.engine.logits import to_device
from warpbus.engine.readback import Readback
from warpbus.engine.scheduler import PromptChunk
from warpbus.engine.sequence import Sequence


@dataclass(frozen=True)
class PooledPrompt:
    """The contribution of a chunk to the vector of a prompt, on its way to the host.

    Attributes:
        sequence: whose prompt it is.
    """

    sequence: Sequence
    _begins: bool
    _share: float
    _readback: Readback

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        chunk: PromptChunk,
        *,
        final_norm: Callable[[Tensor], Tensor],
        scores: Callable[[Tensor], Tensor],
    ) -> PooledPrompt | None:
        """Of a chunk; None if it adds nothing.

        Args:
            hidden: `[tokens, hidden]`, of the chunk, before the final norm.
            final_norm: maps hidden states to those after the norm.
            scores: maps hidden states to logits `[rows, vocabulary]`.
        """
        pooling = chunk.sequence.params.pooling
        assert pooling is not None
        if pooling.mode == "mean":
            total = final_norm(hidden).float().sum(0)
            return cls(chunk.sequence, chunk.start == 0, 1 / len(chunk.sequence.prompt), Readback([total]))
        if not chunk.is_last:
            return None
        if pooling.mode == "last":
            vector = final_norm(hidden[-1:])[0].float()
        else:
            logits = scores(hidden[-1:])[0].float()
            values = logits.softmax(-1) if pooling.mode == "probabilities" else logits
            vector = values[to_device(pooling.tokens, torch.int64, hidden.device)]
        return cls(chunk.sequence, True, 1.0, Readback([vector]))

    def read(self) -> None:
        """Add it to the sequence's vector. Raises: as `Readback.read`."""
        vector = [value * self._share for value in self._readback.read()[0].tolist()]
        before = self.sequence.pooled
        # A prompt that is computed again after a preemption begins anew.
        again = self._begins or before is None
        self.sequence.pooled = vector if again else [a + b for a, b in zip(before or (), vector, strict=True)]
