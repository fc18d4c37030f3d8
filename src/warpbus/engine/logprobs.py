"""The log probabilities of sampled tokens and of the most likely ones."""

from collections import abc
from dataclasses import dataclass

from torch import Tensor

from warpbus.engine.sequence import TokenLogprob


@dataclass(frozen=True)
class Logprobs:
    """The log probabilities of the rows of a step that ask for them.

    Attributes:
        rows: their indices in the batch.
        counts: how many alternatives each asks for.
        tokens: int64 `[rows]`, the sampled tokens.
        chosen: float32 `[rows]`, their log probabilities.
        top_tokens, top: int64 and float32 `[rows, most alternatives]`, the most likely tokens, best first.
    """

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: Tensor
    chosen: Tensor
    top_tokens: Tensor
    top: Tensor

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, rows: abc.Sequence[int], counts: abc.Sequence[int]) -> "Logprobs":
        """From the logits `[rows, vocabulary]` of some rows and their sampled tokens `[rows]`."""
        scores = logits.float()
        norm = scores.logsumexp(-1, keepdim=True)
        best = scores.topk(min(max(1, *counts), scores.shape[1]), dim=-1)
        chosen = (scores.gather(1, tokens[:, None]) - norm)[:, 0]
        return cls(tuple(rows), tuple(counts), tokens, chosen, best.indices, best.values - norm)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """`tokens`, `chosen`, `top_tokens` and `top`."""
        return self.tokens, self.chosen, self.top_tokens, self.top

    def with_tensors(self, tensors: abc.Sequence[Tensor]) -> "Logprobs":
        """The same with other `tensors`, such as copies on the host."""
        return Logprobs(self.rows, self.counts, *tensors)

    def read(self) -> dict[int, TokenLogprob]:
        """The log probabilities by row of the batch."""
        values = zip(
            self.rows,
            self.counts,
            self.tokens.tolist(),
            self.chosen.tolist(),
            self.top_tokens.tolist(),
            self.top.tolist(),
            strict=True,
        )
        return {
            row: TokenLogprob(token, chosen, tuple(zip(top_tokens[:count], top[:count], strict=True)))
            for row, count, token, chosen, top_tokens, top in values
        }
