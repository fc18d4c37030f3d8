"""From scores to tokens. Knows nothing of models, caches or text."""

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from warpbus.engine.sequence import Sequence
from warpbus.kernels.ops import sampling


class Sampler:
    """Chooses the next token of each row of a batch by that row's own `SamplingParams`.

    A row's choice depends on its scores, its parameters and its own random numbers, never on its neighbours. All that
    `choose` reads lies in tensors of `rows` rows that stay where they are, so that a CUDA graph can hold it.

    Attributes:
        greedy: nothing is left to chance in any row.
        penalizes: a row has a repetition penalty: what was seen changes from step to step.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._sequences: list[Sequence] = []
        self._temperature = torch.ones(rows, device=device)
        self._top_k = torch.ones(rows, dtype=torch.int32, device=device)
        self._top_p = torch.ones(rows, device=device)
        self._uniform = torch.zeros(rows, device=device)
        self._penalty = torch.ones(0, 1, device=device)
        self._seen: Tensor | None = None
        self.greedy = True

    @property
    def penalizes(self) -> bool:
        return self._seen is not None

    def begin(self, sequences: Rows[Sequence]) -> None:
        """Take up a new batch of at most `rows` sequences."""
        params = [sequence.params for sequence in sequences]
        self._seen = None
        if any(p.repetition_penalty != 1.0 for p in params):
            self._penalty = torch.tensor([[p.repetition_penalty] for p in params], device=self._device)
            self._seen = torch.zeros((len(params), self._vocab_size), dtype=torch.bool, device=self._device)
            for row, sequence in enumerate(sequences):
                self._seen[row, torch.tensor(sequence.prompt, device=self._device)] = True
        self._take(list(sequences))

    def keep(self, rows: Rows[int]) -> None:
        """Drop all rows but these."""
        if self._seen is not None:
            index = torch.tensor(rows, device=self._device)
            self._penalty, self._seen = self._penalty[index], self._seen[index]
        self._take([self._sequences[row] for row in rows])

    def draw(self) -> None:
        """Draw each row's next random number. Greedy rows draw too: theirs is spent on the one token that is left."""
        if not self.greedy:
            self._write(self._uniform, [sequence.random.random() for sequence in self._sequences])

    def choose(self, logits_bv: Tensor) -> tuple[Tensor, Tensor]:
        """The next tokens, int64 `[batch]`, and the best scores, float32 `[batch]`; the same until the next `draw`.

        A best score is NaN or infinite where the scores hold NaN or infinity; the token then means nothing.

        Args:
            logits_bv: scores `[batch, vocabulary]`, any floating type; rows that follow the batch's are padding.
        """
        if self._seen is not None:
            logits_bv = logits_bv[: len(self._seen)]
            penalized = torch.where(logits_bv > 0, logits_bv / self._penalty, logits_bv * self._penalty)
            logits_bv = torch.where(self._seen, penalized, logits_bv)
        batch = len(logits_bv)
        if self.greedy:
            return sampling.argmax(logits_bv)
        controls = (self._temperature, self._top_k, self._top_p, self._uniform)
        return sampling.sample(logits_bv, *(control[:batch] for control in controls))

    def saw(self, tokens: Tensor) -> None:
        """Count tokens `[batch]` among those that the repetition penalty is for."""
        if self._seen is not None:
            self._seen.scatter_(1, tokens[: len(self._seen), None], True)

    def _take(self, sequences: list[Sequence]) -> None:
        self._sequences = sequences
        params = [sequence.params for sequence in sequences]
        self.greedy = all(p.greedy for p in params)
        if not self.greedy:
            self._write(self._temperature, [1.0 if p.greedy else p.temperature for p in params])
            self._write(self._top_k, [1 if p.greedy else p.top_k or self._vocab_size for p in params])
            self._write(self._top_p, [p.top_p for p in params])

    def _write(self, buffer: Tensor, values: Rows[float]) -> None:
        """Copy into the first rows of a buffer, on a GPU without waiting for it."""
        fresh = torch.tensor(values, dtype=buffer.dtype, pin_memory=buffer.is_cuda)
        buffer[: len(values)].copy_(fresh, non_blocking=True)
