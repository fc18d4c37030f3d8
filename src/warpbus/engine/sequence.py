"""One request: what was asked, what has been generated, and the text that may already be shown.

Knows nothing of tensors, models, caches or the other requests of its batch.
"""

import logging
import random
from collections import abc, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.sequence_state import RunnerState, SchedulerState
from warpbus.engine.speculation import accepted
from warpbus.errors import NumericError, WarpbusError

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["stop", "length", "abort"]

_log = logging.getLogger("warpbus.engine")


@dataclass(frozen=True)
class TokenLogprob:
    """The natural logarithm of a chosen token's probability, and the most likely tokens with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TextPiece:
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


def request_fault(error: Exception, number: int) -> WarpbusError:
    """What the caller of a request is told of an exception; one that is not a `WarpbusError` is logged, with its trace.

    Args:
        error: is being handled.
        number: of the request, for the log.
    """
    if isinstance(error, WarpbusError):
        return error
    _log.exception("request %d failed", number)
    first = next(iter(str(error).splitlines()), "")
    return WarpbusError(
        f"the engine cannot handle this request ({type(error).__name__}: {first}): report it with the request's body"
    )


class Sequence:
    """The state of one request, from its prompt to the reason why it ended.

    Attributes:
        index: which of the caller's prompts it is.
        prompt: token ids of the prompt.
        token_ids: token ids generated, the stop token included.
        text: their text up to the stop token or stop string, without what could still become a stop string.
        logprobs: of the tokens generated, where the request asked for them; else None.
        finish_reason: "stop" (a stop token or string), "length" (`limit` tokens), "abort", or None while it runs.
        error: why it ended without a finish reason: a fault of this request alone; None where there was none.
        stop_ids: the tokens that end it.
        matcher: where the request has a grammar; moves on with the tokens.
        adapter: the name of the engine's adapter that answers it; None: the model as it is.
        cache_salt: requests of different salts, at most 64 bytes, share nothing that is stored of their prompts.
        cached_tokens: tokens of the prompt that were in the cache already.
        queue_seconds: for which it waited until it was computed.
        random: the random numbers of this request; read by `uniforms`.
        scheduler_state, runner_state: what the scheduler and the runner attach to the request.
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
        cache_salt: bytes = b"",
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
        self.error: WarpbusError | None = None
        self.stop_ids = (frozenset() if params.ignore_eos else stop_ids) | frozenset(params.stop_token_ids)
        self.matcher = matcher
        self.adapter = adapter
        self.cache_salt = cache_salt
        self.cached_tokens = 0
        self.queue_seconds = 0.0
        self.random = random.Random(params.seed)
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self.scheduler_state = SchedulerState(list(prompt), len(prompt) + limit)
        self.runner_state = RunnerState()
        self._drawn: deque[float] = deque()  # the random numbers of the tokens that have not been appended yet
        self._used = 0  # how many of these the steps under way have
        self._taken_tokens = 0
        self._taken_text = 0
        self._stream = stream
        self._stops = StopStrings(params.stop)

    @property
    def below_minimum(self) -> bool:
        """A stop token may not be chosen yet."""
        return len(self.token_ids) < self.params.min_tokens

    def uniforms(self, count: int) -> list[float]:
        """The next `count` random numbers from 0 to 1, one for each token to choose.

        The n-th number belongs to the n-th token of the answer. It is kept until that token is appended, since a step
        may fail, or choose tokens after a guess that turns out wrong.
        """
        while len(self._drawn) < self._used + count:
            self._drawn.append(self.random.random())
        numbers = [self._drawn[self._used + i] for i in range(count)]
        self._used += count
        return numbers

    def give_back(self, count: int) -> None:
        """The last `count` numbers of `uniforms` chose no token: the next tokens get them.

        Raises:
            ValueError: more than were handed out for tokens that have not been appended.
        """
        if not 0 <= count <= self._used:
            raise ValueError(f"cannot give back {count} random numbers of {self._used}")
        self._used -= count

    def rewind(self) -> None:
        """Give back the numbers of tokens that never came."""
        self._used = 0

    def append(self, token: int, logprob: TokenLogprob | None = None) -> str:
        """Take the next token and return the text that is now certain, which may be empty.

        Raises:
            WarpbusError: the request's grammar does not allow the token.
        """
        self.token_ids.append(token)
        if self._used:
            self._used -= 1
            self._drawn.popleft()
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

    def extend(
        self, drafts: abc.Sequence[int], chosen: abc.Sequence[tuple[int | None, TokenLogprob | None]]
    ) -> list[int]:
        """Take what a step chose, as far as the drafts were right and nothing ends it; the tokens that were appended.

        Args:
            drafts: the tokens that were supposed to follow.
            chosen: the tokens chosen after none, the first, the first two, ... of them, and their logprobs. None for
                a token whose scores hold NaN or infinity.

        Raises:
            WarpbusError: it cannot go on: a NumericError for scores that are none, or the error that it has already.
        """
        if self.error is not None:  # since the step was launched: its tokens mean nothing
            raise self.error
        right = accepted(drafts, [token for token, _ in chosen])
        if not self.params.greedy:
            self.give_back(len(drafts) - right)
        kept: list[int] = []
        for token, logprob in chosen[: right + 1]:
            if token is None:
                source = "the checkpoint" if self.adapter is None else f"the checkpoint or the adapter {self.adapter}"
                raise NumericError(
                    f"the model's scores hold NaN or infinity: {source} is damaged, or its numbers do not fit the "
                    "dtype (try dtype='bfloat16' or 'float32')"
                )
            self.append(token, logprob)
            kept.append(token)
            if self.finish_reason is not None:
                break
        return kept

    @property
    def ended(self) -> bool:
        """No more tokens come: it has a finish reason, or failed."""
        return self.finish_reason is not None or self.error is not None

    def fail(self, error: WarpbusError) -> None:
        """End with an error, of which the first one counts. What was generated before stays."""
        self.error, self.finish_reason = self.error or error, None

    @contextmanager
    def contain_faults(self) -> Iterator[None]:
        """Let this request fail, and nothing else, where handling it on the host raises an exception.

        Nothing within may use a device: a device's faults are everybody's. The host's memory is, too.
        """
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:
            self.fail(request_fault(error, self.index))

    def take(self) -> TextPiece:
        """What has come since the last call."""
        tokens, text = self._taken_tokens, self._taken_text
        self._taken_tokens, self._taken_text = len(self.token_ids), len(self.text)
        return TextPiece(
            text=self.text[text:],
            token_ids=tuple(self.token_ids[tokens:]),
            logprobs=None if self.logprobs is None else tuple(self.logprobs[tokens:]),
            finish_reason=self.finish_reason,
            cached_tokens=self.cached_tokens,
            queue_seconds=self.queue_seconds,
        )
