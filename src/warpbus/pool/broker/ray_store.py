"""The broker of a pool whose machines find each other over Ray (extra `cluster`), and the pool's members.

Each host has an agent, an actor of Ray on its node that lives as long as the process that offered the host. There is
one broker for all, a detached actor: it outlives the process that made it, and Ray starts it again on another node if
its own one dies. It sends what it knows to all agents after each change; one that starts takes the newest copy.

Ray's table of nodes shows what has failed: a host whose node is dead leaves at once, and its leases are lost. An
agent that does not answer while its node lives has the grace time, so that a daemon can be started again. A host that
comes back after it has left has no leases any more, and has to end what runs there before it is offered.

Nothing here listens on a port of its own; Ray's own ports are as open as the cluster was started with. Ray pickles what
its processes tell each other, so whoever reaches these ports can run code there: they belong into a private network.
"""

import asyncio
import contextlib
import importlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from warpbus.dist.outcome import JobFailure
from warpbus.dist.ray_cluster import connect, disconnect, load_ray
from warpbus.errors import UnavailableError, UsageError, WarpbusError
from warpbus.pool.broker.broker import Broker
from warpbus.pool.broker.leases import Lease, Limits, PoolGpu
from warpbus.pool.broker.request_checks import checked_gpus
from warpbus.pool.broker.store import BrokerStore

T = TypeVar("T")

NAMESPACE = "warpbus-pool"
"""Ray's namespace of the pool's actors: one pool a cluster."""

_AGENT = "agent:"
_BROKER = "broker"
# A daemon that was started again gets its name when Ray has seen that the one before it is dead.
_SECONDS_FOR_THE_NAME = 15.0
# An agent answers at once; the broker waits no longer, since all others wait meanwhile.
_SECONDS_FOR_AN_ANSWER = 2.0
# The broker may have to be started again on another node. Ray refuses calls until it runs there.
_SECONDS_FOR_THE_BROKER = 60.0
_SECONDS_BETWEEN_CALLS = 0.5


@dataclass(frozen=True)
class Member:
    """A host of the pool.

    Attributes:
        host: its name in the pool.
        address: where clients reach its daemon, "warpbus://HOST:PORT".
        gpus: the GPUs that it offers.
        node: Ray's id of its node.
    """

    host: str
    address: str
    gpus: tuple[PoolGpu, ...]
    node: str


class RayBrokerStore(BrokerStore):
    """The broker of a cluster: `with RayBrokerStore() as store: store.offer(...)`.

    Args:
        address: "auto", the cluster that this machine belongs to, or "ray://HOST:PORT".
        namespace: of Ray; each has a pool of its own.
        grace, aging, limits: of `Broker`; whoever is the first in the cluster decides.

    Raises:
        UsageError: Ray is not installed, or there is no cluster at `address`.
    """

    def __init__(
        self,
        *,
        address: str = "auto",
        namespace: str = NAMESPACE,
        grace: float = 60.0,
        aging: float = 60.0,
        limits: Mapping[str, Limits] | None = None,
    ) -> None:
        self._address = address
        self._namespace = namespace
        self._settings = {"grace": grace, "aging": aging, "limits": dict(limits or {})}
        Broker(grace=grace, aging=aging)  # what is wrong with them is said here, not in an actor
        self._ray = load_ray()
        self._connected_here = False
        self._agents: dict[str, Any] = {}
        self._broker: Any = None

    def __enter__(self) -> Self:
        self._connected_here = connect(self._ray, self._address)
        kind = self._ray.remote(_BrokerActor)
        self._broker = kind.options(
            name=_BROKER,
            namespace=self._namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
        ).remote(self._namespace, self._settings)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self._agents.values():
            self._ray.kill(agent)
        self._agents = {}
        if self._connected_here:
            disconnect(self._ray)

    def offer(self, host: str, gpus: Iterable[PoolGpu], address: str, *, node: str | None = None) -> None:
        """Let a host join the pool, until `withdraw` or the end of this process.

        Args:
            host: its name in the pool.
            gpus: the GPUs that it offers.
            address: where clients reach its daemon.
            node: Ray's id of its node; None is the one that this process is connected to.

        Raises:
            UsageError: GPUs that make no sense, or another living process has offered a host of this name.
            UnavailableError: the broker does not answer.
        """
        node = node or self._ray.get_runtime_context().get_node_id()
        member = Member(host, address, tuple(checked_gpus(host, gpus).values()), node)
        strategy = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        kind = self._ray.remote(_Agent).options(
            name=_AGENT + host,
            namespace=self._namespace,
            num_cpus=0,
            scheduling_strategy=strategy(node, soft=False),
        )
        end = time.monotonic() + _SECONDS_FOR_THE_NAME
        while host not in self._agents:
            try:
                self._agents[host] = kind.remote(member)
            except ValueError as error:  # the name is taken
                if time.monotonic() > end:
                    raise UsageError(
                        f"host {host} is offered by another process of the cluster: give this machine another name, or "
                        "stop that one"
                    ) from error
                time.sleep(0.2)
        self._ask(self._agents[host].member.remote(), f"the agent of host {host}")
        self._call("heard_of", member)

    def withdraw(self, host: str) -> list[Lease]:
        """A host that this process offered leaves.

        Returns:
            The leases that are lost.

        Raises:
            UsageError: this process has not offered it.
            UnavailableError: the broker does not answer.
        """
        if host not in self._agents:
            raise UsageError(f"host {host} is not offered by this process: withdraw it where it is")
        self._ray.kill(self._agents.pop(host))
        lost: list[Lease] = self._call("forget", host)
        return lost

    async def _run(self, operation: Callable[[Broker, float], T], *, repeatable: bool = False) -> T:
        # Ray pickles the operation.
        result: T = await asyncio.to_thread(self._call, "run", operation, repeatable=repeatable)
        return result

    async def addresses(self) -> dict[str, str]:
        found: dict[str, str] = await asyncio.to_thread(self._call, "addresses")
        return found

    async def tick(self) -> list[Lease]:
        ended: list[Lease] = await asyncio.to_thread(self._call, "tick")
        return ended

    def _call(self, method: str, *arguments: Any, repeatable: bool = True) -> Any:
        """Call a method of the broker's actor; a `repeatable` one again and again while the actor is restarted.

        Raises:
            UnavailableError: the broker does not answer, or it is restarted, and nobody knows whether it did what it
                was asked to.
        """
        end = time.monotonic() + _SECONDS_FOR_THE_BROKER
        while True:
            try:
                return self._ask(getattr(self._broker, method).remote(*arguments))
            except UnavailableError as error:
                restarts = isinstance(error.__cause__, self._ray.exceptions.ActorUnavailableError)
                if not (repeatable and restarts) or time.monotonic() > end:
                    raise
            time.sleep(_SECONDS_BETWEEN_CALLS)

    def _ask(self, asked: Any, whom: str = "the broker") -> Any:
        try:
            answer = self._ray.get(asked, timeout=_SECONDS_FOR_THE_BROKER)
        except self._ray.exceptions.RayError as error:
            first = str(error).strip().splitlines()[-1]
            raise UnavailableError(
                f"{whom} of cluster {self._address} does not answer ({first}): ask again, or see ray status",
                retry_after=1.0,
            ) from error
        if isinstance(answer, JobFailure):
            raise answer.error(f"{whom} of cluster {self._address}")
        return answer


