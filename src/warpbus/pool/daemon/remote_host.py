"""Control connections between the daemons of one pool, with an admin's token.

The daemon that has the broker asks the others to start, move and end processes (`RemoteHost`). The others forward the
requests of their own clients to it, and report to it each second which leases they have (`Membership`).
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from warpbus.errors import ConnectionLostError, UsageError
from warpbus.pool.broker.leases import PoolGpu
from warpbus.pool.broker.status import HostResidency, LeaseResidency, LinkMemoryUsage
from warpbus.pool.daemon.control_handler import Asker
from warpbus.pool.daemon.host import LocalHost
from warpbus.pool.daemon.tenancies import Order, check_lease_id
from warpbus.pool.protocol.address import Address
from warpbus.pool.protocol.address import address as read_address
from warpbus.pool.protocol.control_channel import ControlChannel, Tell
from warpbus.pool.protocol.messages import Request, checked
from warpbus.pool.protocol.operations import GPU, LINK_MEMORY, RESIDENCY

# A process may have to be started for an answer.
_SECONDS = 240.0
_SECONDS_FOR_A_REPORT = 10.0
_PAUSE = 0.5

_log = logging.getLogger(__name__)


async def ask(
    to: Address,
    token: str | None,
    operation: str,
    arguments: Mapping[str, Any] | None = None,
    tell: Tell | None = None,
    *,
    timeout: float | None = _SECONDS,
) -> dict[str, Any]:
    """Ask another daemon, and wait `timeout` seconds at most for each answer. If this is cancelled, the connection is
    closed. A thread of the event loop's executor waits for the answer.

    Raises:
        WarpbusError: the error that it answers with.
        ConnectionLostError: it is gone.
    """
    loop = asyncio.get_running_loop()
    control = await asyncio.to_thread(ControlChannel, to, token)

    def received(answer: dict[str, Any]) -> None:
        if tell is not None:
            loop.call_soon_threadsafe(tell, answer)

    try:
        return await asyncio.to_thread(control.ask, operation, arguments, received, timeout=timeout)
    finally:
        control.close()


class RemoteHost:
    """A machine with another daemon. Its methods have the arguments, results and errors of `LocalHost`."""

    def __init__(self, name: str, to: Address, token: str | None) -> None:
        self.name = name
        self._to = to
        self._token = token

    async def receive(self, order: Order) -> str:
        return str((await self._ask("receive", asdict(order)))["address"])

    async def end(self, lease: str, why: str) -> None:
        await self._ask("end", {"lease": lease, "why": why})

    async def call_off(self, lease: str, why: str) -> None:
        await self._ask("call_off", {"lease": lease, "why": why})

    async def send(self, lease: str, to: str, migration_token: bytes, tell: Tell) -> dict[str, Any]:
        return await self._ask("send", {"lease": lease, "to": to, "migration_token": migration_token}, tell)

    async def save(self, lease: str, tell: Tell) -> dict[str, Any]:
        return await self._ask("save", {"lease": lease}, tell)

    async def open_link(
        self, lease: str, to: str, address: str, link_key: bytes, group: bytes, rank: int
    ) -> dict[str, Any]:
        arguments = {"to": to, "address": address, "link_key": link_key, "group": group, "rank": rank}
        return await self._ask("open_link", {"lease": lease, **arguments})

    async def order(self, lease: str) -> Order | None:
        found = (await self._ask("order", {"lease": lease}))["order"]
        return None if found is None else Order.read(found)

    async def forget(self, lease: str) -> None:
        await self._ask("forget", {"lease": lease})

    async def offered(self) -> list[dict[str, Any]]:
        return list((await self._ask("offered", {}))["checkpoints"])

    async def offer(self, lease: str, checkpoint: str) -> dict[str, Any]:
        return await self._ask("offer", {"lease": lease, "checkpoint": checkpoint})

    async def _ask(self, operation: str, arguments: Mapping[str, Any], tell: Tell | None = None) -> dict[str, Any]:
        return await ask(self._to, self._token, operation, arguments, tell)


async def obey(host: LocalHost, request: Request, tell: Tell) -> dict[str, Any] | None:
    """Execute a request of a `RemoteHost` on this machine; None if it is another operation.

    Raises:
        WarpbusError: as `LocalHost`; UsageError also if the lease cannot be one.
    """
    operation, arguments = request
    if operation == "offered":
        return {"checkpoints": await host.offered()}
    if operation not in ("receive", "send", "save", "order", "end", "call_off", "forget", "offer", "open_link"):
        return None
    for lease in (arguments["lease"], *([arguments["to"]] if operation == "open_link" else [])):
        check_lease_id(lease)
    if operation == "receive":
        return {"address": await host.receive(Order.read(arguments))}
    if operation == "order":
        order = await host.order(**arguments)
        return {"order": None if order is None else asdict(order)}
    if operation in ("offer", "open_link"):
        answer: dict[str, Any] = await getattr(host, operation)(**arguments)
        return answer
    if operation in ("send", "save"):
        done: dict[str, Any] = await getattr(host, operation)(**arguments, tell=tell)
        return done
    await getattr(host, operation)(**arguments)
    return {}


class Membership:
    """This daemon in the pool of another one, which has the broker.

    Args:
        to: the other daemon.
        token: an admin's there.
        life: see `LocalBrokerStore.join`.
        gpus: of this machine.
    """

    def __init__(self, to: Address, token: str | None, life: str, gpus: list[PoolGpu]) -> None:
        self._to = to
        self._token = token
        self._life = life
        self._gpus = gpus
        self._news: list[list[Any]] = []  # pairs as in `operations.NEWS`
        self._control: ControlChannel | None = None

    async def answer(self, request: Request, asker: Asker, tell: Tell) -> dict[str, Any]:
        """Forward a request to the broker's daemon, and return its result."""
        who = {"tenant": asker.tenant.name, "role": asker.tenant.role, "address": asker.address}
        # A lease waits in the queue for as long as it takes.
        timeout = None if request.operation in ("lease", "resume") else _SECONDS
        return await ask(self._to, self._token, "forward", {**request._asdict(), **who}, tell, timeout=timeout)

    def lost(self, lease: str, why: str, *, arriving: bool) -> None:
        """Is sent with the next report."""
        self._news.append(["lost", {"lease": lease, "why": why, "arriving": arriving}])

    def arrived(self, lease: str) -> None:
        """Is sent with the next report."""
        self._news.append(["arrived", {"lease": lease}])

    async def _join(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Send a report over the connection that is kept for reports."""
        if self._control is None:
            self._control = await asyncio.to_thread(ControlChannel, self._to, self._token)
        try:
            return await asyncio.to_thread(self._control.ask, "join", report, timeout=_SECONDS_FOR_A_REPORT)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Hang up."""
        if self._control is not None:
            self._control.close()
            self._control = None

    async def report(self, host: LocalHost, measured: list[list[Any]]) -> None:
        """Report the leases that run here, and end those that the broker has ended.

        Args:
            host: this machine's leases.
            measured: of each GPU its name, the part of its time that it computes or None, and bytes in use.

        Raises:
            WarpbusError: it was not heard, or not understood; the news stay for the next report.
        """
        news = self._news
        report = {
            "host": host.name,
            "address": host.address,
            "life": self._life,
            "gpus": [{**asdict(gpu), "links": list(gpu.links)} for gpu in self._gpus],
            "leases": [[lease, each.clients > 0, each.memory] for lease, each in host.tenancies.items()],
            "news": list(news),
            "measured": measured,
            "residency": residency_value(host.swaps.report()),
            "link_memory": asdict(host.link_memories.usage()),
        }
        answer = await self._join(report)
        del news[: len(report["news"])]
        for lease in answer["end"]:
            await host.end(str(lease), "it has ended in the pool: it was not heard of for too long")


class HostReport(NamedTuple):
    """The arguments of `Membership.report`: leases are their ids, whether a client is connected, and bytes in use;
    `residency` is None where GPUs are not oversubscribed."""

    measured: list[tuple[str, float | None, int]]
    gpus: list[PoolGpu]
    address: str
    leases: list[tuple[str, bool, int | None]]
    news: list[tuple[str, Any]]
    residency: HostResidency | None
    link_memory: LinkMemoryUsage


def read_report(arguments: Mapping[str, Any]) -> HostReport:
    """The report of another machine. Raises UsageError if it is malformed."""
    try:
        gpus = [checked("gpu", gpu, GPU).arguments for gpu in arguments["gpus"]]
        leases = [(str(lease), bool(connected), memory) for lease, connected, memory in arguments["leases"]]
        news = [(str(name), facts) for name, facts in arguments["news"]]
        measured = [(str(gpu), part, int(memory)) for gpu, part, memory in arguments["measured"]]
        residency = _read_residency(arguments["residency"])
        links = LinkMemoryUsage(**checked("link_memory", arguments["link_memory"], LINK_MEMORY).arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"join: the report is malformed ({error}): is the other machine's Warpbus older?") from None
    found = [PoolGpu(**{**gpu, "links": tuple(gpu["links"])}) for gpu in gpus]
    return HostReport(measured, found, str(read_address(arguments["address"])), leases, news, residency, links)


def residency_value(found: HostResidency | None) -> dict[str, Any]:
    """The locations of the leases' memory in a report."""
    if found is None:
        return {}
    return {"leases": {id: asdict(each) for id, each in found.leases.items()}, "limit": found.limit}


def _read_residency(value: Mapping[str, Any]) -> HostResidency | None:
    if not value:
        return None
    arguments = checked("residency", dict(value), RESIDENCY).arguments
    leases = {id: checked("lease", each, RESIDENCY).arguments for id, each in arguments["leases"].items()}
    return HostResidency({str(id): LeaseResidency(**each) for id, each in leases.items()}, arguments["limit"])


async def find_broker(name: str, peers: tuple[Address, ...], token: str | None) -> Address | None:
    """The address of the broker of the peers' pool; waits until one of the peers responds.

    Where all peers wait as well, because each was given the others, the one whose name comes first has the broker.

    Args:
        name: of this machine.
        peers: of which one at least has to answer.
        token: an admin's there.

    Returns:
        Its address, or None if this machine is the one.

    Raises:
        WarpbusError: a peer does not let this machine in.
    """
    warned = False
    while True:
        waiting = []
        for to in peers:
            try:
                answer = await ask(to, token, "broker")
            except ConnectionLostError:
                continue
            if answer["known"]:
                at = to if answer["address"] is None else read_address(str(answer["address"]))
                return replace(at, ca=to.ca)
            waiting.append(str(answer["host"]))
        if len(waiting) == len(peers) and name < min(waiting):
            return None
        if not warned:
            _log.warning("%s waits for one of its peers: %s", name, ", ".join(map(str, peers)))
            warned = True
        await asyncio.sleep(_PAUSE)
