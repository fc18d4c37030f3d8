"""The client of an engine in processes of its own: `Service`, for one event loop.

Knows nothing of tensors and of how tokens are computed: `serving_process` is the other side of the pipe.
"""

import asyncio
import logging
import secrets
import time
from collections import abc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from warpbus.cuda.devices import resolve_device
from warpbus.engine.adapters import check_adapter
from warpbus.engine.answer import Answer, Inbox, RequestTimes
from warpbus.engine.loading import load_engine
from warpbus.engine.messages import (
    Abort,
    Add,
    Ask,
    Command,
    LoadEngine,
    Loading,
    MoveTo,
    Query,
    Reply,
    RequestFailed,
    StepResults,
    UseAdapters,
)
from warpbus.engine.moving import Moved
from warpbus.engine.options import ServiceOptions
from warpbus.engine.pending import PendingRequests
from warpbus.engine.placement import devices_of
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.service_model import Health, ModelService, ServiceModel, State
from warpbus.engine.stats import Stats
from warpbus.engine.supervisor import (
    EngineDied,
    EngineEnded,
    EngineStalled,
    EngineSupervisor,
    EngineUp,
    Outbox,
    SupervisorEvent,
)
from warpbus.errors import (
    ConflictError,
    ContextLengthError,
    EngineDiedError,
    QueueFullError,
    UnavailableError,
    UsageError,
)
from warpbus.models import Progress

_log = logging.getLogger("warpbus.engine")

# How long the engine may take to stop: it finishes its step.
_SECONDS_TO_STOP = 10.0
# How long its processes may take to end after SIGKILL.
_SECONDS_TO_KILL = 10.0
# The Retry-After without an estimate, in seconds.
_RETRY_AFTER = 5.0


