"""One request: what was asked, what has been generated, and the text that may already be shown.

Knows nothing of tensors, models, caches or the other requests of its batch.
"""

import random
from collections import abc, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from warpbus.engine.sampling_params import SamplingParams
from warpbus.errors import WarpbusError

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["stop", "length", "abort"]

_KEPT_NUMBERS = 64  # random numbers that can be given back: more than a step chooses tokens


@dataclass(frozen=True)
class TokenLogprob:
    """The natural logarithm of a chosen token's probability, and the most likely tokens with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Piece:
    """What a request has got since its last piece.

    Attributes:
        text: the text that has become certain.
        token_ids: the tokens, the stop token included. Their text may come with a later piece.
        logprobs: of these tokens, where the request asked for them.
        finish_reason: "stop" (a stop token or string), "length" (all tokens that there may be), "abort" (called off),
            or None while it runs.
        cached_tokens: tokens of the prompt that were in the cache already.
        queue_seconds: for which the request waited until it was computed.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    cached_tokens: int = 0
    queue_seconds: float = 0.0


class TextStream(Protocol):
    """Tokens to text as it becomes certain (`warpbus.models.tokenizers.StreamDecoder`)."""

    def push(self, token: int, /) -> str:
        """The text that this token makes certain."""
        ...

    def flush(self) -> str:
        """The text still kept back, at the end."""
        ...


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces, and keeps back what could begin one."""

    def __init__(self, stops: abc.Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can be shown now, and whether a stop string was met, which ends the text before it."""
        if not self._stops:
            return text, False
        self._held += text
        begins = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if begins:
            shown, self._held = self._held[: min(begins)], ""
            return shown, True
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        """What was kept back, now that no more text can complete a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class Matcher(Protocol):
    """Follows an answer through its grammar (`warpbus.engine.grammar.GrammarMatcher`)."""

    def accept(self, token: int, /) -> bool:
        """Go on by a token; False, and nothing changes, where the grammar does not allow it."""
        ...

    def rollback(self, count: int, /) -> None:
        """Take the last tokens back."""
        ...

    def fill(self, mask: "np.ndarray", /) -> None:
        """Write which tokens may come next to int32 `[(vocabulary + 31) // 32]`: a bit each, lowest first."""
        ...

    @property
    def finished(self) -> bool:
        """Only a stop token can follow."""
        ...

    @property
    def failed(self) -> bool:
        """The answer had to be cut short of the grammar's end."""
        ...


class Sequence:
    """The state of one request, from its prompt to the reason why it ended.

    Attributes:
        index: which of the caller's prompts it is.
        prompt: token ids of the prompt.
        token_ids: token ids generated, the stop token included.
        text: their text up to the stop token or stop string, without what could still become a stop string.
        logprobs: of the tokens generated, where the request asked for them; else None.
        finish_reason: "stop" (a stop token or string), "length" (`limit` tokens), "abort", or None while it runs.
        stop_ids: the tokens that end it.
        matcher: where the request has a grammar; moves on with the tokens.
        adapter: the name of the engine's adapter that answers it; None: the model as it is.
        cached_tokens: tokens of the prompt that were in the cache already.
        queue_seconds: for which it waited until it was computed.
        random: draws for this request alone; read by `uniforms`.
    """

    def __init__(
        self,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        *,
        limit: int,
        stop_ids: frozenset[int],
        stream: TextStream,
        matcher: Matcher | None = None,
        adapter: str | None = None,
    ) -> None:
        if (params.grammar is None) != (matcher is None):
            raise ValueError("a request has a matcher where it has a grammar, and nowhere else")
        self.index = index
        self.prompt = prompt
        self.params = params
        self.limit = limit
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.stop_ids = (frozenset() if params.ignore_eos else stop_ids) | frozenset(params.stop_token_ids)
        self.matcher = matcher
        self.adapter = adapter
        self.cached_tokens = 0
        self.queue_seconds = 0.0
        self.random = random.Random(params.seed)
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self._drawn: deque[float] = deque()  # the last numbers handed out, then those that were given back
        self._ahead = 0  # how many of them were given back
        self._used = 0  # how many were not
        self._taken_tokens = 0
        self._taken_text = 0
        self._stream = stream
        self._stops = StopStrings(params.stop)

    @property
    def below_minimum(self) -> bool:
        """A stop token may not be chosen yet."""
        return len(self.token_ids) < self.params.min_tokens

    def uniforms(self, count: int) -> list[float]:
        """The next `count` random numbers from 0 to 1, one for each token to choose."""
        while self._ahead < count:
            self._drawn.append(self.random.random())
            self._ahead += 1
        first = len(self._drawn) - self._ahead
        numbers = [self._drawn[first + i] for i in range(count)]
        self._ahead -= count
        self._used += count
        while len(self._drawn) > self._ahead + _KEPT_NUMBERS:
            self._drawn.popleft()
        return numbers

    def give_back(self, count: int) -> None:
        """The last `count` numbers of `uniforms` chose no token: the next ones get them. At most 64."""
        if not 0 <= count <= len(self._drawn) - self._ahead:
            raise ValueError(f"cannot give back {count} random numbers")
        self._ahead += count
        self._used -= count

    def rewind(self) -> None:
        """Give back the numbers of tokens that never came."""
        self.give_back(max(0, self._used - len(self.token_ids)))

    def append(self, token: int, logprob: TokenLogprob | None = None) -> str:
        """Take the next token and return the text that is now certain, which may be empty.

        Raises:
            WarpbusError: the request's grammar does not allow the token.
        """
        self.token_ids.append(token)
        if self.logprobs is not None and logprob is not None:
            self.logprobs.append(logprob)
        if token in self.stop_ids:
            # An answer that does not belong to its grammar is one that was cut off.
            self.finish_reason = "length" if self.matcher is not None and self.matcher.failed else "stop"
            text = self._stream.flush()
        else:
            if self.matcher is not None and not self.matcher.accept(token):
                raise WarpbusError(f"the token {token} does not follow the grammar, whose mask should have kept it out")
            text = self._stream.push(token)
            if len(self.token_ids) >= self.limit:
                self.finish_reason = "length"
                text += self._stream.flush()
        shown, stopped = self._stops.push(text)
        if stopped:
            self.finish_reason = "stop"
        elif self.finish_reason is not None:
            shown += self._stops.flush()
        self.text += shown
        return shown

    def take(self) -> Piece:
        """What has come since the last call."""
        tokens, text = self._taken_tokens, self._taken_text
        self._taken_tokens, self._taken_text = len(self.token_ids), len(self.text)
        return Piece(
            text=self.text[text:],
            token_ids=tuple(self.token_ids[tokens:]),
            logprobs=None if self.logprobs is None else tuple(self.logprobs[tokens:]),
            finish_reason=self.finish_reason,
            cached_tokens=self.cached_tokens,
            queue_seconds=self.queue_seconds,
        )
