"""The part of a daemon that manages tenants' processes: starts them, hands them clients' sockets, and ends them.

It decides nothing: the broker's daemon, which may be another one, says what is to be done (`Order`), and learns what
happened (`Reports`). A process that dies takes its own lease with it and no other.
"""

import asyncio
import hashlib
import hmac
import importlib.util
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from warpbus.cuda.compiled_cache import cache_directory
from warpbus.errors import (
    ConnectionLostError,
    DeviceError,
    LeaseLostError,
    PeerTimeoutError,
    PoolError,
    StorageError,
    UsageError,
    WarpbusError,
)
from warpbus.pool.daemon.audit import AuditLog
from warpbus.pool.daemon.checkpoint_files import CheckpointFiles, send_files
from warpbus.pool.daemon.lease_links import LinkMemories, log_indirect, opened_link
from warpbus.pool.daemon.options import PoolOptions
from warpbus.pool.daemon.sharing import SharedGpus
from warpbus.pool.daemon.swaps import Swapper
from warpbus.pool.daemon.tenancies import EndedLease, Order, Tenancy
from warpbus.pool.daemon.tenant_processes import Spares
from warpbus.pool.daemon.tls_relay import relay
from warpbus.pool.protocol import process_messages
from warpbus.pool.protocol.address import address as read_address
from warpbus.pool.protocol.channel import HANDSHAKE_SECONDS, pool_at
from warpbus.pool.protocol.control_channel import Tell
from warpbus.pool.protocol.failures import sent_error
from warpbus.pool.protocol.messages import Request
from warpbus.pool.protocol.preamble import Proof, link_key
from warpbus.pool.protocol.sockets import connected
from warpbus.pool.protocol.wire import decode, encode
from warpbus.pool.tenant.native_calls import compile_native_calls, native_calls_path
from warpbus.pool.tenant.sandbox import Confinement, missing

# Loading torch and opening a GPU on a busy machine.
_SECONDS_TO_START = 180.0
_SECONDS_OF_MEMORY = 3600.0
"""How long it is known what became of a lease."""
_MOST_REMEMBERED = 10_000
# Between two messages of a move: a piece of it that takes longer has failed.
_SECONDS_OF_SILENCE = 120.0


class Reports(Protocol):
    """The receiver of reports about the leases on this machine."""

    def lost(self, lease: str, why: str, *, arriving: bool) -> None:
        """Its process has died, or given up; `arriving`, it was the one that a lease was to move to."""

    def arrived(self, lease: str) -> None:
        """A lease that was to move here lives here from now on."""


