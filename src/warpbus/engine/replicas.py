"""Several engines of one model behind one interface (data parallelism): `ReplicaSet`, for one event loop.

Each replica is a `Service` with processes of its own, which starts, watches and restarts them. The set routes requests,
and applies everything else to all replicas.
"""

import asyncio
import logging
import os
from collections import abc
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from warpbus.engine.adapters import salt_of
from warpbus.engine.answer import Answer, RequestTimes
from warpbus.engine.blocks import block_keys
from warpbus.engine.loading import load_engine
from warpbus.engine.messages import LoadEngine
from warpbus.engine.moving import Moved
from warpbus.engine.options import ReplicaOptions, ServiceOptions
from warpbus.engine.placement import check_replicas, replica_devices
from warpbus.engine.routing import PrefixRouter
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.scaling import QueueScaling
from warpbus.engine.sequence import TextPiece
from warpbus.engine.service import Service
from warpbus.engine.service_model import Health, ModelService, ServiceModel, State
from warpbus.errors import EngineDiedError, QueueFullError, UsageError, WarpbusError
from warpbus.models import Progress

# The state of a set is the first of these that one of its replicas has.
_STATES: tuple[State, ...] = ("ready", "unresponsive", "asleep", "restarting", "closing", "closed", "failed")

_GONE: tuple[State, ...] = ("closing", "closed", "failed")  # it does not come back

_SECONDS_BETWEEN_LOOKS = 1.0
# After a replica could not be started, the next attempt waits so long.
_SECONDS_AFTER_FAILURE = 60.0
_SECONDS_TO_DRAIN = 3600.0

_log = logging.getLogger("warpbus.engine")


