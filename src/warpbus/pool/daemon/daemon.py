"""The daemon of a machine: one port for the clients of its leases and for control connections.

The first 24 bytes of a connection name its target. If that is a lease of this machine and the client proves that it has
the lease's key, the daemon passes the socket to the lease's process (with TLS, through a relay) and reads nothing more
from it. Otherwise the daemon serves the connection itself. Connections that do not complete the preamble or HELLO are
closed after some seconds and cannot keep others out: if there are too many, in all or per address, the oldest is
closed.
"""

import asyncio
import fcntl
import logging
import os
import secrets
import socket
import stat
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from ipaddress import IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import Any

from warpbus.errors import (
    ConnectionLostError,
    FrameError,
    LeaseLostError,
    PoolError,
    ProtocolError,
    StorageError,
    TokenError,
    UnavailableError,
    UsageError,
    WarpbusError,
)
from warpbus.pool.broker.broker import Broker
from warpbus.pool.broker.ray_store import RayBrokerStore
from warpbus.pool.broker.store import BrokerStore, LocalBrokerStore
from warpbus.pool.daemon.audit import AuditLog
from warpbus.pool.daemon.control_connection import ControlConnection, hang_up
from warpbus.pool.daemon.control_handler import Asker, ControlHandler
from warpbus.pool.daemon.host import LocalHost
from warpbus.pool.daemon.options import PoolOptions
from warpbus.pool.daemon.remote_host import Membership, RemoteHost, find_broker, obey, read_report
from warpbus.pool.daemon.sharing import SharedGpus
from warpbus.pool.daemon.tokens import Tenant, Tokens, checked_role
from warpbus.pool.protocol.address import Address
from warpbus.pool.protocol.address import address as read_address
from warpbus.pool.protocol.control_channel import Tell
from warpbus.pool.protocol.failures import error_value
from warpbus.pool.protocol.frames import MAX_HELLO, PROTOCOL, Frame, Kind
from warpbus.pool.protocol.messages import Request, checked, decode_dict, decode_request, encode_answer
from warpbus.pool.protocol.operations import DAEMON, NEWS
from warpbus.pool.protocol.preamble import CONTROL, LEASE_BYTES, MAC_BYTES, MAGIC, NONCE_BYTES, Proof
from warpbus.pool.protocol.sockets import name_of
from warpbus.pool.protocol.wire import encode

_log = logging.getLogger(__name__)

_TICK = 1.0
_OWN_THREADS = 64  # of the executor, beside those that wait for other daemons
# The machines of a pool whose broker was started again report to it within this time.
_SECONDS_TO_REJOIN = 10.0