class LocalHost:
    """The leases of this machine. All methods run on the daemon's event loop.

    While a lease moves from one GPU of this machine to another, it has two processes.

    Args:
        options: of the daemon.
        gpus: of the machine.
        audit: gets a line when a process dies.
        address: the daemon's address for clients.
        reports: see `Reports`.
        program: see `TenantProcess`.

    Attributes:
        tenancies: the leases that run here, by id.
        swaps: which of them are in host memory.
        link_memories: what they share in groups.
    """

    def __init__(
        self, options: PoolOptions, gpus: SharedGpus, audit: AuditLog, address: str, reports: Reports, program: str
    ) -> None:
        self.name = options.name
        self.address = address
        self.tenancies: dict[str, Tenancy] = {}
        self._reports = reports
        self._arriving: dict[str, Tenancy] = {}
        self._options = options
        self._gpus = gpus
        self._audit = audit
        self._gone: dict[str, EndedLease] = {}
        self._checkpoints = CheckpointFiles(options.name, map(Path, options.checkpoints))
        processes = options.home / "processes"
        shutil.rmtree(processes, ignore_errors=True)  # of a daemon that was killed
        processes.mkdir(mode=0o700, exist_ok=True)
        with suppress(OSError):  # there is no cache then, see `warpbus.cuda.jit`
            cache_directory().mkdir(mode=0o700, parents=True, exist_ok=True)  # what is not there cannot be allowed
        # Leases that start meanwhile do calls in Python until it is there. Threads of the loop would keep the daemon
        # from ending.
        self._native_calls = native_calls_path()
        threading.Thread(target=compile_native_calls, name="compile", daemon=True).start()
        self._program = program
        self._spares = Spares(options.spare, program, processes, self._confinement)
        limit = gpus.swap_limit
        self.swaps = Swapper(gpus.gpus, limit, options.swap_time_slice, audit, self._swap, self._say)
        self.link_memories = LinkMemories(gpus.link_memory_limit)
        self._tasks: set[asyncio.Task[None]] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._spares.fill()

    async def receive(self, order: Order) -> str:
        """Start the process of a lease. Returns the address at which its client finds it.

        Raises:
            UsageError: the lease is here already, or there is no such GPU.
            DeviceError: the process did not start; the message has what it said.
            PeerTimeoutError: it was not ready in time.
        """
        places = self.tenancies if order.migration_token is None else self._arriving
        if order.lease in places:
            raise UsageError(f"lease {order.lease} is on {self.name} already: let it end first")
        gpu = next((each for each in self._gpus.gpus if each.name == order.gpu), None)
        if gpu is None:
            raise UsageError(f"{self.name} has no GPU {order.gpu}: its GPUs are {self._names()}: choose one of them")
        if self._endings:  # what they have counts as free already
            await asyncio.wait(self._endings, timeout=_SECONDS_TO_START)
        process = self._spares.take()
        if order.migration_token is None:
            self._gone.pop(order.lease, None)
        tenancy = places[order.lease] = Tenancy(order, process, asyncio.get_running_loop().create_future())
        self._spawn(self._listen(tenancy))
        try:
            resident = await self.swaps.admit(tenancy, now_needed=order.saved or order.migration_token is not None)
            if order.saved:
                os.link(self._saved(order.lease) / "state", process.directory / "state")
            setup = self._setup(order, gpu.model, process.directory)
            await process.tell("setup", {**setup, "swapped_out": not resident})
            async with asyncio.timeout(_SECONDS_TO_START):
                await asyncio.shield(tenancy.ready)
            self.swaps.started(tenancy)
        except (OSError, WarpbusError, asyncio.CancelledError) as error:
            await self._end(tenancy, "it did not start")
            if isinstance(error, TimeoutError):
                late = f"its process was not ready after {_SECONDS_TO_START:g} s"
                raise PeerTimeoutError(f"lease {order.lease}: {late}: is {self.name} busy?") from None
            if isinstance(error, OSError) and not isinstance(error, WarpbusError):
                raise StorageError(f"lease {order.lease}: what was saved of it cannot be read ({error})") from None
            raise
        finally:
            self._spares.fill()
        return self.address

    async def end(self, lease: str, why: str) -> None:
        """End the process of a lease, if there is one; for its client the reason is kept."""
        if (tenancy := self.tenancies.get(lease)) is not None:
            await self._end(tenancy, why)

    async def call_off(self, lease: str, why: str) -> None:
        """End the process that a lease was to move to, if there is one and the lease does not live there."""
        if (tenancy := self._arriving.get(lease)) is not None:
            await self._end(tenancy, why)

    async def order(self, lease: str) -> Order | None:
        """The order of a lease that runs here or was saved here; None if it is not here."""
        tenancy = self.tenancies.get(lease)
        return self.saved(lease) if tenancy is None or tenancy.ending is not None else tenancy.order

    def saved(self, lease: str) -> Order | None:
        """The order of a lease that was saved here; None if there is none."""
        try:
            return Order.read(decode((self._saved(lease) / "order").read_bytes()))
        except OSError:
            return None

    async def send(self, lease: str, to: str, migration_token: bytes, tell: Tell) -> dict[str, Any]:
        """Move a lease to the process that waits for it at another address.

        Returns:
            "seconds", "pause" and "bytes" of the move. The lease does not live here any more.

        Raises:
            UsageError: there is no such lease.
            DeviceError, PoolError: the move failed, and the lease lives here as before. A ConnectionLostError is raised
                only if it is not known whether it does.
            LeaseLostError: its process has died over it.
        """
        tenancy = self._living(lease)
        authority = self._options.authority
        arguments = {
            "to": to,
            "ca": None if authority is None else str(authority),
            "migration_token": migration_token,
            "lease_id": arrival_id(migration_token),
        }
        where = read_address(to)
        async with self.swaps.resident(tenancy, tell):
            deadline = time.monotonic() + HANDSHAKE_SECONDS
            try:
                sock = await asyncio.to_thread(connected, where, pool_at(where), deadline)
            except ConnectionLostError as error:
                raise _of_others(error) from None
            with sock:
                done = await self._work(tenancy, "migrate", arguments, "moved", tell, sock.fileno())
        if self.tenancies.get(lease) is tenancy:  # it is not on another GPU of this machine
            self._remember(lease, EndedLease(time.monotonic(), tenancy.order.key, address=to))
        ending = self._spawn(self._end(tenancy, f"it has moved to {to}"))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        return done

    async def save(self, lease: str, tell: Tell) -> dict[str, Any]:
        """Write a lease's state to the disk and end its process.

        Returns:
            "seconds" and "bytes".

        Raises:
            UsageError, LeaseLostError: as `send`.
            StorageError: the disk does not take it, and the lease lives on.
        """
        tenancy = self._living(lease)
        place = self._saved(lease)
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(os.open(place / "order", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(encode(asdict(tenancy.order)))
        except OSError as error:
            raise StorageError(f"{place}: cannot be written ({error}): make room there") from None
        written = tenancy.process.directory / "state"
        try:
            async with self.swaps.resident(tenancy, tell):
                done = await self._work(tenancy, "suspend", {"path": str(written)}, "suspended", tell)
            await asyncio.to_thread(_move_durably, written, place / "state")
        except BaseException:
            await self.forget(lease)
            raise
        await self._end(tenancy, "it is suspended: warpbus pool resume lets it go on")
        return done

    async def open_link(
        self, lease: str, to: str, address: str, link_key: bytes, group: bytes, rank: int
    ) -> dict[str, Any]:
        """Connect the process of a lease with that of another one, see `lease_links`. Returns {}."""
        tenancy, other = self._living(lease), self.tenancies.get(to)
        authority = self._options.authority
        async with opened_link(self.link_memories, other, to, address, link_key) as (descriptors, arguments, why):
            arguments |= {"ca": None if authority is None else str(authority), "group": group, "rank": rank}
            done = await self._work(tenancy, "link", arguments, "linked", lambda _: None, *descriptors)
            if why:
                self.link_memories.unshared(tenancy.order, group, why)
            return done

    async def offered(self) -> list[dict[str, Any]]:
        """The checkpoints of this machine, see `CheckpointFiles.listed`."""
        return await asyncio.to_thread(self._checkpoints.listed)

    async def offer(self, lease: str, checkpoint: str) -> dict[str, Any]:
        """Hand the files of a checkpoint to the process of a lease.

        Returns:
            "tensors" and "nbytes".

        Raises:
            UsageError: there is no such lease or checkpoint.
            CheckpointError, StorageError: its files cannot be read.
        """
        tenancy = self._living(lease)
        async with self.swaps.resident(tenancy):
            return await self._offer(tenancy, checkpoint)

    async def _offer(self, tenancy: Tenancy, checkpoint: str) -> dict[str, Any]:
        mine, other = process_messages.pair()
        with mine, other, self._checkpoints.opened(checkpoint) as files:
            sending = asyncio.create_task(asyncio.to_thread(send_files, mine, files))
            arguments = {"name": checkpoint, "files": len(files)}
            try:
                found = await self._work(tenancy, "checkpoint", arguments, "offered", lambda _: None, other.fileno())
            finally:
                other.close()  # ends the sending
                await asyncio.wait([sending])  # else it could send descriptors that are others by then
        order = tenancy.order
        self._audit.note("checkpoint", tenant=order.tenant, lease=order.lease, why=checkpoint)
        return found

    async def forget(self, lease: str) -> None:
        """Remove the saved file of a lease."""
        await asyncio.to_thread(shutil.rmtree, self._saved(lease), ignore_errors=True)

    def asked_for(self, proof: Proof) -> Tenancy | None:
        """The tenancy that a connection wants and whose key it has; None if there is none.

        It begins with the 16 bytes of the lease's id, with an `arrival_id` if the lease comes from another process, or
        with a `link_id` if it is from another lease.
        """
        lease = proof.lease_id.hex()
        found = [
            (each, each.order.migration_token)
            for each in self._arriving.values()
            if _is_arrival(each.order, proof.lease_id)
        ]
        found += [
            (each, link_key(each.order.key)) for lease, each in self.tenancies.items() if proof.is_for_link(lease)
        ]
        # A client that lost the process that the lease moves from may claim it at the other one.
        at_lease = (self.tenancies.get(lease), self._arriving.get(lease))
        found += [(each, each.order.key) for each in at_lease if each is not None]
        for each, key in found:
            if each.ending is None and key is not None and proof.shows(key):
                return each
        return None

    async def hand_over(self, tenancy: Tenancy, sock: socket.socket, *, tls: bool) -> bool:
        """Give a socket to a process. False if the process does not take it.

        Args:
            sock: closed here when it was given.
            tls: the client speaks TLS on it, which is done here.
        """
        certificate, key = self._options.certificate, self._options.key
        given, inner = sock, None
        try:
            await asyncio.shield(tenancy.ready)
            if tls:
                given, inner = socket.socketpair()
            await tenancy.process.tell("client", {}, given.fileno())
        except (DeviceError, PoolError):
            if inner is not None:
                given.close()
                inner.close()
            return False
        if inner is not None and certificate is not None and key is not None:
            relay(socket.socket(fileno=sock.detach()), inner, certificate, key)
        given.close()
        return True

    def runs(self, pid: int) -> bool:
        """Whether that is the process of a lease here."""
        return any(each.process.pid == pid for each in (*self.tenancies.values(), *self._arriving.values()))

    async def gone(self, lease: str) -> EndedLease | None:
        """The end of a lease that was here; None if nothing is known of it. If its process is just ending, this
        waits until it is known how."""
        tenancy = self.tenancies.get(lease)
        if lease not in self._gone and tenancy is not None and not tenancy.process.alive:
            await tenancy.ended.wait()
        found = self._gone.get(lease)
        return None if found is None or found.when + _SECONDS_OF_MEMORY < time.monotonic() else found

    async def close(self) -> None:
        """End all processes."""
        why = f"the daemon of {self.name} has ended"
        await self.swaps.close()
        living = [*self.tenancies.values(), *self._arriving.values()]
        await asyncio.gather(*(self._end(tenancy, why) for tenancy in living), self._spares.close())
        self.link_memories.close()

    async def _end(self, tenancy: Tenancy, why: str) -> None:
        if tenancy.ending is None:
            tenancy.ending = why
            with suppress(PoolError):
                await tenancy.process.tell("end", {"reason": why})
            await tenancy.process.end()
        await tenancy.ended.wait()

    def _confinement(self, directory: Path) -> Confinement | None:
        """The permissions of a process that has this directory for itself."""
        if not self._options.sandbox:
            return None
        program = importlib.util.find_spec(self._program)
        read = [cache_directory(), *(Path(each).parent for each in (program and program.origin,) if each)]
        if self._options.authority is not None:
            read.append(self._options.authority)
        return Confinement.of(read, [directory, *self._gpus.directories()], gpu=self._gpus.device != "cpu")

    def exposed(self) -> list[str]:
        """The missing restrictions of tenants' processes on this machine: one line each, with the reason."""
        options = self._options
        confinement = self._confinement(options.home / "processes")
        if confinement is None:
            return ["they are not confined at all: --no-sandbox"]
        secrets = [path for path in (options.tokens, options.key, options.home / "pool.json") if path is not None]
        readable = [path for path in secrets if confinement.exposes(path)]
        return [*missing(), *(f"{path} can be read: it lies where Python or its packages are" for path in readable)]

    def _setup(self, order: Order, model: str, directory: Path) -> dict[str, Any]:
        return {
            **asdict(order),
            "name": model,
            "device": self._gpus.device,
            "queue_file": self._gpus.queue_file(order.gpu),
            "threads": self._gpus.threads(order.share),
            "environment": self._gpus.environment(order.gpu, order.memory, order.share),
            "saved": str(directory / "state") if order.saved else None,
            # Each lease has its own: who knows a hash must not learn that somebody else has these bytes.
            "content": str(directory / "content"),
            "sandbox": self._options.sandbox,
            "native_calls": None if self._native_calls is None else str(self._native_calls),
            "gpu_links": self._options.gpu_links,
        }

    async def _listen(self, tenancy: Tenancy) -> None:
        """Take in what a process says until it is gone."""
        while (said := await tenancy.process.said.get()) is not None:
            self._heard(tenancy, said)
            if said.operation in ("ready", "arrived"):
                self._spawn(self._tell_neighbours(tenancy.order.gpu))
        how = await tenancy.process.end()
        lease = tenancy.order.lease
        why = tenancy.ending or f"its process {how}"
        if not tenancy.ready.done():
            log = "" if tenancy.ending else "; the error output of `warpbus pool serve` has the reason"
            tenancy.ready.set_exception(DeviceError(f"lease {lease} did not start: {why}{log}"))
        tenancy.ready.exception()  # nobody need have waited for it
        if tenancy.work is not None:
            tenancy.work.put_nowait(None)
        arriving = self._arriving.get(lease) is tenancy
        if arriving:
            del self._arriving[lease]
        elif self.tenancies.get(lease) is tenancy:
            del self.tenancies[lease]
            if lease not in self._gone:
                self._remember(lease, EndedLease(time.monotonic(), tenancy.order.key, why))
        self.swaps.leave(tenancy)
        tenancy.ended.set()
        self._spawn(self._tell_neighbours(tenancy.order.gpu))
        if tenancy.ending is None:
            self._audit.note("lost", tenant=tenancy.order.tenant, lease=lease, gpu=tenancy.order.gpu, why=why)
            self._reports.lost(lease, why, arriving=arriving)

    async def _tell_neighbours(self, gpu: str) -> None:
        """Where GPUs are shared by slices of time, tell the processes on one how many others are there."""
        if self._gpus.device == "cpu" or self._gpus.mps:
            return
        there = [each for each in self.tenancies.values() if each.order.gpu == gpu and each.ending is None]
        for each in there:
            with suppress(PoolError):
                await each.process.tell("neighbours", {"count": len(there) - 1})

    def _heard(self, tenancy: Tenancy, said: Request) -> None:
        (event, facts), lease = said, tenancy.order.lease
        if event == "ready" and not tenancy.ready.done():
            tenancy.ready.set_result(None)
        elif event == "failed" and not tenancy.ready.done():
            tenancy.ready.set_exception(sent_error(facts))
        elif event == "clients":
            tenancy.clients, tenancy.memory = facts["connected"], facts["memory"]
            before, tenancy.dealt = tenancy.dealt, facts.get("work", 0)
            connected, worked = tenancy.clients > 0, tenancy.dealt != before
            self.swaps.heard(tenancy, connected=connected, memory=tenancy.memory, worked=worked)
        elif event == "wanted":
            self.swaps.wanted(tenancy)
        elif event == "unshared":
            self.link_memories.unshared(tenancy.order, facts["group"], facts["why"])
        elif event == "indirect":
            log_indirect(tenancy.order, facts["why"])
        elif event == "arrived" and self._arriving.get(lease) is tenancy:
            self.tenancies[lease] = self._arriving.pop(lease)
            self._gone.pop(lease, None)
            tenancy.order = replace(tenancy.order, migration_token=None)
            self._reports.arrived(lease)
        elif event == "failed" and self._arriving.get(lease) is tenancy:
            self._spawn(self.call_off(lease, facts["message"]))
            self._reports.lost(lease, facts["message"], arriving=True)
        elif tenancy.work is not None:
            tenancy.work.put_nowait(said)

    async def _swap(self, tenancy: Tenancy, operation: str, arguments: dict[str, Any], end: str) -> dict[str, Any]:
        return await self._work(tenancy, operation, arguments, end, lambda _: None)

    async def _say(self, tenancy: Tenancy, operation: str, arguments: dict[str, Any]) -> None:
        await tenancy.process.tell(operation, arguments)

    def _living(self, lease: str) -> Tenancy:
        tenancy = self.tenancies.get(lease)
        if tenancy is None or tenancy.ending is not None:
            raise UsageError(f"lease {lease} is not on {self.name}: see warpbus pool status")
        return tenancy

    async def _work(
        self, tenancy: Tenancy, operation: str, arguments: Mapping[str, Any], end: str, tell: Tell, *descriptors: int
    ) -> dict[str, Any]:
        """Let a process do something, and return what it says at the end of it."""
        lease = tenancy.order.lease
        if tenancy.work is not None:
            raise UsageError(f"lease {lease} is being moved or suspended already: wait until that is done")
        tenancy.work = asyncio.Queue()
        reported: dict[str, Any] = {}
        try:
            await tenancy.process.tell(operation, arguments, *descriptors)
            while True:
                async with asyncio.timeout(_SECONDS_OF_SILENCE):
                    said = await tenancy.work.get()
                if said is None:
                    raise LeaseLostError(f"lease {lease} is lost: its process died while it was moved or suspended")
                event, facts = said
                if event == "failed":
                    raise _of_others(sent_error(facts))
                if event == end:
                    return facts
                if event == "progress" and facts != reported:
                    reported = facts
                    tell(facts)
        except TimeoutError:
            raise ConnectionLostError(
                f"the process of lease {lease} says nothing of its move for {_SECONDS_OF_SILENCE:g} s: see its status"
            ) from None
        finally:
            tenancy.work = None

    def _remember(self, lease: str, gone: EndedLease) -> None:
        while len(self._gone) >= _MOST_REMEMBERED:
            del self._gone[next(iter(self._gone))]
        self._gone[lease] = gone

    def _saved(self, lease: str) -> Path:
        return self._options.home / "suspended" / lease

    def _names(self) -> str:
        return ", ".join(gpu.name for gpu in self._gpus.gpus)

    def _spawn(self, work: Any) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _move_durably(source: Path, target: Path) -> None:
    """Rename a file that is on the disk already, so that a crash of the machine does not undo it."""
    try:
        source.rename(target)
        directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise StorageError(f"{target}: cannot be written ({error})") from None


def _of_others(error: WarpbusError) -> WarpbusError:
    """The error of a move that did not come about for its receiver, to whom a ConnectionLostError would mean that the
    lease's process may have moved."""
    return PoolError(f"the lease stays: {error}") if isinstance(error, ConnectionLostError) else error


def arrival_id(migration_token: bytes) -> bytes:
    """The first bytes of a connection to the process that waits for a lease, in place of the lease's 16 bytes.

    The process that the lease moves from may be on the same machine, where the lease's own bytes mean that one.
    """
    return hashlib.sha256(b"arrival" + migration_token).digest()[:16]


def _is_arrival(order: Order, found: bytes) -> bool:
    return order.migration_token is not None and hmac.compare_digest(arrival_id(order.migration_token), found)


def new_key() -> bytes:
    """A lease's secret, or a migration token."""
    return secrets.token_bytes(32)
