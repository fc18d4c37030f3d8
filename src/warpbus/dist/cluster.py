"""Starts the processes of a job on the machines of a Ray cluster (extra `cluster`)."""

import importlib
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

import torch

from warpbus.dist.group import join
from warpbus.dist.outcome import Done, Job, JobFailure, Message, Receive
from warpbus.dist.ray_cluster import connect, disconnect, load_ray
from warpbus.dist.watchdog import Heartbeat, Patience, Pulse, Watchdog
from warpbus.errors import DeviceError, WarpbusError

# How long the job waits for free GPUs or cores.
_SECONDS_FOR_RESOURCES = 60
# The failure of a process that lost a peer may arrive before the peer's own failure, which Ray reports later.
_SECONDS_FOR_THE_CAUSE = 30.0
# A call that waits for messages returns an empty list after this time, so that no thread of an actor waits forever.
_SECONDS_OF_SILENCE = 5.0


class ClusterProcesses:
    """The processes of a job on a Ray cluster, with the interface of `Processes`.

    They run on any machines of the cluster, as few as possible (placement strategy PACK). Each machine needs Warpbus
    installed, and paths among the arguments have to refer to the same files everywhere. The processes end with the job
    and with this process.

    Args:
        function: see `Processes`; the arguments of `run` are copied.
        processes: number of processes.
        address: "auto", the cluster that this machine belongs to, or "ray://HOST:PORT".
        gpus: each process gets one GPU, its `cuda:0`; otherwise one CPU core.
        receive: see `Processes`.
        patience: see `Processes`.

    Raises:
        UsageError: Ray is not installed, or there is no cluster at `address`.
        WarpbusError: raised by one of the processes, with its class and message.
        DeviceError: the cluster has too few free GPUs or cores, a process or its machine died or made no progress for
            too long, or a process raised another exception.
    """

    def __init__(
        self,
        function: Job,
        *,
        processes: int,
        address: str,
        gpus: bool,
        receive: Receive,
        patience: Patience | None = None,
    ) -> None:
        self._function = function
        self._receive = receive
        self._address = address
        self._ray = load_ray()
        self._pool = _ActorPool(self._ray, processes, address, gpus, patience or Patience())
        self._connected_here = False

    def __enter__(self) -> Self:
        self._connected_here = connect(self._ray, self._address)
        return self

    def run(self, *arguments: object) -> None:
        """Run the job in all processes, once; returns when all have returned."""
        self._pool.run(self._function, arguments, self._receive)

    def tell(self, what: object) -> None:
        """As `Processes.tell`, but never blocks."""
        self._pool.tell(what)

    def hurry(self) -> None:
        """As `Processes.hurry`."""
        self._pool.watchdog.hurry()

    def kill(self) -> None:
        """As `Processes.kill`."""
        self._pool.kill()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connected_here:
            disconnect(self._ray)


class _QueuePipe:
    """The `JobPipe` of a job in a Ray actor."""

    def __init__(
        self,
        outgoing: "SimpleQueue[Message | Done | JobFailure | Heartbeat]",
        incoming: "SimpleQueue[Any]",
        *,
        on_cpu: bool,
    ) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self.pulse = Pulse(outgoing.put, on_cpu=on_cpu)

    def __call__(self, content: object, /) -> None:
        self._outgoing.put(Message(content))

    def heard(self, timeout: float | None) -> list[Any]:
        messages = []
        try:
            messages.append(self._incoming.get(timeout != 0.0, timeout))
            while True:
                messages.append(self._incoming.get_nowait())
        except Empty:
            return messages

    def step(self) -> AbstractContextManager[None]:
        return self.pulse.step()


class _Actor:
    """A worker process of the job. `run` occupies one thread; `messages` and `hear` are called in others."""

    def __init__(self) -> None:
        self._outgoing: SimpleQueue[Message | Done | JobFailure | Heartbeat] = SimpleQueue()
        self._incoming: SimpleQueue[Any] = SimpleQueue()

    def node(self) -> str:
        return load_ray().util.get_node_ip_address()

    def free_port(self) -> int:
        with socket.socket() as free:
            free.bind(("", 0))
            return free.getsockname()[1]

    def run(self, place: tuple[str, int, int, str], work: tuple[Job, tuple[object, ...]]) -> None:
        meeting, rank, world, device = place
        function, arguments = work
        pipe = _QueuePipe(self._outgoing, self._incoming, on_cpu=device == "cpu")
        pipe.pulse.start()
        try:
            group = join(meeting, rank, world, torch.device(device))
            function(group, pipe, *arguments)
        except BaseException as error:
            self._outgoing.put(JobFailure.of(error))
        else:
            self._outgoing.put(Done())
        pipe.pulse.stop()

    def hear(self, what: object) -> None:
        self._incoming.put(what)

    def messages(self) -> list[Message | Done | JobFailure | Heartbeat]:
        """The messages since the last call; waits up to `_SECONDS_OF_SILENCE` for the first."""
        try:
            messages = [self._outgoing.get(timeout=_SECONDS_OF_SILENCE)]
        except Empty:
            return []
        while not self._outgoing.empty():
            messages.append(self._outgoing.get())
        return messages


