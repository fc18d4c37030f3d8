"""Samples tokens from logits, for a batch that changes from step to step. Knows nothing of models or caches."""

from collections import abc

import torch
from torch import Tensor

from warpbus.engine.logits import Biases, LogitsRow, Masks, Penalties, to_device
from warpbus.engine.logprobs import Logprobs
from warpbus.engine.sequence import Sequence
from warpbus.kernels.ops import sampling


class Sampler:
    """Samples the next token of each row of a batch with that row's own `SamplingParams`.

    A row's token depends on its logits, its parameters and its own random numbers, never on other rows.

    For a `plain` batch, `choose` reads only tensors of `rows` rows with fixed addresses, so that a CUDA graph can
    contain it. Otherwise `choose` must run outside of graphs, after the tokens of earlier steps were appended to the
    sequences: grammar masks depend on them.

    Args:
        rows: the most rows, drafts included.
        vocab_size: columns of the logits.

    Attributes:
        greedy: no row needs random numbers.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows: list[LogitsRow] = []
        self._temperature = torch.ones(rows, device=device)
        self._top_k = torch.ones(rows, dtype=torch.int32, device=device)
        self._top_p = torch.ones(rows, device=device)
        self._min_p = torch.zeros(rows, device=device)
        self._uniform = torch.zeros(rows, device=device)
        self._processed: list[int] = []
        self._processed_index = torch.zeros(0, dtype=torch.int64, device=device)
        self._penalized: list[int] = []
        self._penalized_index = torch.zeros(0, dtype=torch.int64, device=device)
        self._penalties = Penalties(vocab_size, device)
        self._biases = Biases(vocab_size, device)
        self._masks = Masks(vocab_size, device)
        self._asked: list[int] = []
        self._asked_index = torch.zeros(0, dtype=torch.int64, device=device)
        self._logprobs: Logprobs | None = None
        self.greedy = True

    @property
    def plain(self) -> bool:
        """No row needs more than `temperature`, `top_k`, `top_p` and `min_p`, and none asks for logprobs."""
        return not self._asked and not any(self._rows[row].processed for row in self._processed)

    def arrange(self, sequences: abc.Sequence[Sequence], drafts: abc.Sequence[abc.Sequence[int]] | None = None) -> None:
        """Set the sequences of the batch, one row each, in this order. Token counts of sequences that stay are kept.

        Args:
            sequences: at most `rows`; all their tokens are appended, except for those passed to `saw` only.
            drafts: for each sequence its draft tokens. It then has one more row for each: row i of a sequence samples
                the token after its first i drafts. Random numbers of rejected tokens must be returned
                (`Sequence.give_back`).
        """
        each = drafts if drafts is not None else [()] * len(sequences)
        self._rows = [
            LogitsRow(sequence, tuple(own[:count]))
            for sequence, own in zip(sequences, each, strict=True)
            for count in range(len(own) + 1)
        ]
        self._logprobs = None
        params = [row.sequence.params for row in self._rows]
        self.greedy = all(p.greedy for p in params)
        if not self.greedy:
            self._write(self._temperature, [1.0 if p.greedy else p.temperature for p in params])
            self._write(self._top_k, [1 if p.greedy else min(p.top_k, self._vocab_size) for p in params])
            self._write(self._top_p, [p.top_p for p in params])
            self._write(self._min_p, [p.min_p for p in params])
        self._asked = [at for at, p in enumerate(params) if p.logprobs is not None]
        self._asked_index = self._index(self._asked)
        self._processed = [at for at, row in enumerate(self._rows) if row.processed]
        self._processed_index = self._index(self._processed)
        processed = [self._rows[at] for at in self._processed]
        penalized = [at for at, row in enumerate(processed) if row.penalized]
        self._penalized, self._penalized_index = penalized, self._index(penalized)
        self._penalties.arrange([processed[at] for at in penalized], [self._processed[at] for at in penalized])
        self._biases.arrange(processed)

    def draw(self) -> None:
        """Draw a random number for each row that is not greedy."""
        if self.greedy:
            return
        numbers = [0.0 if row.sequence.params.greedy else row.sequence.uniforms(1)[0] for row in self._rows]
        self._write(self._uniform, numbers)

    def choose(self, logits_bv: Tensor) -> tuple[Tensor, Tensor]:
        """The next tokens, int64 `[batch]`, and the best logits, float32 `[batch]`; the same until the next `draw`.

        The best logit is the one before penalties, biases and masks. It is NaN or infinite if the row holds NaN or
        infinity; the token is then meaningless.

        Args:
            logits_bv: `[batch, vocabulary]`, any floating type; rows after those of the sequences are padding.
        """
        if self.plain:
            return self._pick(logits_bv, None)
        if not self._processed:
            tokens, best = self._pick(logits_bv, None)
        else:
            whole = len(self._processed) == len(logits_bv)
            tokens, best = sampling.argmax(logits_bv) if whole else self._pick(logits_bv, None)
            chosen, _ = self._pick(self._changed(logits_bv), self._processed_index)
            tokens = tokens.index_copy(0, self._processed_index, chosen)
        if self._asked:
            asked = self._asked_index
            params = [self._rows[at].sequence.params for at in self._asked]
            self._logprobs = Logprobs.of(
                logits_bv.index_select(0, asked),
                tokens.index_select(0, asked),
                self._asked,
                [each.logprobs or 0 for each in params],
                [each.logprob_tokens for each in params],
            )
        return tokens, best

    def saw(self, tokens: Tensor) -> None:
        """Count chosen tokens `[batch]` for the penalties, before they are appended to their sequences."""
        if self._penalized:
            self._penalties.saw(tokens)

    def logprobs(self) -> Logprobs | None:
        """The logprobs of the last sampled tokens, for the rows that ask for them; None if no row does.

        They are of the model's own distribution, before penalties, biases, masks, temperature and truncation.
        """
        return self._logprobs

    def _changed(self, logits_bv: Tensor) -> Tensor:
        """The changed logits of the rows with penalties, biases or masks, float32 `[these rows, vocabulary]`."""
        scores = logits_bv.index_select(0, self._processed_index).float()
        if len(self._penalized) == len(self._processed):
            scores = self._penalties.apply(scores)
        elif self._penalized:
            lowered = self._penalties.apply(scores.index_select(0, self._penalized_index))
            scores.index_copy_(0, self._penalized_index, lowered)
        self._biases.add(scores)
        self._masks.apply([self._rows[at] for at in self._processed], scores)
        return scores

    def _pick(self, logits: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Tokens and best logits of all rows, or of the rows with these indices."""
        if self.greedy:
            return sampling.argmax(logits)
        controls = (self._temperature, self._top_k, self._top_p, self._min_p, self._uniform)
        if rows is None:
            return sampling.sample(logits, *(control[: len(logits)] for control in controls))
        return sampling.sample(logits, *(control.index_select(0, rows) for control in controls))

    def _index(self, rows: abc.Sequence[int]) -> Tensor:
        return to_device(rows, torch.int64, self._device)

    def _write(self, buffer: Tensor, values: abc.Sequence[float]) -> None:
        """Copy to the first rows of a buffer; on a GPU, asynchronously."""
        fresh = torch.tensor(values, dtype=buffer.dtype, pin_memory=buffer.is_cuda)
        buffer[: len(values)].copy_(fresh, non_blocking=True)
