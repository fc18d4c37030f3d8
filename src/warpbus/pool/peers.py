"""Daemons of one pool among each other: control connections with an admin's token, each for one question.

The daemon that has the broker asks the others to start, move and end processes (`Peer`). The others hand the questions
of their own callers on to it, and tell it each second what lives with them (`Membership`).
"""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from warpbus.errors import ConnectionLost, UsageError
from warpbus.pool.address import Address
from warpbus.pool.address import address as read_address
from warpbus.pool.desk import Asker
from warpbus.pool.host import Host, Order
from warpbus.pool.leases import Gpu
from warpbus.pool.steering import Steering, Tell, need

# A process may have to be started for an answer.
_SECONDS = 240.0


async def ask(to: Address, token: str | None, question: Mapping[str, Any], tell: Tell | None = None) -> dict[str, Any]:
    """Ask another daemon. If this is cancelled, the connection is closed.

    Raises:
        WarpbusError: what it answers with.
        ConnectionLost: it is gone.
    """
    loop = asyncio.get_running_loop()
    steering = await asyncio.to_thread(Steering, to, token)

    def told(answer: dict[str, Any]) -> None:
        if tell is not None:
            loop.call_soon_threadsafe(tell, answer)

    try:
        return await asyncio.to_thread(steering.ask, question, told, timeout=_SECONDS)
    finally:
        steering.close()


class Peer:
    """A machine whose daemon is another one. See `Host` for what its methods do."""

    def __init__(self, name: str, to: Address, token: str | None) -> None:
        self.name = name
        self._to = to
        self._token = token

    async def receive(self, order: Order) -> str:
        return str((await self._ask(order.question()))["address"])

    async def end(self, lease: str, why: str) -> None:
        await self._ask({"do": "end", "lease": lease, "why": why})

    async def call_off(self, lease: str, why: str) -> None:
        await self._ask({"do": "call off", "lease": lease, "why": why})

    async def send(self, lease: str, to: str, ticket: bytes, tell: Tell) -> dict[str, Any]:
        return await self._ask({"do": "send", "lease": lease, "to": to, "ticket": ticket}, tell)

    async def save(self, lease: str, tell: Tell) -> dict[str, Any]:
        return await self._ask({"do": "save", "lease": lease}, tell)

    async def order(self, lease: str) -> Order | None:
        found = (await self._ask({"do": "order", "lease": lease}))["order"]
        return None if found is None else Order.read(found)

    async def forget(self, lease: str) -> None:
        await self._ask({"do": "forget", "lease": lease})

    async def _ask(self, question: Mapping[str, Any], tell: Tell | None = None) -> dict[str, Any]:
        return await ask(self._to, self._token, question, tell)


async def obey(host: Host, question: Mapping[str, Any], tell: Tell) -> dict[str, Any] | None:
    """What `Peer` asks for, done here; None if it is another kind of question.

    Raises:
        WarpbusError: as `Host`; UsageError also if the question is malformed.
    """
    do = question.get("do")
    if do == "receive":
        return {"address": await host.receive(Order.read(question))}
    if do not in ("end", "call off", "send", "save", "order", "forget"):
        return None
    lease = Order.checked(question)
    if do == "end":
        await host.end(lease, need(question, "why", str))
    elif do == "call off":
        await host.call_off(lease, need(question, "why", str))
    elif do == "send":
        return await host.send(lease, need(question, "to", str), need(question, "ticket", bytes), tell)
    elif do == "save":
        return await host.save(lease, tell)
    elif do == "order":
        order = await host.order(lease)
        return {"order": None if order is None else order.question()}
    else:
        await host.forget(lease)
    return {}


class Membership:
    """This daemon in the pool of another one, which has the broker.

    Args:
        to: the other daemon.
        token: an admin's there.
        life: see `OwnBooks.join`.
        gpus: of this machine.
    """

    def __init__(self, to: Address, token: str | None, life: str, gpus: list[Gpu]) -> None:
        self._to = to
        self._token = token
        self._life = life
        self._gpus = gpus
        self._news: list[dict[str, Any]] = []

    async def answer(self, question: Mapping[str, Any], asker: Asker, tell: Tell) -> dict[str, Any]:
        """What the broker's daemon answers."""
        who = {"tenant": asker.tenant.name, "admin": asker.tenant.admin, "address": asker.address}
        return await ask(self._to, self._token, {**question, "for": who}, tell)

    def lost(self, lease: str, why: str, *, arriving: bool) -> None:
        """To be told with the next report."""
        self._news.append({"lost": lease, "why": why, "arriving": arriving})

    def arrived(self, lease: str) -> None:
        """To be told with the next report."""
        self._news.append({"arrived": lease})

    async def report(self, host: Host) -> None:
        """Say what lives here, and end what ended there.

        Raises:
            WarpbusError: it was not heard, or not understood; the news stay for the next report.
        """
        news = self._news
        question = {
            "do": "join",
            "host": host.name,
            "address": host.address,
            "life": self._life,
            "gpus": [{**asdict(gpu), "links": list(gpu.links)} for gpu in self._gpus],
            "leases": [[lease, each.clients > 0, each.memory] for lease, each in host.tenancies.items()],
            "news": list(news),
        }
        answer = await ask(self._to, self._token, question)
        del news[: len(question["news"])]
        for lease in answer["end"]:
            await host.end(str(lease), "it has ended in the pool: it was not heard of for too long")


class Report(NamedTuple):
    """What `Membership.report` says: leases are their ids, whether a client is connected, and bytes in use."""

    gpus: list[Gpu]
    address: str
    leases: list[tuple[str, bool, int | None]]
    news: list[dict[str, Any]]


def read_report(question: Mapping[str, Any]) -> Report:
    """What another machine reports. Raises UsageError if it is malformed."""
    try:
        gpus = [Gpu(**{**gpu, "links": tuple(gpu["links"])}) for gpu in need(question, "gpus", list)]
        for gpu in gpus:
            for name, kind in (("name", str), ("host", str), ("index", int), ("model", str), ("memory", int)):
                need({"do": "join", name: getattr(gpu, name)}, name, kind)
        leases = [(str(lease), bool(connected), memory) for lease, connected, memory in need(question, "leases", list)]
        news = [dict(each) for each in need(question, "news", list)]
    except (TypeError, KeyError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"join: the report is malformed ({error}): is the other machine's Warpbus older?") from None
    return Report(gpus, str(read_address(need(question, "address", str))), leases, news)


async def first_that_answers(peers: tuple[str, ...], token: str | None) -> Address | None:
    """The address of the daemon that has the broker, as the first of the peers that is there tells; None without any.

    Raises:
        WarpbusError: a peer does not let this machine in.
    """
    for text in peers:
        to = read_address(text)
        try:
            answer = await ask(to, token, {"do": "broker"})
        except ConnectionLost:
            continue
        return to if answer["address"] is None else replace(read_address(str(answer["address"])), ca=to.ca)
    return None
