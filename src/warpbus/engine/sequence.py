"""One request: its prompt and parameters, the generated tokens, and the text that may already be shown.

The scheduler and the runner keep what they know of it in its `scheduler_state` and its `runner_state`. Knows nothing of
tensors, models or the other requests of its batch.
"""

import logging
import random
import secrets
import time
from collections import abc, deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from warpbus.engine.blocks import BLOCK
from warpbus.engine.host_blocks import Fetch
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.speculation import NgramIndex, accepted
from warpbus.errors import NumericError, UsageError, WarpbusError

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["stop", "length", "abort"]
SequenceStatus = Literal["new", "waiting", "running", "removed"]

_log = logging.getLogger("warpbus.engine")


@dataclass(frozen=True)
class TokenLogprob:
    """The log probability (natural logarithm) of a token, and the most likely tokens with theirs, best first.

    `rank` is the place of a prompt's token among all by probability, from 1; 0 for a sampled token. `asked` has the log
    probabilities of `SamplingParams.logprob_tokens`, in their order.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int = 0
    asked: tuple[tuple[int, float], ...] = ()


class TextPiece(NamedTuple):
    """The part of an answer since the previous piece.

    Attributes:
        text: the new text that no later token can change.
        token_ids: the new tokens, the stop token included. Their text may be in a later piece.
        logprobs: of these tokens, if the request asked for them.
        finish_reason: "stop" (a stop token or string), "length" (the maximum number of tokens), "abort", or None while
            the request runs.
        cached_tokens: tokens of the prompt found in the prefix cache.
        queue_seconds: how long the request waited before its first step.
        stop_string: the stop string that ended the answer; None if none did.
        prompt_logprobs: of the prompt's tokens, the first of which has none, if the request asked for them; in the
            first piece that has tokens only.
        pooled: the vector of the prompt, if the request asked for it; in the same piece.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    stop_string: str | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    pooled: tuple[float, ...] | None = None


class TextStream(Protocol):
    """Incremental detokenization (`warpbus.models.tokenizers.StreamDecoder`)."""

    def push(self, token: int, /) -> str:
        """The text that later tokens cannot change any more."""
        ...

    def flush(self) -> str:
        """The rest of the text, at the end."""
        ...


class NoText:
    """The text stream of requests whose text is not needed."""

    def push(self, token: int, /) -> str:
        """No text."""
        del token
        return ""

    def flush(self) -> str:
        """No text."""
        return ""