class Daemon:
    """The daemon of this machine. All methods run on one event loop.

        daemon = Daemon(options)
        await daemon.start()        # it accepts connections
        ...
        await daemon.close()        # its leases end

    Args:
        options: of the command line.
        program: the module to run as the process of a tenant.

    Attributes:
        address: the address for clients; set by `start`.

    Raises:
        UsageError, DeviceError, StorageError: an option names something that does not exist; `start` raises them too.
    """

    def __init__(self, options: PoolOptions, *, program: str = "warpbus.pool.tenant.process") -> None:
        self._options = options
        self._program = program
        self._tokens = Tokens() if options.tokens is None else Tokens.read(options.tokens)
        self._tls = options.tls()
        self._gpus = SharedGpus(options)
        self._lock = _alone_in(options.home)
        self._audit = AuditLog(options.audit or options.home / "audit.jsonl")
        self._life = secrets.token_hex(8)
        self._listening: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unfinished: dict[asyncio.Task[None], str] = {}  # with the address that each came from
        self.host: LocalHost
        self._store: BrokerStore | None = None
        self._own: LocalBrokerStore | None = None
        self._stack = ExitStack()
        self._membership: Membership | None = None
        self._handler: ControlHandler | None = None
        self._broker_at: Address | None = None
        self._serving = False
        self._rejoined = 0.0  # when the machines that were in the pool before this daemon started have joined again

    @property
    def largest_memory(self) -> int:
        """Bytes of the GPU that has most: the largest lease that this machine can have."""
        return max(gpu.memory for gpu in self._gpus.gpus)

    async def start(self) -> None:
        """Listen, join a pool or start one, and accept connections."""
        options = self._options
        # Each request that another daemon answers holds a thread. asyncio's own executor has four more than processors,
        # so that a few waiting clients would keep this machine from reporting its leases, which then count as lost.
        threads = ThreadPoolExecutor(2 * options.max_connections + _OWN_THREADS, "daemon")
        asyncio.get_running_loop().set_default_executor(threads)
        self._stack.enter_context(self._gpus)
        tcp = _bind(options.host, options.port)
        self._listening.append(tcp)
        if options.unix is not None:
            self._listening.append(_bind_unix(options.unix))
        self.address = str(options.address(tcp.getsockname()[1]))
        self.host = LocalHost(options, self._gpus, self._audit, self.address, self, self._program)
        self._serving = True
        if not self._tokens:
            _log.warning("there are no --tokens: every user and program of this machine is an admin of the pool")
        for line in self.host.exposed():
            _log.warning("tenants' processes: %s", line)
        self._audit.note("started", address=self.address, host=options.name)
        for listening in self._listening:
            self._spawn(self._accept(listening))
        if options.peers:
            known = map(read_address, options.peers)
            peers = tuple(replace(each, ca=each.ca or options.authority) for each in known)
            self._broker_at = await find_broker(options.name, peers, options.peer_token)
        if options.cluster is not None:
            self._store = await self._ray_store(options.cluster)
            self._handler = self._new_handler(self._store)
        elif self._broker_at is not None:
            membership = Membership(self._broker_at, options.peer_token, self._life, self._gpus.gpus)
            await membership.report(self.host, [])
            self._membership = membership
        else:
            broker = Broker(grace=options.grace, limits=self._tokens.limits(), max_queued=options.max_queued)
            path = options.home / "pool.json"
            own = LocalBrokerStore(broker, path, host=options.name, gpus=self._gpus.gpus, address=self.address)
            self._store = self._own = own
            self._rejoined = time.monotonic() + _SECONDS_TO_REJOIN
            self._handler = self._new_handler(own)
        self._spawn(self._tick())

    async def close(self) -> None:
        """Stop listening, and end all leases, whose clients get the reason."""
        for listening in self._listening:
            listening.close()
        if self._options.unix is not None:
            self._options.unix.unlink(missing_ok=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._handler is not None:
            await self._handler.close()
        if self._membership is not None:
            self._membership.close()
        if self._serving:
            await self.host.close()
        self._stack.close()
        self._audit.note("ended", host=self._options.name)
        self._audit.close()
        os.close(self._lock)

    def _new_handler(self, store: BrokerStore) -> ControlHandler:
        options = self._options
        return ControlHandler(store, self._machine, self._audit, most=options.max_asking, rate=options.max_lease_rate)

    async def _ray_store(self, cluster: str) -> RayBrokerStore:
        limits = self._tokens.limits()
        store = RayBrokerStore(address=cluster, grace=self._options.grace, limits=limits)
        await asyncio.to_thread(self._stack.enter_context, store)
        await asyncio.to_thread(store.offer, self._options.name, self._gpus.gpus, self.address)
        self._stack.callback(self._withdraw, store)
        return store

    def _withdraw(self, store: RayBrokerStore) -> None:
        with suppress(WarpbusError):  # the broker may be gone, too
            store.withdraw(self._options.name)

    # Events of leases here

    def lost(self, lease: str, why: str, *, arriving: bool) -> None:
        """See `Reports`."""
        if self._handler is not None:
            self._handler.lost(self._options.name, lease, why, arriving=arriving)
        elif self._membership is not None:
            self._membership.lost(lease, why, arriving=arriving)

    def arrived(self, lease: str) -> None:
        """See `Reports`."""
        if self._handler is not None:
            self._handler.arrived(lease)
        elif self._membership is not None:
            self._membership.arrived(lease)

    # Connections

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        unix = listening.family == socket.AF_UNIX
        while True:
            try:
                sock, came = await loop.sock_accept(listening)
            except OSError as error:  # of one connection, or there are no more descriptors
                _log.warning("a connection cannot be taken: %s", error)
                await asyncio.sleep(0.1)
                continue
            # On a GPU a lease's process can make Unix sockets. It is no user of this machine.
            if len(self._tasks) - len(self._unfinished) > self._options.max_connections or (
                unix and self.host.runs(_process_of(sock))
            ):
                sock.close()
                continue
            sock.setblocking(False)
            source = _source(came)
            self._make_place(source)
            task = self._spawn(self._meet(sock, name_of(sock), tls=not unix and self._tls is not None))
            self._unfinished[task] = source

    def _make_place(self, source: str) -> None:
        """Close the oldest unauthenticated connections if there are too many."""
        options = self._options
        own = [task for task, other in self._unfinished.items() if other == source]
        first = own[: max(0, len(own) + 1 - options.max_unfinished_of_address)]
        if not first and len(self._unfinished) >= options.max_unfinished:
            first = [next(iter(self._unfinished))]
        for task in first:
            del self._unfinished[task]
            task.cancel()

    async def _meet(self, sock: socket.socket, peer: str, *, tls: bool) -> None:
        """Read the preamble of a connection, and pass it to a lease's process or serve it here."""
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(self._options.handshake_timeout):
                lease_id = await _preamble(sock)
                proof = None if lease_id == CONTROL else await _proof(lease_id, sock)
            if proof is None:
                await self._converse(sock, peer, task, tls=tls)
            elif (tenancy := self.host.asked_for(proof)) is not None:
                self._unfinished.pop(task, None)
                if await self.host.hand_over(tenancy, sock, tls=tls):
                    self._audit.note("connection", address=peer, lease=tenancy.order.lease)
                else:
                    await self._say_what_became(proof, sock, peer, tls=tls)
            else:
                await self._say_what_became(proof, sock, peer, tls=tls)
        except (OSError, TimeoutError, ConnectionLostError):
            pass  # it has gone, or is not one of ours
        finally:
            self._unfinished.pop(task, None)
            sock.close()

    async def _say_what_became(self, proof: Proof, sock: socket.socket, peer: str, *, tls: bool) -> None:
        lease = proof.lease_id.hex()
        conversation = await self._begin(sock, peer, tls=tls)
        await conversation.receive(self._options.handshake_timeout, MAX_HELLO)  # so that it gets to read the answer
        gone, saved = await self.host.gone(lease), self.host.saved(lease)
        error: WarpbusError
        if saved is not None and proof.shows(saved.key):
            # For the client no reason to give up: it tries again for a while.
            error = ConnectionLostError(f"lease {lease} is suspended: warpbus pool resume-lease {lease} lets it go on")
        elif gone is None or not proof.shows(gone.key):
            what = "knows nothing of it with this key: it ended long ago, or with the daemon that had it, or never was"
            error = LeaseLostError(f"lease {lease}: {self._options.name} {what}")
        elif gone.address is not None:
            await hang_up(conversation, Kind.MOVED, {"address": gone.address, "final": True})
            return
        else:
            error = LeaseLostError(f"lease {lease} has ended: {gone.why}")
        self._audit.note("refused", address=peer, lease=lease, why=str(error))
        await hang_up(conversation, Kind.REFUSED, error_value(error))

    async def _begin(self, sock: socket.socket, peer: str, *, tls: bool) -> ControlConnection:
        timeout = self._options.handshake_timeout
        # The transport closes it when it has sent all, and nobody else before.
        own = socket.socket(fileno=sock.detach())
        return await ControlConnection.accept(own, peer, self._tls if tls else None, timeout=timeout)

    async def _converse(self, sock: socket.socket, peer: str, task: "asyncio.Task[None]", *, tls: bool) -> None:
        conversation = await self._begin(sock, peer, tls=tls)
        try:
            tenant = await self._hello(conversation, peer)
            self._unfinished.pop(task, None)
            if tenant is None:
                return
            asker = Asker(tenant, peer)
            while True:
                frame = await conversation.receive(self._options.idle_timeout)
                if frame.kind is Kind.BYE:
                    return
                if frame.kind is not Kind.ASK:
                    error = UsageError(f"a {frame.kind.name} frame is no question: this is a control connection")
                    await hang_up(conversation, Kind.ERROR, error_value(error))
                    return
                await self._answer(conversation, frame, asker)
        except asyncio.CancelledError:
            why = UnavailableError(f"the pool's daemon of {self._options.name} ends, or has too much to do")
            with suppress(asyncio.CancelledError):
                await hang_up(conversation, Kind.ERROR, error_value(why))
            raise
        finally:
            conversation.close()

    async def _hello(self, conversation: ControlConnection, peer: str) -> Tenant | None:
        """Authenticate a control connection. Returns its tenant, or None if it was refused."""
        frame = await conversation.receive(self._options.handshake_timeout, MAX_HELLO)
        error, tenant, hello = None, None, {}
        with suppress(ProtocolError):  # the messages of protocol 1 are encoded in another way
            hello = decode_dict(frame.payload)
        if frame.kind is not Kind.HELLO or hello.get("protocol") != PROTOCOL:
            error = UsageError(f"this pool speaks protocol {PROTOCOL}: use the same version of Warpbus on both sides")
        else:
            token = hello.get("token")
            tenant = self._tokens.tenant(token if isinstance(token, str) else None)
            if tenant is None:
                error = TokenError("the pool does not accept the token: give one of its own, by --token-file")
        if error is not None:
            self._audit.note("refused", address=peer, why=str(error))
            await hang_up(conversation, Kind.REFUSED, error_value(error))
            return None
        assert tenant is not None
        self._audit.note("connection", tenant=tenant.name, address=peer)
        welcome: dict[str, Any] = {
            "protocol": PROTOCOL,
            "tenant": tenant.name,
            "role": tenant.role,
            "tokens": bool(self._tokens),
            "host": self._options.name,
        }
        await conversation.send(Kind.WELCOME, 0, encode(welcome))
        return tenant

    async def _answer(self, conversation: ControlConnection, frame: Frame, asker: Asker) -> None:
        """Answer one request; its work is cancelled if the client disconnects."""
        said: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        work = asyncio.create_task(self._work(frame.payload, asker, said.put_nowait))
        work.add_done_callback(lambda _: said.put_nowait(None))
        gone = asyncio.create_task(conversation.gone())
        gone.add_done_callback(lambda _: work.cancel())
        try:
            while (answer := await said.get()) is not None:
                await conversation.send(Kind.ANSWER, frame.number, encode_answer(answer, final=False))
            await asyncio.wait([work])
            if work.cancelled():
                raise ConnectionLostError(f"{asker.address} has closed the connection")
            error = work.exception()
            if error is None:
                await conversation.send(Kind.ANSWER, frame.number, encode_answer(work.result(), final=True))
                return
            if not isinstance(error, WarpbusError):
                _log.error("a question was not answered", exc_info=error)
                error = PoolError("the pool's daemon met an error of its own: see its log")
            await conversation.send(Kind.ERROR, frame.number, encode(error_value(error)))
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.wait([work])

    # Requests

    async def _work(self, payload: memoryview, asker: Asker, tell: Tell) -> dict[str, Any]:
        request = decode_request(payload, DAEMON)
        answer = await self._carry_out(request, asker, tell)
        if request.operation in ("lease", "resume") and answer["address"] == self.address:
            answer["address"] = ""  # the one that the client has used, which may be another name for it
        return answer

    async def _carry_out(self, request: Request, asker: Asker, tell: Tell) -> dict[str, Any]:
        asker.check(request.operation, DAEMON[request.operation].role)
        operation, arguments = request
        if operation == "forward":
            tenant = Tenant(arguments["tenant"], checked_role(arguments["role"]))
            inner = checked(arguments["operation"], arguments["arguments"], DAEMON)
            return await self._carry_out(inner, Asker(tenant, arguments["address"]), tell)
        if operation == "broker":
            known = self._handler is not None or self._membership is not None
            at = None if self._broker_at is None else str(self._broker_at)
            return {"known": known, "address": at, "host": self._options.name}
        if (answer := await obey(self.host, request, tell)) is not None:
            if operation == "receive":
                self._audit.note("received", tenant=arguments["tenant"], lease=arguments["lease"])
            return answer
        if self._membership is not None:
            return await self._membership.answer(request, asker, tell)
        if self._handler is None:
            raise UnavailableError(f"{self._options.name} has not found its pool yet: ask again later")
        if operation == "join":
            return await self._join(arguments)
        return await self._handler.answer(request, asker, tell)

    async def _join(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Handle the report of another machine: its GPUs, leases and events."""
        assert self._handler is not None
        if self._own is None:
            raise UsageError("join: this pool is one of --cluster: start the other daemon with --cluster too")
        host = arguments["host"]
        measured, gpus, address, leases, news, residency, links = read_report(arguments)
        end = self._own.join(host, gpus, address, arguments["life"], {lease for lease, _, _ in leases})
        for gpu, part, used in measured:
            await self._own.measured(gpu, utilization=part, memory=used)
        if residency is not None:
            await self._own.resident(host, residency)
        await self._own.linked(host, links)
        for lease, connected, memory in leases:
            if connected and lease not in end:
                await self._handler.seen(lease, memory)
        for event, facts in (checked(name, facts, NEWS) for name, facts in news):
            if event == "arrived":
                self._handler.arrived(facts["lease"])
            else:
                self._handler.lost(host, facts["lease"], facts["why"], arriving=facts["arriving"])
        return {"end": end}

    async def _machine(self, name: str) -> Any:
        if name == self._options.name:
            return self.host
        assert self._store is not None
        found = (await self._store.addresses()).get(name)
        while found is None and time.monotonic() < self._rejoined:
            await asyncio.sleep(0.1)
            found = (await self._store.addresses()).get(name)
        if found is None:
            raise UnavailableError(f"host {name} is not in the pool now: wait until it joins again")
        return RemoteHost(name, replace(read_address(found), ca=self._options.authority), self._options.peer_token)

    async def _tick(self) -> None:
        logged = ""
        while True:
            await asyncio.sleep(_TICK)
            try:
                if self._membership is not None:
                    await self._membership.report(self.host, self._measured())
                else:
                    await self._look_after()
                logged = ""
            except WarpbusError as error:
                if str(error) != logged:
                    logged = str(error)
                    _log.warning("%s", logged)

    async def _look_after(self) -> None:
        assert self._handler is not None
        assert self._store is not None
        for lease, tenancy in list(self.host.tenancies.items()):
            if tenancy.clients:
                await self._handler.seen(lease, tenancy.memory)
        for name, part, memory in self._measured():
            await self._store.measured(name, utilization=part, memory=memory)
        if (residency := self.host.swaps.report()) is not None:
            await self._store.resident(self._options.name, residency)
        await self._store.linked(self._options.name, self.host.link_memories.usage())
        await self._handler.tick()

    def _measured(self) -> list[list[Any]]:
        """For each GPU its name, its utilization from 0 to 1 or None, and the bytes in use."""
        found = self._gpus.measured().items()
        return [[name, gpu.utilization, gpu.memory - gpu.free] for name, gpu in found]

    def _spawn(self, work: Any) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the pool's daemon met an error of its own", exc_info=error)


async def _preamble(sock: socket.socket) -> bytes:
    """The 16 bytes after the magic. Raises FrameError if the connection begins with something else."""
    begun = await _exactly(sock, len(MAGIC) + LEASE_BYTES, MAGIC)
    return begun[len(MAGIC) :]


async def _proof(lease_id: bytes, sock: socket.socket) -> Proof:
    """Send a nonce to the client of a lease, and return its answer."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    await asyncio.get_running_loop().sock_sendall(sock, nonce)
    return Proof(lease_id, nonce, await _exactly(sock, MAC_BYTES))


async def _exactly(sock: socket.socket, nbytes: int, begins: bytes = b"") -> bytes:
    """Read exactly `nbytes` bytes. Raises FrameError if the client hangs up, or does not start with `begins`."""
    loop = asyncio.get_running_loop()
    found = b""
    while len(found) < nbytes:
        data = await loop.sock_recv(sock, nbytes - len(found))
        found += data
        if not data or not begins.startswith(found[: len(begins)]):
            raise FrameError("a client did not begin as one of Warpbus does")
    return found


def _process_of(sock: socket.socket) -> int:
    """The process that has connected to a Unix socket."""
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid)


def _source(came: Any) -> str:
    """The key by which connections are limited, from the address that `accept` returns: an IPv4 address, the /64 of an
    IPv6 address (one machine usually has all of it), or the user id of a Unix socket's peer."""
    if not isinstance(came, tuple):
        return "unix"
    try:
        found = ip_address(str(came[0]).partition("%")[0])
    except ValueError:
        return str(came[0])
    if isinstance(found, IPv6Address) and found.ipv4_mapped is None:
        return str(IPv6Network((found, 64), strict=False))
    return str(getattr(found, "ipv4_mapped", None) or found)


def _alone_in(directory: Path) -> int:
    """Make a daemon's directory. Returns the descriptor that keeps other daemons out of it."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError(f"--directory {directory}: cannot be used ({error}); give another one") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UsageError(f"--directory {directory}: another daemon uses it; give another one") from None
    return lock


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UsageError(f"--host {host} --port {port}: cannot be listened at ({error}); give others") from None
    listening.setblocking(False)
    return listening


def _bind_unix(path: Path) -> socket.socket:
    """Bind a Unix socket that only this user can open, and replace one that an earlier daemon left behind."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if stat.S_ISSOCK(path.stat().st_mode):
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()
        before = os.umask(0o177)
        try:
            listening.bind(str(path))
        finally:
            os.umask(before)
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise UsageError(f"--unix {path}: cannot be listened at ({error}); give another path") from None
    listening.setblocking(False)
    return listening
