"""The log probabilities of sampled tokens, of the tokens of prompts, and of the most likely ones."""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from warpbus.engine.logits import to_device
from warpbus.engine.readback import Readback
from warpbus.engine.sampling_params import MOST_PROMPT_LOGPROBS
from warpbus.engine.sequence import Sequence, TokenLogprob
from warpbus.errors import UsageError


@dataclass(frozen=True)
class Logprobs:
    """The log probabilities of the rows of a step that ask for them.

    Attributes:
        rows: their indices in the batch.
        counts: how many alternatives each asks for.
        asked: the further tokens that each asks for.
        tokens: int64 `[rows]`, the sampled tokens.
        chosen: float32 `[rows]`, their log probabilities.
        top_tokens, top: int64 and float32 `[rows, most alternatives]`, the most likely tokens, best first.
        further: float32 `[rows, most of asked]`, the log probabilities of `asked`; None if no row asks for any.
    """

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    asked: tuple[tuple[int, ...], ...]
    tokens: Tensor
    chosen: Tensor
    top_tokens: Tensor
    top: Tensor
    further: Tensor | None = None

    @classmethod
    def of(
        cls,
        logits: Tensor,
        tokens: Tensor,
        rows: abc.Sequence[int],
        counts: abc.Sequence[int],
        asked: abc.Sequence[tuple[int, ...]],
    ) -> "Logprobs":
        """From the logits `[rows, vocabulary]` of some rows and their sampled tokens `[rows]`."""
        scores = logits.float()
        norm = scores.logsumexp(-1, keepdim=True)
        best = scores.topk(min(max(1, *counts), scores.shape[1]), dim=-1)
        chosen = (scores.gather(1, tokens[:, None]) - norm)[:, 0]
        further = None
        if width := max(map(len, asked)):
            # The rows of a prompt, which may be many, ask for the same tokens.
            different = asked if len(set(asked)) > 1 else asked[:1]
            padded = [(*own, *(0,) * (width - len(own))) for own in different]
            ids = to_device(padded, torch.int64, logits.device).expand(len(rows), -1)
            further = scores.gather(1, ids) - norm
        return cls(tuple(rows), tuple(counts), tuple(asked), tokens, chosen, best.indices, best.values - norm, further)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """`tokens`, `chosen`, `top_tokens`, `top`, and `further` unless it is None."""
        found = (self.tokens, self.chosen, self.top_tokens, self.top)
        return found if self.further is None else (*found, self.further)

    def with_tensors(self, tensors: abc.Sequence[Tensor]) -> "Logprobs":
        """The same with other `tensors`, such as copies on the host."""
        return Logprobs(self.rows, self.counts, self.asked, *tensors)

    def read(self) -> dict[int, TokenLogprob]:
        """The log probabilities by row of the batch."""
        values = zip(
            self.rows,
            self.counts,
            self.tokens.tolist(),
            self.chosen.tolist(),
            self.top_tokens.tolist(),
            self.top.tolist(),
            self.asked,
            [()] * len(self.rows) if self.further is None else self.further.tolist(),
            strict=True,
        )
        return {
            row: TokenLogprob(
                token,
                chosen,
                tuple(zip(top_tokens[:count], top[:count], strict=True)),
                asked=tuple(zip(asked, further[: len(asked)], strict=True)),
            )
            for row, count, token, chosen, top_tokens, top, asked, further in values
        }


@dataclass(frozen=True)
class PromptLogprobs:
    """The log probabilities of some tokens of a prompt, on their way to the host.

    Attributes:
        sequence: whose prompt it is.
        start: the position of the first of the tokens.
    """

    sequence: Sequence
    start: int
    _logprobs: Logprobs
    _readback: Readback

    @classmethod
    def of(
        cls, scores: Callable[[Tensor], Tensor], hidden: Tensor, sequence: Sequence, start: int, rows: int
    ) -> "PromptLogprobs | None":
        """Those of the tokens that follow a chunk's own; None if no token of the prompt does.

        Args:
            scores: maps hidden states to logits `[rows, vocabulary]`.
            hidden: `[tokens, hidden]`, of the chunk.
            start: the position of the chunk's first token.
            rows: the most rows of logits at once.
        """
        followers = sequence.prompt[start + 1 : start + 1 + len(hidden)]
        if not followers:
            return None
        tokens = to_device(followers, torch.int64, hidden.device)
        count, asked = sequence.params.prompt_logprobs or 0, sequence.params.logprob_tokens
        parts, ranks = [], []
        for begin in range(0, len(followers), rows):
            own = tokens[begin : begin + rows]
            logits = scores(hidden[begin : begin + len(own)])
            parts.append(Logprobs.of(logits, own, range(len(own)), [count] * len(own), [asked] * len(own)))
            ranks.append((logits > logits.gather(1, own[:, None])).sum(-1) + 1)
        whole = Logprobs(
            tuple(range(len(followers))),
            (count,) * len(followers),
            (asked,) * len(followers),
            *(torch.cat(each) for each in zip(*(part.tensors for part in parts), strict=True)),
        )
        return cls(sequence, start + 1, whole, Readback([*whole.tensors, torch.cat(ranks)]))

    def read(self) -> None:
        """Give the sequence the log probabilities. Raises: as `Readback.read`."""
        *tensors, ranks = self._readback.read()
        found = self._logprobs.with_tensors(tensors).read()
        assert self.sequence.prompt_logprobs is not None
        for (at, logprob), rank in zip(found.items(), ranks.tolist(), strict=True):
            self.sequence.prompt_logprobs[self.start + at] = replace(logprob, rank=rank)


def check_prompt_logprobs(sequence: Sequence, *, bidirectional: bool) -> None:
    """Raises UsageError if a request asks for log probabilities of its prompt that there are not.

    Args:
        bidirectional: the model reads prompts in both directions.
    """
    count = sequence.params.prompt_logprobs
    if count is None:
        return
    if bidirectional:
        raise UsageError(
            "prompt_logprobs: this model reads its prompt in both directions, so its tokens have no probabilities: "
            "leave it out"
        )
    asked = len(sequence.params.logprob_tokens)
    if len(sequence.prompt) * (count + asked + 1) > MOST_PROMPT_LOGPROBS:
        further = f" with {asked:,} logprob_tokens" if asked else ""
        raise UsageError(
            f"prompt_logprobs is {count}{further} for {len(sequence.prompt):,} tokens: ask for at most "
            f"{MOST_PROMPT_LOGPROBS:,} log probabilities of a prompt"
        )
