"""From scores to tokens. Knows nothing of models, caches or text."""

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from warpbus.engine.sequence import Sequence
from warpbus.errors import NumericError


class Sampler:
    """Chooses the next token of each row of a batch by that row's own `SamplingParams`.

    A row's choice depends on its scores, its parameters and its own random numbers, never on its neighbours.
    """

    def __init__(self, sequences: Rows[Sequence], vocab_size: int, device: torch.device) -> None:
        self._sequences = list(sequences)
        params = [sequence.params for sequence in sequences]

        def column(values: Rows[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        self._penalty = column([p.repetition_penalty for p in params])
        self._temperature = column([1.0 if p.greedy else p.temperature for p in params])
        self._top_k = column([1 if p.greedy else p.top_k or vocab_size for p in params])
        self._top_p = column([p.top_p for p in params])
        self._seen: Tensor | None = None
        if any(p.repetition_penalty != 1.0 for p in params):
            self._seen = torch.zeros((len(params), vocab_size), dtype=torch.bool, device=device)
            for row, sequence in enumerate(sequences):
                self._seen[row, torch.tensor(sequence.prompt, device=device)] = True

    def __call__(self, logits_bv: Tensor) -> list[int]:
        """The next token of each row.

        Args:
            logits_bv: scores `[rows, vocabulary]`, any floating type.

        Raises:
            NumericError: a row's best score is NaN or infinite.
        """
        if self._seen is not None:
            penalized = torch.where(logits_bv > 0, logits_bv / self._penalty, logits_bv * self._penalty)
            logits_bv = torch.where(self._seen, penalized, logits_bv)
        if all(sequence.params.greedy for sequence in self._sequences):
            best, tokens_b = logits_bv.max(-1)
        else:
            best, tokens_b = self._draw(logits_bv.float())
        if self._seen is not None:
            self._seen.scatter_(1, tokens_b[:, None], True)
        tokens: list[int] = torch.where(best.isfinite(), tokens_b, -1).tolist()
        if -1 in tokens:
            prompt = self._sequences[tokens.index(-1)].index
            raise NumericError(
                f"prompt {prompt}: the model's scores hold NaN or infinity: the checkpoint is damaged, "
                "or its numbers do not fit the dtype (try dtype='bfloat16' or 'float32')"
            )
        return tokens

    def keep(self, rows: Rows[int]) -> None:
        """Drop all rows but these."""
        index = torch.tensor(rows, device=self._penalty.device)
        self._sequences = [self._sequences[row] for row in rows]
        self._penalty, self._temperature = self._penalty[index], self._temperature[index]
        self._top_k, self._top_p = self._top_k[index], self._top_p[index]
        if self._seen is not None:
            self._seen = self._seen[index]

    def _draw(self, logits_bv: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's best score and its drawn token: the inverse of the cumulated probabilities, likeliest first."""
        ordered, tokens = logits_bv.sort(dim=-1, descending=True, stable=True)
        ranks = torch.arange(ordered.shape[-1], device=ordered.device)
        scaled = (ordered / self._temperature).masked_fill_(ranks >= self._top_k, -torch.inf)
        probabilities = scaled.softmax(-1)
        cumulated = probabilities.cumsum(-1)
        # A token stays while those before it have not yet reached top_p: the first always does.
        allowed = (cumulated - probabilities < self._top_p) & (probabilities > 0)
        allowed[:, 0] = True
        last = allowed.sum(-1, keepdim=True) - 1
        # Greedy rows draw too: their numbers are spent on the one token that is left.
        drawn = torch.tensor([[sequence.random.random()] for sequence in self._sequences], device=ordered.device)
        chosen = (cumulated <= drawn * cumulated.gather(-1, last)).sum(-1, keepdim=True)
        return ordered[:, 0], tokens.gather(-1, torch.minimum(chosen, last))[:, 0]