class _Agent:
    """The actor of a host: who it is, and the last that the broker let it keep."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._kept: tuple[int, dict[str, Any]] | None = None

    def member(self) -> Member:
        return self._member

    def keep(self, changes: int, state: dict[str, Any]) -> None:
        self._kept = changes, state

    def kept(self) -> tuple[int, dict[str, Any]] | None:
        return self._kept


class _BrokerActor:
    """The actor of the broker. It does one thing at a time, and answers with a `JobFailure` where it would raise.

    Who has joined is asked of the agents in the next `tick` after a start: until then there are no members.
    """

    def __init__(self, namespace: str, settings: dict[str, Any]) -> None:
        self._ray = load_ray()
        self._namespace = namespace
        self._broker = Broker(**settings)
        self._members: dict[str, Member] = {}
        self._written = -1
        self._restore()

    def run(self, operation: Callable[[Broker, float], T]) -> T | JobFailure:
        try:
            answer = operation(self._broker, time.time())
        except WarpbusError as error:
            return JobFailure.of(error)
        self._write()
        return answer

    def addresses(self) -> dict[str, str]:
        return {host: member.address for host, member in self._members.items()}

    def heard_of(self, member: Member) -> list[Lease] | JobFailure:
        """A host is offered; it may have been here before."""
        try:
            lost = self._broker.join(member.host, member.gpus, time.time())
        except WarpbusError as error:
            return JobFailure.of(error)
        self._members[member.host] = member
        self._written = -1  # its agent may be a new one, without a copy
        self._write()
        return lost

    def forget(self, host: str) -> list[Lease]:
        """A host left."""
        self._members.pop(host, None)
        lost: list[Lease] = []
        with contextlib.suppress(UsageError):  # this broker does not know it
            lost = self._broker.leave(host, time.time())
        self._write()
        return lost

    def tick(self) -> list[Lease]:
        """Let hosts join that have come, and leave that are gone. Returns the leases that are lost or expired."""
        ended, now = list[Lease](), time.time()
        nodes = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        there = self._answers({host: agent.member.remote() for host, agent in self._found().items()})
        for host, member in there.items():
            if self._members.get(host) != member:
                lost = self.heard_of(member)
                if isinstance(lost, JobFailure):
                    continue
                ended += lost
            self._broker.alive(host, now)
        dead = {host for host, member in self._members.items() if member.node not in nodes}
        for host in sorted(dead.union(self._broker.silent(now))):
            ended += self.forget(host)
        ended += self._broker.expire(now)
        self._write()
        return ended

    def _found(self) -> dict[str, Any]:
        """The agents that are registered, by host."""
        named = self._ray.util.list_named_actors(all_namespaces=True)
        names = [each["name"] for each in named if each["namespace"] == self._namespace]
        hosts = [name.removeprefix(_AGENT) for name in names if name.startswith(_AGENT)]
        found = {}
        for host in hosts:
            with contextlib.suppress(ValueError):  # it has just died
                found[host] = self._ray.get_actor(_AGENT + host, namespace=self._namespace)
        return found

    def _answers(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The answers of those that answer soon."""
        if not asked:
            return {}
        self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=_SECONDS_FOR_AN_ANSWER)
        answers = {}
        for host, answer in asked.items():
            try:
                answers[host] = self._ray.get(answer, timeout=0)
            except self._ray.exceptions.RayError:  # dead, or not in time
                continue
        return answers

    def _write(self) -> None:
        """Let the agents keep what has changed; the broker answers when one of them has it."""
        if self._broker.changes == self._written:
            return
        self._written = self._broker.changes
        state = self._ray.put(self._broker.dump())
        kept = [agent.keep.remote(self._written, state) for agent in self._found().values()]
        if kept:
            self._ray.wait(kept, num_returns=1, timeout=_SECONDS_FOR_AN_ANSWER)

    def _restore(self) -> None:
        copies = self._answers({host: agent.kept.remote() for host, agent in self._found().items()})
        newest = max((copy for copy in copies.values() if copy is not None), key=lambda copy: copy[0], default=None)
        if newest is not None:
            self._broker.load(newest[1], time.time())
            self._written = newest[0]