class StopStrings:
    """Finds the first stop string in a streamed text, and holds back text that could begin one.

    Args:
        stops: the stop strings.
        include: the text ends with the stop string; otherwise before it.

    Attributes:
        found: the first stop string in the text; None before it.
    """

    def __init__(self, stops: abc.Sequence[str], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can be shown now, and whether a stop string was found; the text then ends there."""
        if not self._stops:
            return text, False
        self._held += text
        found = [(at, len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, size, self.found = min(found)
            shown, self._held = self._held[: at + size if self._include else at], ""
            return shown, True
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        """The text held back, when no more text follows that could complete a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class Matcher(Protocol):
    """The state of an answer in its grammar (`warpbus.engine.grammar.GrammarMatcher`), or in the thinking before it
    (`warpbus.engine.thinking.ThinkingMatcher`)."""

    def accept(self, token: int, /) -> bool:
        """Advance by a token; False, and no change, if the grammar does not allow it."""
        ...

    def rollback(self, count: int, /) -> None:
        """Undo the last `count` tokens."""
        ...

    def fill(self, mask: "np.ndarray", /) -> None:
        """Write the mask of allowed next tokens, int32 `[(vocabulary + 31) // 32]`: one bit per token, lowest first."""
        ...

    @property
    def finished(self) -> bool:
        """Only stop tokens are allowed."""
        ...

    @property
    def failed(self) -> bool:
        """The answer had to end before the grammar's end."""
        ...


def request_fault(error: Exception, number: int) -> WarpbusError:
    """The error that the caller of a request gets for an exception; other than a `WarpbusError` it is logged.

    Args:
        error: the exception that is being handled.
        number: of the request, for the log.
    """
    if isinstance(error, WarpbusError):
        return error
    _log.exception("request %d failed", number)
    first = next(iter(str(error).splitlines()), "")
    return WarpbusError(
        f"the engine cannot handle this request ({type(error).__name__}: {first}): report it with the request's body"
    )


@dataclass(eq=False)
class SchedulerState:
    """The scheduler's state of a sequence: token ids, lengths and its block table.

    The tokens of a P-Tuning v2 prefix have no ids and are not counted as tokens of the sequence: token p of the
    sequence has position p, and its keys and values are at cache position `prefix_length + p`.

    Attributes:
        ids: the known token ids: the prompt, and the generated tokens that the host has read.
        limit: the maximum number of tokens, prompt included.
        salt: sequences share blocks only with sequences of the same salt.
        unsplit: the number of leading tokens that one prefill chunk must contain, because they attend to each other in
            both directions (the prompt up to the token that ends it). The blocks of such a sequence are never shared:
            their content depends on later tokens. 0: all attention is causal.
        uncached: compute all tokens, also those that the prefix cache has.
        prefix: the blocks of the prefix, which are read-only. Sequences with the same prefix have a salt of their own.
        prefix_length: cache positions of the prefix. If it does not fill its last block, that block is copied to the
            first block that the sequence owns.
        length: tokens, those of launched steps included, those of the prefix excluded.
        computed: tokens whose keys and values are in the cache after the launched steps.
        blocks: the block table, in order; it begins with the full blocks of the prefix.
        cached_tokens: tokens of the prompt found in the prefix cache when the sequence was first admitted.
        decoding: the prompt is prefilled and the sequence has a next token: all tokens but the last are computed.
        restoring: for how many steps of other sequences it waits for blocks from main memory.
        fetch: blocks that are read from the disk for it before it is admitted; None: it was not looked for any.
        preemptions: how often the sequence was preempted.
        keys: the prefix-cache keys of its full blocks, as far as they were needed.
        published: how many of its own blocks are full and registered in the prefix cache (not registered if `unsplit`).
        arrived: when the engine took the sequence, in seconds of `time.perf_counter()`.
        status: "new" (never added), "waiting", "running" (it has blocks), or "removed".
    """

    ids: list[int]
    limit: int
    salt: bytes = b""
    unsplit: int = 0
    uncached: bool = False
    prefix: tuple[int, ...] = ()
    prefix_length: int = 0
    length: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    decoding: bool = False
    restoring: int = 0
    fetch: Fetch | None = None
    preemptions: int = 0
    keys: list[bytes] = field(default_factory=list)
    published: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    status: SequenceStatus = "new"

    def __post_init__(self) -> None:
        self.length = self.length or len(self.ids)
        if self.unsplit:
            self.salt += secrets.token_bytes(16)  # no other sequence's blocks have the same content

    @property
    def active(self) -> bool:
        """The sequence waits or runs."""
        return self.status in ("waiting", "running")

    @property
    def bidirectional(self) -> int:
        """How many leading tokens attend to each other in both directions: those before the end of the prompt."""
        return max(0, self.unsplit - 1)

    @property
    def cache_length(self) -> int:
        """Used cache positions: the prefix and all computed tokens."""
        return self.prefix_length + self.computed

    @property
    def full_prefix_blocks(self) -> int:
        """How many blocks at the front of `blocks` belong to the prefix."""
        return self.prefix_length // BLOCK

    @property
    def prefix_tail(self) -> int:
        """Positions at the front of the first own block that hold the copied end of the prefix."""
        return self.prefix_length % BLOCK

    @property
    def own_blocks(self) -> list[int]:
        """The blocks after those of the prefix."""
        return self.blocks[self.full_prefix_blocks :]


def unsplit_tokens(prompt: abc.Sequence[int], end: int | None) -> int:
    """How many tokens of a prompt one chunk must contain: see `SchedulerState.unsplit`.

    Args:
        end: the token behind which the model answers; None: all attention is causal.

    Raises:
        UsageError: the prompt lacks it.
    """
    if end is None:
        return 0
    if end not in prompt:
        raise UsageError(
            f"the prompt lacks the token {end} (<sop>), behind which the model answers: end it with [gMASK] <sop>, "
            "as chats and prompts of text do by themselves"
        )
    return prompt.index(end) + 1


@dataclass(eq=False)
class RunnerState:
    """The runner's state of a sequence, from its first step to its end; it survives preemption.

    Attributes:
        slot: the row of the sequence in the tensors of `StepExecutor`; -1 before the first step.
        adapter: the number of its LoRA, from 1 on; 0: none.
        table_length: how many entries of the block table on the device are valid.
        preemptions: the value of `SchedulerState.preemptions` for which they are.
        ngrams: proposes draft tokens; used with n-gram speculation only.
        drafts: the draft tokens after the last token that multi-token prediction has proposed.
    """

    slot: int = -1
    adapter: int = 0
    table_length: int = 0
    preemptions: int = 0
    ngrams: NgramIndex = field(default_factory=NgramIndex)
    drafts: list[int] = field(default_factory=list)


class Sequence:
    """One request, from its prompt to its finish reason or error.

    Attributes:
        index: which of the caller's prompts it is.
        prompt: token ids of the prompt.
        token_ids: token ids generated, the stop token included.
        text: their text up to the stop token or stop string, without text that could still become a stop string.
        logprobs: of the generated tokens, if the request asked for them; else None.
        prompt_logprobs: of the prompt's tokens, None for the first and for those not computed yet, if the request asked
            for them; else None.
        pooled: the vector of the prompt as far as it is computed, if the request asked for it; else None.
        finish_reason: "stop" (a stop token or string), "length" (`limit` tokens), "abort", or None while it runs.
        error: why it ended without a finish reason: an error of this request alone; else None.
        stop_ids: the tokens that end it.
        matcher: the state in the request's grammar and thinking, advanced with the tokens; None without either.
        needs_host: a token can be sampled only after the host has read the previous ones.
        adapter: the name of the engine's adapter that it uses; None: the model without an adapter.
        cache_salt: at most 64 bytes; requests of different salts share no blocks of the prefix cache.
        cached_tokens: tokens of the prompt found in the prefix cache.
        queue_seconds: how long it waited before its first step.
        random: the random numbers of this request; read by `uniforms`.
        scheduler_state, runner_state: the states that the scheduler and the runner attach to the request.
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
        if params.constrained != (matcher is not None):
            raise ValueError("a request has a matcher where it has a grammar or thinking, and nowhere else")
        self.index = index
        self.prompt = prompt
        self.params = params
        self.limit = limit
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        wanted = params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprob | None] | None = [None] * len(prompt) if wanted else None
        self.pooled: list[float] | None = None
        self.finish_reason: FinishReason | None = None
        self.error: WarpbusError | None = None
        self.stop_ids = (frozenset() if params.ignore_eos else stop_ids) | frozenset(params.stop_token_ids)
        self.matcher = matcher
        self.needs_host = bool(params.penalized or params.logit_bias or params.min_tokens or matcher is not None)
        self.adapter = adapter
        self.cache_salt = cache_salt
        self.cached_tokens = 0
        self.queue_seconds = 0.0
        self.random = random.Random(params.seed)
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self.scheduler_state = SchedulerState(list(prompt), len(prompt) + limit)
        self.runner_state = RunnerState()
        self._drawn: deque[float] = deque()  # the random numbers of tokens that are not appended yet
        self._used = 0  # how many of these the launched steps use
        self._taken_tokens = 0
        self._taken_text = 0
        self._stream = stream
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)

    def uniforms(self, count: int) -> list[float]:
        """The next `count` random numbers from 0 to 1, one for each token to sample.

        The n-th number belongs to the n-th token of the answer. It is kept until that token is appended, since a step
        may fail, or sample tokens after a draft that is rejected.
        """
        while len(self._drawn) < self._used + count:
            self._drawn.append(self.random.random())
        numbers = [self._drawn[self._used + i] for i in range(count)]
        self._used += count
        return numbers

    def give_back(self, count: int) -> None:
        """Return the last `count` numbers of `uniforms`, which sampled no token: the next tokens get them.

        Raises:
            ValueError: more than were handed out for tokens that have not been appended.
        """
        if not 0 <= count <= self._used:
            raise ValueError(f"cannot give back {count} random numbers of {self._used}")
        self._used -= count

    def rewind(self) -> None:
        """Return the numbers of all tokens that were not appended."""
        self._used = 0

    def append(self, token: int, logprob: TokenLogprob | None = None) -> str:
        """Append the next token and return the new text that can be shown, which may be empty.

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
            # An answer that does not match its grammar was cut off.
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
        """Append the tokens that a step sampled, up to the first rejected draft or the end; returns those appended.

        Args:
            drafts: the draft tokens.
            chosen: the tokens sampled after none, the first, the first two, ... of the drafts, and their logprobs. None
                for a token whose logits hold NaN or infinity.

        Raises:
            WarpbusError: it cannot continue: a NumericError for NaN or infinite logits, or the error that it already
                has.
        """
        if self.error is not None:  # since the step was launched: its tokens are meaningless
            raise self.error
        right = accepted(drafts, [token for token, _ in chosen]) if drafts else 0
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
        """It has a finish reason or an error."""
        return self.finish_reason is not None or self.error is not None

    def fail(self, error: WarpbusError) -> None:
        """End with an error; the first error counts. Tokens generated before stay."""
        self.error, self.finish_reason = self.error or error, None

    def contain_faults(self) -> "_FaultContainment":
        """A block in which an exception becomes an error of this request alone.

        The block must not use a device: an error of a device concerns all requests, and so does a MemoryError, which
        is raised.
        """
        return _FaultContainment(self)

    def take(self) -> TextPiece:
        """The piece since the last call."""
        tokens, text = self._taken_tokens, self._taken_text
        self._taken_tokens, self._taken_text = len(self.token_ids), len(self.text)
        first = tokens == 0 and self._taken_tokens > 0
        return TextPiece(
            text=self.text[text:],
            token_ids=tuple(self.token_ids[tokens:]),
            logprobs=None if self.logprobs is None else tuple(self.logprobs[tokens:]),
            finish_reason=self.finish_reason,
            cached_tokens=self.cached_tokens,
            queue_seconds=self.queue_seconds,
            stop_string=self._stops.found,
            prompt_logprobs=tuple(self.prompt_logprobs) if first and self.prompt_logprobs is not None else None,
            pooled=tuple(self.pooled) if first and self.pooled is not None else None,
        )


class _FaultContainment:
    """See `Sequence.contain_faults`. A class, since a generator takes several times as long to enter and leave."""

    __slots__ = ("_sequence",)

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, MemoryError):
            return False
        self._sequence.fail(request_fault(error, self._sequence.index))
        return True