class Service(ModelService):
    """A model that answers many requests at once, in processes of its own.

    If the processes die, their requests end with `EngineDiedError` and the processes are restarted, with increasing
    delays; after several deaths in a row the service gives up, see `health`. Processes that make no progress for
    `options.watchdog_timeout` seconds are killed and restarted. Processes that die while asleep are restarted by
    `wake`. They end with this process, however it ends.
    """

    def __init__(
        self, served: ServiceModel, options: ServiceOptions, progress: Progress | None, load: LoadEngine, label: str
    ) -> None:
        """See `start`."""
        super().__init__(served, options)
        self._label = label
        self._progress = progress
        self._load = load
        self._state: State = "restarting"
        self._reason = "the engine is being started"
        self._stall = ""
        self._restarts = -1
        self._pending = PendingRequests()
        self._loop = asyncio.get_running_loop()
        self._outbox: Outbox | None = None
        self._supervisor: EngineSupervisor | None = None
        self._next_start: asyncio.Future[None] = self._loop.create_future()  # done if nothing waits for it
        self._ended = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    async def start(
        cls,
        model: str | Path,
        options: ServiceOptions | None = None,
        *,
        progress: Progress | None = None,
        load: LoadEngine = load_engine,
    ) -> Self:
        """Start the processes and wait until the model is loaded and warm.

        Args:
            model: a model directory (Hugging Face layout), quantized by Warpbus or not, or a name on a hub, see
                `formats.hub.find_model`.
            options: of the engine and the service.
            progress: called in the event loop while the weights are read; see `warpbus.models.Progress`.
            load: creates the engine, in each of its processes; a module-level function.

        Raises:
            UsageError: an option is out of range or not known, or the model does not fit the memory.
            DeviceError: a device does not exist, or its memory is full.
            CheckpointError: the directory is missing, damaged or not understood.
            WarpbusError: the engine did not start for another reason.
        """
        options = options or ServiceOptions()
        devices = devices_of(options)
        served = await ServiceModel.find(model, options)
        return await cls.start_on(devices, served, options, progress=progress, load=load)

    @classmethod
    async def start_on(
        cls,
        devices: abc.Sequence[torch.device],
        served: ServiceModel,
        options: ServiceOptions,
        *,
        progress: Progress | None = None,
        load: LoadEngine = load_engine,
        threads: int | None = None,
        label: str = "",
    ) -> Self:
        """As `start`, with one process on each of some devices, for a model that has been read already.

        Args:
            threads: CPU threads per process, unless `OMP_NUM_THREADS` says otherwise; by default all cores are shared
                among the processes.
            label: precedes what is logged.
        """
        service = cls(served, options, progress, load, label)
        service._supervisor = EngineSupervisor(
            service._arguments(),
            devices=devices,
            threads=threads,
            cluster=options.cluster,
            max_restarts=options.max_restarts,
            patience=options.watchdog_timeout,
            listen=service._on_events,
        )
        try:
            await service._next_start
        except BaseException:
            await service._kill(service._supervisor)
            raise
        return service

    def generate(
        self,
        prompt: list[int],
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        cache_salt: bytes = b"",
        expected_cached: int = 0,
    ) -> Answer:
        """Request the continuation of a prompt; returns at once (it is not awaited).

        Args:
            prompt: token ids.
            params: how tokens are sampled; `max_tokens` is limited to what the prompt leaves of the context.
            adapter: the name of one of `options.adapters`; None: the model without an adapter.
            cache_salt: at most 64 bytes; requests of different salts share no blocks of the prefix cache.
            expected_cached: tokens of the prompt that `pending_tokens` does not count.

        Raises:
            UsageError: the prompt is empty or holds an id that is not in the vocabulary, or there is no such adapter.
            ContextLengthError: the prompt leaves no room for an answer.
            QueueFullError: too many requests wait already; `retry_after` says when to come back.
            EngineDiedError: the engine died and is being restarted, or is not restarted any more.
            UnavailableError: the model sleeps, or the service is being closed.
        """
        self._check(prompt)
        check_adapter(adapter, [name for name, _ in self.options.adapters])
        if self._state == "asleep":
            raise UnavailableError("the model is asleep: wake it first")
        outbox = self._reachable()
        most = self.options.max_num_seqs + self.options.max_queue
        if len(self._pending) >= most:
            seconds = self._pending.seconds_of_queue(self.options.max_num_seqs, _RETRY_AFTER)
            raise QueueFullError(
                f"{most:,} requests run or wait already: try again in {seconds:.0f} s", retry_after=seconds
            )
        params = params or SamplingParams()
        if params.seed is None and self.options.tensor_parallel > 1:
            # The processes draw the same random numbers only from the same seed.
            params = replace(params, seed=secrets.randbits(63))
        inbox = Inbox(RequestTimes(time.monotonic(), len(prompt)), adapter, len(prompt) - expected_cached)
        number = self._pending.add(inbox)
        outbox.put(Add(number, prompt, params, adapter, cache_salt))
        return Answer(inbox, partial(self._on_answer_closed, number))

    async def stats(self) -> Stats:
        """The engine's counters, read between two steps.

        Raises:
            EngineDiedError: it died and is being restarted, or is not restarted any more.
            UnavailableError: the service is closed.
        """
        return await self._ask("stats")

    @property
    def replicas(self) -> dict[int, Self]:
        """The engines of the model: this one."""
        return {0: self}

    @property
    def pending(self) -> int:
        """The number of requests that run or wait."""
        return len(self._pending)

    @property
    def pending_tokens(self) -> int:
        """Tokens computed for these requests: of their prompts, unless they are cached, and of their answers so far."""
        return self._pending.tokens

    @property
    def alive(self) -> bool:
        """Requests can be answered, or could be after `wake`."""
        return self._state in ("ready", "asleep")

    @property
    def health(self) -> Health:
        """The state of the service."""
        restarts = max(0, self._restarts)
        if self._state == "ready" and self._stall:
            return Health("unresponsive", self._stall, restarts)
        return Health(self._state, self._reason, restarts)

    async def sleep(self) -> None:
        """Offload the model to main memory and return the GPUs' memory. Does nothing if the model is asleep.

        An engine that dies asleep is not restarted before `wake`.

        Raises:
            ConflictError: requests run or wait.
            UsageError: the engine cannot sleep, as one whose memory is planned.
            EngineDiedError, UnavailableError: as `stats`.
        """
        # A cancelled caller must not interrupt it halfway.
        await asyncio.shield(asyncio.ensure_future(self._sleep()))

    async def wake(self) -> None:
        """Load the model to the GPUs again. Does nothing if it is awake. An engine that died asleep is restarted.

        Raises:
            DeviceError: other programs use the memory; the model stays asleep.
            EngineDiedError, UnavailableError: as `stats`.
        """
        await asyncio.shield(asyncio.ensure_future(self._wake()))

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, in main memory too; a disk keeps its blocks.

        Raises:
            ConflictError: requests run or wait, or the model sleeps.
            EngineDiedError, UnavailableError: as `stats`.
        """
        async with self._one_at_a_time:
            if self._state == "asleep":
                raise ConflictError("the model sleeps: wake it first")
            self._reachable()
            if self._pending:
                raise ConflictError(f"{len(self._pending)} requests run or wait: try again when they have ended")
            await self._ask("forget")

    async def move(self, device: str) -> Moved:
        """Move the engine to another GPU of this machine (live migration); requests continue, except for a pause.

        Args:
            device: "cuda:1".

        Returns:
            the bytes copied and the length of the pause.

        Raises:
            ConflictError: the engine sleeps, or moves already.
            UsageError: it cannot move there, for example because it has several GPUs.
            DeviceError: there is no such GPU, or not enough memory; the engine stays where it is.
            EngineDiedError, UnavailableError: as `stats`.
        """
        # A cancelled caller must not interrupt it halfway.
        return await asyncio.shield(asyncio.ensure_future(self._move(device)))

    async def load_adapter(self, name: str, directory: str) -> None:
        """Load a LoRA; requests can name it afterwards. Requests that run pause while its files are read.

        Raises:
            UsageError: the name is in use, the memory is planned, or it is a P-Tuning prefix.
            ConflictError: the model sleeps or moves.
            CheckpointError, TensorError: the directory holds no LoRA of this model.
            EngineDiedError, UnavailableError: as `stats`.
        """
        names = [each for each, _ in self.options.adapters]
        if name in names:
            raise UsageError(f"there is an adapter {name!r} already: unload it first")
        if self.options.memory is not None:
            raise UsageError("the engine's memory is planned: load its adapters at the start")
        await asyncio.shield(asyncio.ensure_future(self._use_adapters(add=(name, directory))))

    async def unload_adapter(self, name: str) -> None:
        """Drop a LoRA.

        Raises:
            UsageError: there is no such adapter, or it is a P-Tuning prefix.
            ConflictError: requests use it, or the model sleeps or moves.
            EngineDiedError, UnavailableError: as `stats`.
        """
        check_adapter(name, [each for each, _ in self.options.adapters])
        await asyncio.shield(asyncio.ensure_future(self._use_adapters(drop=name)))

    async def close(self, *, drain: float = 0.0) -> None:
        """Refuse new requests, wait up to `drain` seconds for those that run, and end the others and the processes.

        The iterators of unfinished requests raise `UnavailableError`. May be called several times, also to shorten an
        earlier call's `drain`.
        """
        if self._state == "closed":
            return
        self._state, self._reason = "closing", "the service is being closed"
        with suppress(TimeoutError):
            await self._pending.wait_for_requests(drain)
        message = f"the service was closed, and this request not done within {drain:g} s: send it again"
        self._pending.fail_all(partial(UnavailableError, message))
        assert self._supervisor is not None
        self._supervisor.stop()
        try:
            await asyncio.wait_for(self._ended.wait(), _SECONDS_TO_STOP)
        except TimeoutError:
            await self._kill(self._supervisor)
        self._state, self._reason = "closed", "the service is closed"

    async def _kill(self, supervisor: EngineSupervisor) -> None:
        """Kill the processes; does not wait longer than some seconds for their end."""
        supervisor.kill()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), _SECONDS_TO_KILL)

    def _check(self, prompt: list[int]) -> None:
        if not prompt:
            raise UsageError("the prompt is empty: give at least one token")
        vocabulary = self.config.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            strange = next(token for token in prompt if not 0 <= token < vocabulary)
            raise UsageError(f"the prompt has the token id {strange}: the vocabulary has 0 to {vocabulary - 1:,}")
        if len(prompt) >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(prompt):,} tokens, the context holds {self.max_model_len:,} with the answer: "
                "shorten it"
            )

    def _reachable(self) -> Outbox:
        """The queue of commands. Raises if the engine cannot receive any."""
        if self._state in ("restarting", "failed"):
            raise EngineDiedError(self._reason, retry_after=_RETRY_AFTER if self._state == "restarting" else None)
        if self._state == "asleep" and self._outbox is None:
            raise EngineDiedError(self._reason)
        if self._outbox is None or self._state in ("closing", "closed"):
            raise UnavailableError(f"{self._reason}: it takes no more requests")
        return self._outbox

    async def _ask(self, query: Query) -> Any:
        return await self._answer_to(partial(Ask, query=query))

    async def _answer_to(self, question: Callable[[int], Command]) -> Any:
        """Send a command that has a reply, and wait for the reply.

        Args:
            question: makes the command from its number.
        """
        outbox = self._reachable()
        return await self._pending.reply(lambda number: outbox.put(question(number)))

    async def _sleep(self) -> None:
        async with self._one_at_a_time:
            if self._state == "asleep":
                return
            outbox = self._reachable()
            if self._pending:
                raise ConflictError(f"sleep: {len(self._pending)} requests run or wait: try again when they have ended")
            assert self._supervisor is not None
            self._supervisor.hold_restarts()
            self._state, self._reason = "asleep", "the model is asleep"
            try:
                await self._ask("sleep")
            except UnavailableError:
                raise
            except BaseException:
                self._awake(outbox)
                raise

    async def _wake(self) -> None:
        async with self._one_at_a_time:
            if self._state == "asleep" and self._outbox is None:
                await self._start_again()
                return
            outbox = self._reachable()
            if self._state == "asleep":
                await self._ask("wake")
                self._awake(outbox)

    def _awake(self, outbox: Outbox) -> None:
        """Record that the engine behind `outbox` is awake, unless it has died since or the service is being closed."""
        if self._state == "asleep" and self._outbox is outbox:
            self._state, self._reason = "ready", ""
            assert self._supervisor is not None
            self._supervisor.allow_restarts()

    async def _start_again(self) -> None:
        """Restart an engine that died asleep, and wait until it is ready."""
        assert self._supervisor is not None
        self._state, self._reason = "restarting", "the engine, which died asleep, is being started"
        up = self._next_start = self._loop.create_future()
        self._supervisor.allow_restarts()
        await up

    async def _move(self, device: str) -> Moved:
        async with self._one_at_a_time:
            if self._state == "asleep":
                raise ConflictError("move: the model sleeps: wake it first")
            self._reachable()
            if self.options.cluster is not None or self.options.tensor_parallel > 1:
                raise UsageError(
                    "move: the engine is in several processes, or in a cluster: only one by itself can move"
                )
            target = resolve_device(device)
            moved: Moved = await self._answer_to(partial(MoveTo, device=str(target)))
            assert self._supervisor is not None
            self._supervisor.moved(target)
            return moved

    def _arguments(self) -> tuple[object, ...]:
        """The arguments of the engine's process."""
        return self._load, self.model, self.options, self.config.vocab_size, self.stop_ids

    async def _use_adapters(self, *, add: tuple[str, str] | None = None, drop: str | None = None) -> None:
        async with self._one_at_a_time:
            if self._state == "asleep":
                raise ConflictError("the model sleeps: wake it first")
            self._reachable()
            if drop is not None and self._pending.uses(drop):
                raise ConflictError(f"requests use the adapter {drop!r}: try again when they have ended")
            before = self.options
            kept = tuple(each for each in before.adapters if each[0] != drop)
            wanted = replace(before, adapters=kept if add is None else (*kept, add))
            if drop is not None:
                self.options = wanted  # no request may name it from now on
            try:
                await self._answer_to(partial(UseAdapters, adapters=wanted.adapters))
            except BaseException:
                self.options = before
                raise
            self.options = wanted
            assert self._supervisor is not None
            self._supervisor.use_arguments(self._arguments())

    def _on_answer_closed(self, number: int) -> None:
        """Abort a request whose `Answer` was closed or dropped; called from any thread, the garbage collector's too."""
        if number in self._pending and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort_request, number)

    def _abort_request(self, number: int) -> None:
        if self._pending.drop(number) is not None and self._outbox is not None:
            self._outbox.put(Abort(number))

    def _on_events(self, when: float, reports: abc.Sequence[SupervisorEvent]) -> None:
        for report in reports:
            match report:
                case StepResults():
                    self._pending.deliver(when, report)
                case RequestFailed():
                    self._pending.fail(report)
                case Reply():
                    self._pending.take_reply(report)
                case Loading():
                    if self._progress is not None:
                        self._progress(report.done, report.total)
                case EngineUp():
                    self._on_engine_up(report)
                case EngineDied():
                    self._on_engine_died(report)
                case EngineStalled():
                    self._stall = report.what
                case EngineEnded():
                    self._ended.set()
                    if not self._next_start.done():
                        self._next_start.set_exception(UnavailableError(f"{self._reason}: the engine was not started"))

    def _on_engine_up(self, up: EngineUp) -> None:
        self._outbox, self.max_model_len = up.outbox, up.max_model_len
        if self._restarts < 0 and up.plan is not None:
            _log.info("%s%s: memory plan\n%s", self._label, self.model, up.plan)
        self._restarts += 1
        self._stall = ""
        if self._state == "restarting":
            self._state, self._reason = "ready", ""
        elif self._state == "asleep":  # it was restarted before `hold_restarts` had an effect
            up.outbox.put(Ask(self._pending.next_number(), "sleep"))
        if not self._next_start.done():
            self._next_start.set_result(None)

    def _on_engine_died(self, death: EngineDied) -> None:
        self._outbox, self._stall = None, ""
        if not self._next_start.done():
            self._next_start.set_exception(death.error)
            if self._restarts < 0:  # it has never been ready
                return
        then = "it is being restarted: send the request again"
        if self._state == "asleep" and death.again:
            then = "it sleeps until it is woken"
        elif not death.again:
            then = f"it is given up after {self.options.max_restarts} restarts in a row: restart the server"
        message = f"the engine died: {death.what}; {then}"
        _log.warning("%s%s", self._label, message)
        retry_after = _RETRY_AFTER if death.again else None
        if self._state not in ("closing", "closed"):
            after: State = "asleep" if self._state == "asleep" else "restarting"
            self._state, self._reason = after if death.again else "failed", message
        self._pending.fail_all(partial(EngineDiedError, message, retry_after=retry_after))