class _ActorPool:
    """The actors of one job and their placement group."""

    def __init__(self, ray: Any, processes: int, address: str, gpus: bool, patience: Patience) -> None:
        names = {rank: f"process {rank} of cluster {address}" for rank in range(processes)}
        self.watchdog = Watchdog(names, patience, self.kill)
        self._ray = ray
        self._world = processes
        self._address = address
        self._gpus = gpus
        self._actors: list[Any] = []
        self._nodes: list[str] = []

    def run(self, function: Job, arguments: Sequence[object], receive: Receive) -> None:
        util = importlib.import_module("ray.util")
        held = util.placement_group([{"GPU": 1} if self._gpus else {"CPU": 1}] * self._world, strategy="PACK")
        try:
            if not held.wait(_SECONDS_FOR_RESOURCES):
                raise self._too_few()
            self._start(held)
            port = self._get(0, self._actors[0].free_port.remote())
            meeting, device = f"tcp://{self._nodes[0]}:{port}", "cuda:0" if self._gpus else "cpu"
            shared = self._ray.put((function, tuple(arguments)))
            running = [
                actor.run.remote((meeting, rank, self._world, device), shared)
                for rank, actor in enumerate(self._actors)
            ]
            with self.watchdog:
                self._listen(receive, running)
        finally:
            self.kill()
            util.remove_placement_group(held)

    def tell(self, what: object) -> None:
        # A concurrency group with one thread keeps the order of messages.
        self._actors[0].hear.options(concurrency_group="hear").remote(what)

    def kill(self) -> None:
        for actor in list(self._actors):
            self._ray.kill(actor)

    def _start(self, held: Any) -> None:
        strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        kind = self._ray.remote(concurrency_groups={"hear": 1})(_Actor)
        for rank in range(self._world):
            options = kind.options(
                num_cpus=0 if self._gpus else 1,
                num_gpus=1 if self._gpus else 0,
                max_concurrency=2,
                scheduling_strategy=strategy(placement_group=held, placement_group_bundle_index=rank),
            )
            self._actors.append(options.remote())
        asked = [actor.node.remote() for actor in self._actors]
        for rank, answer in enumerate(asked):
            self._nodes.append(self._get(rank, answer))

    def _listen(self, receive: Receive, running: list[Any]) -> None:
        """Pass messages to `receive` until all processes have returned."""
        asked = {actor.messages.remote(): rank for rank, actor in enumerate(self._actors)}
        while asked:
            ready, _ = self._ray.wait(list(asked))
            rank = asked.pop(ready[0])
            outcomes = self._get(rank, ready[0])
            if not outcomes and self._ray.wait([running[rank]], timeout=0)[0]:
                self._get(rank, running[rank])  # it did not start: the function could not be imported there
            for outcome in outcomes:
                self.watchdog.heard(rank, outcome)
                if isinstance(outcome, Message):
                    with self.watchdog.busy():
                        receive(outcome.content)
                elif isinstance(outcome, JobFailure):
                    raise self._cause(rank, outcome, asked)
            if any(isinstance(outcome, Done) for outcome in outcomes):
                self.watchdog.done(rank)
            else:
                asked[self._actors[rank].messages.remote()] = rank

    def _cause(self, rank: int, failure: JobFailure, asked: dict[Any, int]) -> WarpbusError:
        """The exception to raise after `failure` of a process, which the death of another process may have caused."""
        end = time.monotonic() + _SECONDS_FOR_THE_CAUSE
        while failure.kind is None and asked and time.monotonic() < end:
            ready, _ = self._ray.wait(list(asked), timeout=end - time.monotonic())
            for answer in ready:
                other = asked.pop(answer)
                try:
                    outcomes = self._get(other, answer)
                except DeviceError as death:
                    return death
                for outcome in outcomes:
                    if isinstance(outcome, JobFailure) and outcome.kind is not None:
                        return outcome.error(self._name(other))
                if all(isinstance(outcome, Message | Heartbeat) for outcome in outcomes):
                    asked[self._actors[other].messages.remote()] = other
        return failure.error(self._name(rank))

    def _get(self, rank: int, answer: Any) -> Any:
        try:
            return self._ray.get(answer)
        except self._ray.exceptions.RayActorError as error:
            if self.watchdog.verdict is not None:
                raise self.watchdog.verdict from error
            raise DeviceError(
                f"{self._name(rank)} died, or its machine did: see `ray status` and Ray's logs there, and run it again"
            ) from error
        except self._ray.exceptions.RayError as error:
            first = str(error).strip().splitlines()[-1]
            raise DeviceError(
                f"{self._name(rank)} could not start: {first}: install the same Warpbus on each machine of the cluster"
            ) from error

    def _name(self, rank: int) -> str:
        node = f" on node {self._nodes[rank]}" if rank < len(self._nodes) else ""
        return f"process {rank}{node} of cluster {self._address}"

    def _too_few(self) -> DeviceError:
        kind, what = ("GPU", "GPUs") if self._gpus else ("CPU", "CPU cores")
        has = self._ray.cluster_resources().get(kind, 0)
        free = self._ray.available_resources().get(kind, 0)
        return DeviceError(
            f"cluster {self._address}: the job needs {self._world} {what}, the cluster has {has:.0f}, of which "
            f"{free:.0f} are free: use fewer processes, add machines, or wait for other jobs"
        )