class ReplicaSet(ModelService):
    """The replicas of a model, with the interface of a `Service`.

    A request goes to the replica that `PrefixRouter` ranks first, among those that are ready. If that replica dies
    before the request has got a token, the request is sent to another one, once; afterwards, and for all other
    requests of the replica, it ends with `EngineDiedError`. The replica is restarted while the others continue. On a
    cluster the number of replicas may follow the length of their queues (`QueueScaling`).

    Attributes:
        replicas: the services, by their numbers.
    """

    def __init__(
        self, served: ServiceModel, options: ServiceOptions, replicas: ReplicaOptions, load: LoadEngine
    ) -> None:
        """See `start`."""
        super().__init__(served, options)
        self.replicas: dict[int, Service] = {}
        self._served = served
        self._load = load
        self._threads = max(1, (os.cpu_count() or 1) // (replicas.count * options.tensor_parallel))
        self._router = PrefixRouter()
        self._restarts: dict[int, int] = {}
        self._one_at_a_time = asyncio.Lock()
        self._scaling: asyncio.Task[None] | None = None
        self._draining: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(
        cls,
        model: str | Path,
        options: ServiceOptions | None = None,
        replicas: ReplicaOptions | None = None,
        *,
        progress: Progress | None = None,
        load: LoadEngine = load_engine,
        scaling: QueueScaling | None = None,
    ) -> Self:
        """Start all replicas at once, and wait until they are loaded and warm.

        Args:
            options: of each replica.
            replicas: how many there are.
            model, progress, load: as of `Service.start`; the progress is that of all replicas together.
            scaling: decides how many there are later; by default within the limits of `replicas`.

        Raises:
            DeviceError: there are fewer GPUs than all replicas need; or as `Service.start`.
            UsageError: `replicas` asks for a cluster, and `options` names none; or as `Service.start`.
            CheckpointError, WarpbusError: as `Service.start`. No replica runs then.
        """
        options, replicas = options or ServiceOptions(), replicas or ReplicaOptions()
        check_replicas(options, replicas)
        devices = replica_devices(options, replicas.count)
        found = cls(await ServiceModel.find(model, options), options, replicas, load)
        total = _TotalProgress(progress, replicas.count)
        starting = [
            asyncio.ensure_future(found._start(number, options, own, partial(total.report, number)))
            for number, own in enumerate(devices)
        ]
        try:
            for number, service in enumerate(await asyncio.gather(*starting)):
                await found._add(number, service)
        except BaseException:
            for task in starting:
                task.cancel()
            for outcome in await asyncio.gather(*starting, return_exceptions=True):
                if isinstance(outcome, Service):
                    await outcome.close()
            raise
        if replicas.most > replicas.fewest:
            scaling = scaling or QueueScaling(replicas.fewest, replicas.most, options.max_num_seqs)
            found._scaling = asyncio.create_task(found._scale(scaling))
        return found

    def generate(
        self,
        prompt: list[int],
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        cache_salt: bytes = b"",
    ) -> "RoutedAnswer":
        """Request the continuation of a prompt from one of the replicas; as `Service.generate`.

        Raises:
            QueueFullError: the queues of all replicas are full; `retry_after` is the least of theirs.
            EngineDiedError, UnavailableError: no replica can take requests.
            UsageError, ContextLengthError: as `Service.generate`.
        """
        request = _RoutedRequest(prompt, params, adapter, cache_salt)
        keys = block_keys(prompt, salt=salt_of(adapter, cache_salt)) if self.options.prefix_caching else []
        number, answer = self._send(request, keys, self._candidates(adapter) or [self._best()])

        def send_again(died: int) -> Answer | None:
            others = [other for other in self._candidates(adapter) if other != died]
            return self._send(request, keys, others)[1] if others else None

        return RoutedAnswer(answer, partial(send_again, number))

    @property
    def pending(self) -> int:
        """The number of requests that run or wait."""
        return sum(replica.pending for replica in self.replicas.values())

    @property
    def alive(self) -> bool:
        """Requests can be answered, or could be after `wake`."""
        return any(replica.alive for replica in self.replicas.values())

    @property
    def health(self) -> Health:
        """The state of the set: ready if one of the replicas is. `restarts` counts those of all replicas."""
        found = {number: replica.health for number, replica in self.replicas.items()}
        state = found[self._best()].state
        reasons = [f"replica {number}: {health.reason}" for number, health in found.items() if health.reason]
        return Health(
            state,
            "" if state == "ready" else "; ".join(reasons),
            sum(health.restarts for health in found.values()),
        )

    async def sleep(self) -> None:
        """Offload all replicas, or none. Does nothing for those that are asleep.

        Raises: as `Service.sleep`; EngineDiedError while a replica restarts.
        """
        await self._on_all(Service.sleep, undo=Service.wake)
        for number in self.replicas:
            self._router.forget(number)

    async def wake(self) -> None:
        """Load all replicas to the GPUs again. Does nothing for those that are awake.

        Raises: as `Service.wake`, of the first replica that stays asleep; the others are awake.
        """
        await self._on_all(Service.wake)

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix caches of all replicas. If one fails, those of the others may be empty.

        Raises: as `Service.reset_prefix_cache`; EngineDiedError while a replica restarts.
        """
        await self._on_all(Service.reset_prefix_cache)
        for number in self.replicas:
            self._router.forget(number)

    async def move(self, device: str) -> Moved:
        """Not for several replicas. Raises UsageError."""
        raise UsageError(f"move to {device}: the model has {len(self.replicas)} replicas, and only one alone can move")

    async def load_adapter(self, name: str, directory: str) -> None:
        """Load a LoRA in all replicas, or in none.

        Raises: as `Service.load_adapter`; EngineDiedError while a replica restarts.
        """
        await self._on_all(
            lambda replica: replica.load_adapter(name, directory),
            undo=lambda replica: replica.unload_adapter(name),
            done=lambda replica: (name, directory) in replica.options.adapters,
        )

    async def unload_adapter(self, name: str) -> None:
        """Drop a LoRA in all replicas, or in none.

        Raises: as `Service.unload_adapter`; EngineDiedError while a replica restarts.
        """
        found = {dict(replica.options.adapters).get(name, "") for replica in self.replicas.values()}
        await self._on_all(
            lambda replica: replica.unload_adapter(name),
            undo=lambda replica: replica.load_adapter(name, max(found)),
            done=lambda replica: name not in dict(replica.options.adapters),
        )

    async def close(self, *, drain: float = 0.0) -> None:
        """As `Service.close`, of all replicas at once."""
        if self._scaling is not None:
            self._scaling.cancel()
            await asyncio.gather(self._scaling, return_exceptions=True)
        await asyncio.gather(*[replica.close(drain=drain) for replica in self.replicas.values()], *self._draining)

    async def _start(
        self,
        number: int,
        options: ServiceOptions,
        devices: abc.Sequence[torch.device],
        progress: Progress | None = None,
    ) -> Service:
        """Start a replica."""
        return await Service.start_on(
            devices,
            self._served,
            options,
            progress=progress,
            load=self._load,
            threads=self._threads,
            label=f"replica {number}: ",
        )

    async def _add(self, number: int, service: Service) -> None:
        """Let a replica take requests."""
        stats = await service.stats()
        self._router.add(number, stats.blocks)
        self._restarts[number] = service.health.restarts
        self.max_model_len = min(self.max_model_len, service.max_model_len)
        self.replicas[number] = service

    async def _scale(self, scaling: QueueScaling) -> None:
        """Add and remove replicas until this is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
            kept = [replica for replica in self.replicas.values() if replica.health.state not in _GONE]
            if any(replica.health.state != "ready" for replica in kept):
                continue  # they restart, or sleep: their requests are elsewhere for a while
            try:
                stats = await asyncio.gather(*[replica.stats() for replica in kept])
                running, waiting = sum(each.running for each in stats), sum(each.waiting for each in stats)
                wanted = scaling.wanted(loop.time(), len(kept), running=running, waiting=waiting)
                if wanted > len(kept):
                    await self._start_one_more()
                elif wanted < len(kept):
                    self._remove_one()
            except WarpbusError as error:
                _log.warning("%s: the number of replicas could not be changed: %s", self.model, error)
                await asyncio.sleep(_SECONDS_AFTER_FAILURE)

    async def _start_one_more(self) -> None:
        number = next(number for number in count() if number not in self.replicas)
        _log.info("%s: requests wait: replica %d is being started", self.model, number)
        before = self._adapters()
        devices = replica_devices(self.options, 1)[0]
        service = await self._start(number, replace(self.options, adapters=before), devices)
        try:
            async with self._one_at_a_time:
                now = self._adapters()
                for name, _ in before:
                    if name not in dict(now):
                        await service.unload_adapter(name)
                for name, directory in now:
                    if name not in dict(before):
                        await service.load_adapter(name, directory)
                asleep = self.health.state == "asleep"
                await self._add(number, service)
                if asleep:
                    await service.sleep()
        except BaseException:
            await service.close()
            raise

    def _remove_one(self) -> None:
        """Drain the replica with the fewest tokens: it takes no more requests, and ends with those that it has."""
        able = [number for number, replica in self.replicas.items() if replica.health.state == "ready"]
        number = min(able, key=lambda number: (self.replicas[number].pending_tokens, -number))
        _log.info("%s: few requests run: replica %d is drained", self.model, number)
        task = asyncio.create_task(self._drain(number))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)

    async def _drain(self, number: int) -> None:
        await self.replicas[number].close(drain=_SECONDS_TO_DRAIN)
        async with self._one_at_a_time:
            del self.replicas[number], self._restarts[number]
            self._router.remove(number)

    def _adapters(self) -> tuple[tuple[str, str], ...]:
        """The adapters that requests can name now."""
        return self.replicas[self._best()].options.adapters

    def _best(self) -> int:
        """The replica whose state comes first in `_STATES`."""
        return min(self.replicas, key=lambda number: _STATES.index(self.replicas[number].health.state))

    def _candidates(self, adapter: str | None) -> list[int]:
        """The replicas that can answer now, or, if there are none, those that are unresponsive."""
        able = {
            number: replica.health.state
            for number, replica in self.replicas.items()
            if adapter is None or adapter in dict(replica.options.adapters)
        }
        return next(
            (found for state in _STATES[:2] if (found := [number for number in able if able[number] == state])), []
        )

    def _send(
        self, request: "_RoutedRequest", keys: abc.Sequence[bytes], candidates: abc.Sequence[int]
    ) -> tuple[int, Answer]:
        """Send a request to the best of some replicas whose queue is not full; its number, and the answer."""
        for number, replica in self.replicas.items():
            if replica.health.restarts != self._restarts[number]:
                self._restarts[number] = replica.health.restarts
                self._router.forget(number)
        loads = {number: self.replicas[number].pending_tokens for number in candidates}
        full: list[QueueFullError] = []
        for number, cached in self._router.rank(keys, len(request.prompt), loads):
            try:
                answer = request.send(self.replicas[number], cached)
            except QueueFullError as error:
                full.append(error)
                continue
            self._router.record(number, keys)
            return number, answer
        raise min(full, key=lambda error: error.retry_after or 0.0)

    async def _on_all(
        self,
        change: Callable[[Service], Awaitable[None]],
        *,
        undo: Callable[[Service], Awaitable[None]] | None = None,
        done: Callable[[Service], bool] = lambda replica: False,
    ) -> None:
        """Change all replicas, except for those that are given up.

        Args:
            undo: the opposite, for the changed replicas if another one fails.
            done: whether a replica needs no change; if none does, all are changed.
        """
        # A cancelled caller must not interrupt it halfway.
        await asyncio.shield(asyncio.ensure_future(self._change(change, undo, done)))

    async def _change(
        self,
        change: Callable[[Service], Awaitable[None]],
        undo: Callable[[Service], Awaitable[None]] | None,
        done: Callable[[Service], bool],
    ) -> None:
        async with self._one_at_a_time:
            everyone = list(self.replicas.values())
            kept = [replica for replica in everyone if replica.health.state not in _GONE] or everyone
            wanted = [replica for replica in kept if not done(replica)] or kept
            outcomes = await asyncio.gather(*[change(replica) for replica in wanted], return_exceptions=True)
            errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            if not errors:
                return
            if undo is not None:
                changed = [replica for replica, outcome in zip(wanted, outcomes, strict=True) if outcome is None]
                undone = await asyncio.gather(*[undo(replica) for replica in changed], return_exceptions=True)
                for outcome in undone:
                    if outcome is not None:
                        _log.warning("%s: a replica could not be set back: %s", self.model, outcome)
            raise errors[0]


