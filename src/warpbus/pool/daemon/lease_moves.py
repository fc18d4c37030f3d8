"""Moves a lease from one tenant's process to another, on the daemon of the broker, which commands the two machines.

The processes ensure that at most one of them executes (`warpbus.pool.tenant.migration_source`). This module finds out
which one does in the end: the source reports it; if the source dies during the move, the target reports whether the
lease runs there, because COMMIT arrived or the client claimed the lease.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from warpbus.errors import ConnectionLostError, LeaseLostError, UnavailableError, WarpbusError
from warpbus.pool.broker.leases import Lease
from warpbus.pool.broker.store import BrokerStore
from warpbus.pool.daemon.audit import AuditLog
from warpbus.pool.daemon.host import new_key
from warpbus.pool.protocol.control_channel import Tell
from warpbus.pool.protocol.operations import COPYING_REST

# A client that has lost the source claims its lease at the target within this time.
_SECONDS_TO_CLAIM = 60.0
# How often the target is polled, because its message may have gone to another daemon.
_PAUSE = 0.5


@dataclass
class _Move:
    """The state of a running move: which of its processes died, and whether the lease runs at the target.

    Attributes:
        stopping: the source has reported that it copies the rest. Until then the target does not have the
            whole lease, and no client knows the target.
    """

    stopping: bool = False
    source_died: bool = False
    target_died: bool = False
    arrived: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)


class LeaseMover:
    """Moves leases between machines.

    Args:
        store, machine, audit: see `ControlHandler`.
        claim: seconds within which a client may claim its lease at the target after the source has died.
    """

    def __init__(
        self, store: BrokerStore, machine: Callable[[str], Any], audit: AuditLog, *, claim: float = _SECONDS_TO_CLAIM
    ) -> None:
        self._store = store
        self._machine = machine
        self._audit = audit
        self._claim = claim
        self._moves: dict[str, _Move] = {}

    def lost(self, lease: str, *, arriving: bool) -> bool:
        """The process of a lease, or of its target, has died. Returns False if the lease is not moving."""
        move = self._moves.get(lease)
        if move is not None:
            move.target_died |= arriving
            move.source_died |= not arriving
            move.news.set()
        return move is not None

    def arrived(self, lease: str) -> None:
        """The lease lives at the target, or this is late news of an earlier move: the target is asked."""
        if (move := self._moves.get(lease)) is not None:
            move.news.set()

    async def move(self, lease: Lease, to: str, tell: Tell, who: str) -> dict[str, Any]:
        """Move a lease to a GPU or a host.

        Args:
            lease: which.
            to: "host/0", or a host.
            tell: gets "phase", "done" and "total".
            who: asked for it, for the audit log.

        Returns:
            "moved", where it is now, and "seconds", "pause" and "bytes".

        Raises:
            UsageError: it cannot move there.
            LeaseLostError: it died over it.
            WarpbusError: it did not come about, and the lease lives where it was.
        """
        began = time.monotonic()
        lease = await self._store.begin_move(lease.id, to)
        assert lease.gpu is not None
        assert lease.target is not None
        source, target = (name.partition("/")[0] for name in (lease.gpu, lease.target))
        move = self._moves[lease.id] = _Move()
        done: dict[str, Any] = {"pause": None, "bytes": None}
        try:
            tell({"phase": f"starting a process on {lease.target}", "done": 0, "total": 1})
            order = await (await self._machine(source)).order(lease.id)
            if order is None:
                raise UnavailableError(f"lease {lease.id} is not on {source}: see warpbus pool status")
            migration_token = new_key()
            here = replace(order, gpu=lease.target, migration_token=migration_token, saved=False)
            address = await (await self._machine(target)).receive(here)

            def reported(progress: dict[str, Any]) -> None:
                move.stopping |= progress["phase"] == COPYING_REST
                tell(progress)

            done |= await (await self._machine(source)).send(lease.id, address, migration_token, reported)
            await self._store.end_move(lease.id, True, copied=done["bytes"], pause=done["pause"])
        except WarpbusError as error:
            await self._failed(lease, source, target, move, error)
        finally:
            del self._moves[lease.id]
        seconds = time.monotonic() - began
        self._note(lease, who, moved=True, seconds=round(seconds, 3), bytes=done["bytes"])
        return {"moved": lease.target, "seconds": seconds, "pause": done["pause"], "bytes": done["bytes"]}

    async def _failed(self, lease: Lease, source: str, target: str, move: _Move, error: WarpbusError) -> None:
        """Find out where the lease lives; raises `error`, or that the lease is lost, unless it is the target."""
        died = move.source_died or isinstance(error, LeaseLostError)
        # A source that died has reported before how far it was. The state of an unreachable one is unknown.
        if (died and move.stopping) or isinstance(error, ConnectionLostError):
            end = time.monotonic() + self._claim
            while not (move.target_died or await self._has_arrived(lease, target, move)) and time.monotonic() < end:
                move.news.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(move.news.wait(), _PAUSE)
        if await self._has_arrived(lease, target, move):
            await self._store.end_move(lease.id, True)
            return
        why = f"{type(error).__name__}: {error}"
        with suppress(WarpbusError):
            await (await self._machine(target)).call_off(lease.id, f"the move did not come about ({error})")
        await self._store.end_move(lease.id, False)
        self._note(lease, "the broker", moved=False, why=why)
        if move.source_died or isinstance(error, LeaseLostError):
            why = f"lease {lease.id} is lost: its process on {source} died while it moved to {target}"
            await self._store.lose(lease.id, why)
            raise LeaseLostError(why) from None
        raise error

    async def _has_arrived(self, lease: Lease, target: str, move: _Move) -> bool:
        if not move.arrived:
            with suppress(WarpbusError):  # it cannot be asked now
                order = await (await self._machine(target)).order(lease.id)
                move.arrived = order is not None and order.gpu == lease.target
        return move.arrived

    def _note(self, lease: Lease, who: str, **details: Any) -> None:
        self._audit.note(
            "migration", tenant=lease.tenant, lease=lease.id, source=lease.gpu, target=lease.target, by=who, **details
        )
