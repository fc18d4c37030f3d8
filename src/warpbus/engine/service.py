"""The model in a process of its own, and what asks it: `Service`, for one event loop.

Knows nothing of tensors and of how tokens are computed: `serving_process` is the other side.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from warpbus.engine.options import ServiceOptions
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.sequence import Piece
from warpbus.models import ModelConfig, Progress
from warpbus.models.templates import Template
from warpbus.models.tokenizers import Tokenizer

if TYPE_CHECKING:
    from warpbus.engine.engine import Stats

State = Literal["ready", "asleep", "restarting", "failed", "closing", "closed"]


@dataclass(frozen=True)
class Health:
    """How the service is.

    Attributes:
        state: "ready", "asleep" (see `Service.sleep`), "restarting" (the engine died), "failed" (it died too often and
            is given up), "closing" (no new requests are taken) or "closed".
        reason: why it is not ready; empty where it is.
        restarts: how often the engine has been started again.
    """

    state: State
    reason: str
    restarts: int


@dataclass
class RequestTimes:
    """When things happened to a request, in seconds of `time.monotonic()`; None for what has not happened.

    Attributes:
        arrived: `Service.generate` was called.
        started: the engine's process had it; what lies between is the way there.
        first_token: the step that gave the first token had ended.
        finished: the step that gave the last token had ended.
        prompt_tokens, cached_tokens, output_tokens: of the prompt, of these found in the cache, and generated.
    """

    arrived: float
    prompt_tokens: int
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    output_tokens: int = 0


class Answer(AsyncIterator[Piece]):
    """One request's pieces, as `Service.generate` gives them.

        async with service.generate(prompt, params) as answer:
            async for piece in answer:
                ...

    Pieces that wait are merged into one; the last has a `finish_reason`. Leaving the block, `aclose`, or dropping the
    object calls the request off where it still runs. Giving up a wait for a piece (a timeout) loses nothing. Belongs to
    the service's event loop and to one consumer.

    Attributes:
        times: `RequestTimes`, filled in as pieces come.

    Raises:
        EngineDiedError: while iterating: the engine's process died.
        UnavailableError: while iterating: the service was closed before the answer had ended.
        UsageError: while iterating: the engine refuses the request, for example for its grammar.
    """

    times: RequestTimes

    async def __anext__(self) -> Piece:
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Call the request off, if it still runs."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Service:
    """A model that answers many requests at once, in processes of its own.

    If these die, their requests end with `EngineDiedError`, and they are started again, at growing intervals; after
    several deaths in a row the service gives up, see `health`. They end with this process, however it ends.

    Attributes:
        model: the model directory.
        options: `ServiceOptions`.
        config: the model's `ModelConfig`.
        tokenizer, template: how text and conversations become tokens.
        stop_ids: generation ends at any of these tokens.
        max_model_len: the longest prompt with its answer, in tokens.
    """

    model: Path
    options: ServiceOptions
    config: ModelConfig
    tokenizer: Tokenizer
    template: Template
    stop_ids: frozenset[int]
    max_model_len: int

    @classmethod
    async def start(
        cls, model: str | Path, options: ServiceOptions | None = None, *, progress: Progress | None = None
    ) -> Self:
        """Start the processes and wait until the model is loaded and warm.

        Args:
            model: a model directory (Hugging Face layout), quantized by Warpbus or not.
            options: how it is served.
            progress: called in the event loop while the weights are read; see `warpbus.models.Progress`.

        Raises:
            UsageError: an option is out of range or not known, or the model does not fit the memory.
            DeviceError: a device is not there, or its memory is full.
            CheckpointError: the directory is missing, damaged or not understood.
            WarpbusError: what else kept the engine from starting.
        """
        raise NotImplementedError

    def generate(self, prompt: list[int], params: SamplingParams | None = None) -> Answer:
        """Ask for the continuation of a prompt; returns at once (it is not awaited).

        Args:
            prompt: token ids.
            params: how tokens are chosen; `max_tokens` is cut to the room that the prompt leaves.

        Raises:
            UsageError: the prompt is empty or holds an id that is not in the vocabulary.
            ContextLengthError: the prompt leaves no room for an answer.
            QueueFullError: too many requests wait already; `retry_after` says when to come back.
            EngineDiedError: the engine died and is being restarted, or has been given up.
            UnavailableError: the model sleeps, or the service is being closed.
        """
        raise NotImplementedError

    async def stats(self) -> "Stats":
        """What the engine counts, at a moment between two steps.

        Raises:
            EngineDiedError: it died and is being restarted, or has been given up.
            UnavailableError: the service is closed.
        """
        raise NotImplementedError

    @property
    def pending(self) -> int:
        """Requests that run or wait."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        """Requests can be answered, or could be after `wake`."""
        raise NotImplementedError

    @property
    def health(self) -> Health:
        """How the service is."""
        raise NotImplementedError

    async def sleep(self) -> None:
        """Give the GPUs' memory back, keeping the model in main memory. Nothing happens if it sleeps.

        Raises:
            UsageError: requests run or wait.
            EngineDiedError, UnavailableError: as `stats`.
        """
        raise NotImplementedError

    async def wake(self) -> None:
        """Get the GPUs' memory back. Nothing happens if it is awake.

        Raises:
            DeviceError: somebody else has taken the memory; it sleeps on.
            EngineDiedError, UnavailableError: as `stats`.
        """
        raise NotImplementedError

    async def close(self, *, drain: float = 0.0) -> None:
        """Take no more requests, let those that run finish for `drain` seconds, end the others, and the processes.

        What is not finished raises `UnavailableError` in its iterator. May be called several times.
        """
        raise NotImplementedError