class RoutedAnswer(AsyncIterator[TextPiece]):
    """An `Answer` of one of several replicas, with the same interface.

    Args:
        answer: of the replica that was chosen first.
        again: sends the request to another replica; None if there is none.
    """

    def __init__(self, answer: Answer, again: Callable[[], Answer | None]) -> None:
        self._answer = answer
        self._again: Callable[[], Answer | None] | None = again

    @property
    def times(self) -> RequestTimes:
        """`RequestTimes` of the replica that has the request now."""
        return self._answer.times

    async def __anext__(self) -> TextPiece:
        try:
            piece = await self._answer.__anext__()
        except EngineDiedError:
            # Once: a request that kills its engine must not kill all of them.
            again, self._again = self._again, None
            other = None if again is None else again()
            if other is None:
                raise
            self._answer = other
            piece = await self._answer.__anext__()
        self._again = None
        return piece

    async def aclose(self) -> None:
        """Abort the request if it still runs."""
        await self._answer.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


@dataclass(frozen=True)
class _RoutedRequest:
    """The arguments of `Service.generate`."""

    prompt: list[int]
    params: SamplingParams | None
    adapter: str | None
    cache_salt: bytes

    def send(self, replica: Service, cached: int) -> Answer:
        """Request the answer from a replica, which probably has so many tokens of the prompt in its prefix cache."""
        return replica.generate(
            self.prompt, self.params, self.adapter, cache_salt=self.cache_salt, expected_cached=cached
        )


class _TotalProgress:
    """Adds up the progress of replicas that load at the same time."""

    def __init__(self, progress: Progress | None, count: int) -> None:
        self._progress = progress
        self._count = count
        self._done: dict[int, int] = {}

    def report(self, number: int, done: int, total: int) -> None:
        """The progress of a replica; see `warpbus.models.Progress`."""
        self._done[number] = done
        if self._progress is not None:
            self._progress(sum(self._done.values()), total * self._count)


async def start_service(
    model: str | Path, options: ServiceOptions, replicas: ReplicaOptions, *, progress: Progress | None = None
) -> Service | ReplicaSet:
    """Start a model with as many replicas as are asked for. Raises: as `ReplicaSet.start`."""
    if replicas.most == 1:
        check_replicas(options, replicas)
        return await Service.start(model, options, progress=progress)
    return await ReplicaSet.start(model, options, replicas, progress=progress)
