"""The event loop of a lease's process: executes the batches of the lease's client until the daemon ends it.

One loop waits for messages of the daemon (`tenant_processes` lists them), for new connections that have sent HELLO, and
for frames of the client. Between two frames it does a part of other work, such as a migration. The client may
disconnect and reconnect, from any machine, with the lease's key: the state stays. A client can affect nothing outside
this process.
"""

import hmac
import select
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from warpbus.errors import (
    AuthorizationError,
    ConnectionLostError,
    DeviceError,
    LeaseLostError,
    PoolError,
    ProtocolError,
    StateError,
    WarpbusError,
)
from warpbus.pool.protocol import link_memory, process_messages
from warpbus.pool.protocol.channel import SPIN_SECONDS, Channel
from warpbus.pool.protocol.failures import CallFailure, PoisonedError
from warpbus.pool.protocol.frames import PROTOCOL, Frame, Kind, read_request
from warpbus.pool.protocol.group_steps import GroupPlace
from warpbus.pool.protocol.operations import TENANT
from warpbus.pool.protocol.sockets import Tls, hung_up, ready
from warpbus.pool.protocol.wire import Value, decode, encode
from warpbus.pool.tenant.acceptor import Acceptor, refuse
from warpbus.pool.tenant.checkpoints import OfferedCheckpoints
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.host_copies import HostCopy
from warpbus.pool.tenant.links import LinkOpener, admit
from warpbus.pool.tenant.meter import Meter
from warpbus.pool.tenant.migration_destination import DestinationState, MigrationDestination
from warpbus.pool.tenant.moving_out import migrate, save
from warpbus.pool.tenant.native_calls import NativeCallsLoader
from warpbus.pool.tenant.swapping import Swapping
from warpbus.pool.tenant.time_slices import GpuQueue, TimeSlices

_UNACKNOWLEDGED = 16  # batches, at most
_TICK = 1.0
_REST = 0.001
_BATCH, _READ, _DATA = Kind.BATCH, Kind.READ, Kind.DATA  # looking up a member of an enumeration takes a while
_SMALL = 1 << 20  # bytes of an answer that is waited for beside other work
_LINGER = 2.0
_AT_ONCE = 0.001  # seconds for which a client that keeps sending has the process to itself
_SECONDS_TO_HEAR = 10.0


class TenantServer:
    """The process of one lease.

    Args:
        end: the socket to the daemon.
        setup: the "setup" message of the daemon.
        executor: the state of the lease: empty, or resumed from a file.
        native: loads what the daemon compiles meanwhile.

    Attributes:
        executor: the state of the lease.
        channel: to the client, or None.
        moved: the address that the lease has moved to, or "".
        over: the error that clients get because nothing is executed here any more, or None.
    """

    def __init__(
        self, end: socket.socket, setup: dict[str, Any], executor: Executor, native: NativeCallsLoader
    ) -> None:
        self.executor = executor
        self.channel: Channel | None = None
        self.moved = ""
        self.over: DeviceError | PoolError | None = None
        self._end = end
        self._setup = setup
        self._native = native
        self._on_gpu = executor.device.type == "cuda"
        self._acceptor = Acceptor()
        self._links = LinkOpener(executor.groups)
        executor.groups.attend = self._attend_in_step
        self._checkpoints = OfferedCheckpoints(executor.storages)
        self._swapping = Swapping(self, out=setup["swapped_out"])
        self._work: Iterator[None] | None = None
        self._work_rests = False
        self._claims: list[tuple[Channel, dict[str, Any]]] = []
        self._destination: MigrationDestination | None = None
        if setup["migration_token"] is not None:
            self._destination = MigrationDestination(executor, migration_token=setup["migration_token"])
        self._leaving: deque[tuple[int, HostCopy]] = deque()  # answers still being copied, by the question's number
        self._meter = Meter(executor.device)
        self._time_slices: TimeSlices | None = None
        self._kept: Frame | None = None  # the client's next batch, which waits for a time slice
        self._owed = 0
        self._dealt = 0  # batches and questions
        self._reported: tuple[int, int, int] | None = None
        self._next_tick = 0.0
        self._ends: float | None = None

    def serve(self) -> None:
        """Serve the lease until the daemon ends it. Raises ConnectionLostError when the daemon is gone."""
        self.tell("ready")
        going = True
        while going:
            try:
                going = self._iterate()
            except WarpbusError:
                raise
            except RuntimeError as error:
                if self.over is not None:
                    raise
                # Such as an illegal memory access, which makes the CUDA context unusable.
                self.lose(f"its GPU has failed: {str(error).partition(chr(10))[0]}")
        self.executor.groups.leave_all()
        self._say_goodbye()

    def lose(self, why: str) -> None:
        """End the lease. The client gets a moment to connect and read the reason."""
        self.over = LeaseLostError(f"this lease is lost, {why}")
        self.executor.groups.leave_all()
        self._work, self._meter = None, Meter(torch.device("cpu"))
        self._share_with(0)
        self._ends = time.monotonic() + _SECONDS_TO_HEAR
        self.hang_up()

    def tell(self, event: str, **facts: Value) -> None:
        """Report one of `operations.EVENTS` to the daemon."""
        process_messages.send(self._end, event, facts)

    def warn_client(self, address: str, *, final: bool) -> None:
        """Send the client the destination's address: to try if this process vanishes; if `final`, to use now."""
        if final:
            self.moved = address
        if self.channel is not None:
            with suppress(ConnectionLostError):
                self._acknowledge()
                self.channel.send(Kind.MOVED, 0, encode({"address": address, "final": final}))

    def tell_client(self, facts: dict[str, Value]) -> None:
        """Send the client a SWAP frame, if it is connected."""
        if self.channel is not None:
            with suppress(ConnectionLostError):  # noticed when it is read from
                self.channel.send(Kind.SWAP, 0, encode(facts))

    def hang_up(self) -> None:
        """Close the client's connection. The client reconnects, and forgets an address that was not final."""
        if self.channel is not None:
            self.channel.close()
            self.channel = self._kept = None
            self._swapping.unwant()
            self._leaving.clear()
            self._tell_clients()

    def rest_work(self) -> None:
        """Wait up to a millisecond for others before the work goes on, which waits for another process."""
        self._work_rests = True

    def step_aside(self) -> None:
        """Give up the time slice while this process waits for something other than the GPU."""
        if self._time_slices is not None:
            self.executor.storages.synchronize()
            self._time_slices.give_up(time.monotonic())

    def _iterate(self) -> bool:
        """Run one iteration of the event loop. Returns False when the process has to end."""
        patience = self._attend()
        talking = self.channel is not None and self._kept is None
        found = self._wait(min(patience, _REST) if self._work_rests else patience, talking=talking)
        if self._end.fileno() in found and not self._obey():
            return False
        if not talking and self._swapping.out and self.channel is not None and self.channel.fileno() in found:
            self.hang_up()
        if self._acceptor.fileno() in found:
            while (come := self._acceptor.come()) is not None:
                self._meet(*come)
        if self._links.fileno() in found:
            for event, facts in self._links.finished():
                self.tell(event, **facts)
        if self._destination is not None:
            self._receive_lease(self._destination)
        self._work_rests = False
        if self._work is not None and next(self._work, True):
            self._work = None
        if self._leaving:
            self._deliver()
        self._converse()
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + _TICK
            self._tell_clients()
            if (native := self._native.load()) is not None:
                self.executor.use_native(native)
        return self._ends is None or time.monotonic() < self._ends

    def _wait(self, patience: float, *, talking: bool) -> set[int]:
        """Wait for a message, up to `patience` seconds and not at all if there is work.

        Args:
            talking: whether messages of the client are read.

        Returns:
            the file descriptors of what has messages.
        """
        busy = (
            (self._work is not None and not self._work_rests)
            or (talking and self.channel is not None and self.channel.pending())
            or bool(self._leaving)
            or (self._destination is not None and self._destination.pending())
        )
        waiting = select.poll()
        for other in (self._end, self._acceptor, self._links):
            waiting.register(other, select.POLLIN)
        if talking and not busy and self.channel is not None:
            waiting.register(self.channel, select.POLLIN)
        elif not talking and self.channel is not None and self._swapping.out:
            waiting.register(self.channel, select.POLLRDHUP)  # it may wait for long, and nothing is read meanwhile
        if self._destination is not None and (source := self._destination.fileno()) is not None:
            waiting.register(source, select.POLLIN)
        if not busy and patience < 0.001:  # poll counts in milliseconds
            time.sleep(patience)
            busy = True
        return {at for at, _ in waiting.poll(0 if busy else 1000 * patience)}

    def _obey(self) -> bool:
        """Handle a message of the daemon. Returns False if the process has to end."""
        (operation, arguments), descriptors = process_messages.receive(self._end, TENANT)
        sock, shared = socket.socket(fileno=descriptors[0]) if descriptors else None, descriptors[1:]
        match operation:
            case "client" if sock is not None:
                self._acceptor.accept(sock, shared)
            case "migrate" if sock is not None:
                ca = arguments.pop("ca")
                tls = None if ca is None else Tls(Path(ca))
                self._begin(migrate(self, sock=sock, tls=tls, **arguments))
            case "link" if sock is not None:
                self._links.connect(sock, shared, **arguments)
            case "checkpoint" if sock is not None:
                self._open_checkpoint(arguments["name"], arguments["files"], sock)
            case "suspend":
                self._begin(save(self, Path(arguments["path"])))
            case "swap_out":
                self._begin(self._swapping.swap_out(**arguments))
            case "swap_in":
                self._begin(self._swapping.swap_in(), out=True)
            case "waits":
                self._swapping.wait(arguments["why"])
            case "neighbours":
                self._share_with(arguments["count"])
            case "end":
                return False
            case _:
                raise ProtocolError(
                    f"the daemon sent {operation} with {len(descriptors)} descriptors at the wrong time"
                )
        return True

    def _open_checkpoint(self, name: str, files: int, source: socket.socket) -> None:
        """Take in a checkpoint that the daemon offers."""
        try:
            with source:
                tensors, nbytes = self._checkpoints.receive(name, files, source)
        except WarpbusError as error:
            self.tell("failed", type=type(error).__name__, message=str(error))
        else:
            self.tell("offered", tensors=tensors, nbytes=nbytes)

    def _share_with(self, neighbours: int) -> None:
        """Start or stop using time slices, if that is how the GPU is shared."""
        if neighbours and self._time_slices is None and self._setup["queue_file"] is not None:
            queue = GpuQueue(Path(self._setup["queue_file"]))
            self._time_slices = TimeSlices(self._setup["share"], queue, time.monotonic())
        elif not neighbours and self._time_slices is not None:
            self._time_slices.close()
            self._time_slices = None

    def _begin(self, work: Iterator[None], *, out: bool = False) -> None:
        busy = self._work is not None or self._destination is not None
        if busy or self.over or self.moved or self._swapping.out is not out:
            error = "the lease is being moved, suspended or swapped, or was: wait until that is done"
            self.tell("failed", type="DeviceError", message=error)
        elif self.executor.groups and not out:
            error = "the lease is in a group with other leases, which have connections to its process: it stays"
            self.tell("failed", type="StateError", message=error)
        else:
            self._work = work

    def _meet(self, channel: Channel, hello: dict[str, Any], shared: list[int]) -> None:
        """Handle the HELLO of a new connection."""
        key, destination = hello.get("key"), self._destination
        if "link" in hello:
            admit(channel, hello, self.executor.groups, shared, lambda event, facts: self.tell(event, **facts))
            return
        link_memory.close(shared)
        if "migration_token" in hello:
            if destination is None:
                refuse(channel, StateError("no lease is to move to here"))
            else:
                destination.admit(channel, hello)
        elif not isinstance(key, bytes) or not hmac.compare_digest(key, self._setup["key"]):
            refuse(
                channel, AuthorizationError("this is not the key of the lease: connect with what the pool gave for it")
            )
        elif hello.get("protocol") != PROTOCOL:
            refuse(channel, ProtocolError(f"this pool speaks protocol {PROTOCOL}: use one version of Warpbus"))
        elif self.moved:
            with suppress(ConnectionLostError):
                channel.send(Kind.MOVED, 0, encode({"address": self.moved, "final": True}))
            channel.close()
        elif self.over is not None:
            refuse(channel, self.over)
        elif destination is None:
            self._welcome(channel, hello)
        elif hello.get("claim") is True:
            self._claims.append((channel, hello))
        else:
            refuse(channel, ConnectionLostError("the lease is on its way and not here yet"))

    def _welcome(self, channel: Channel, hello: dict[str, Any]) -> None:
        """Accept a client. It replaces the client that was connected before."""
        if self.channel is not None:
            self.channel.close()
        self.channel, self._owed, self._kept = channel, 0, None
        channel.before_waiting = self.step_aside
        self._leaving.clear()
        device, setup = self.executor.device, self._setup
        said: dict[str, Value] = {
            "protocol": PROTOCOL,
            "executed": self.executor.executed,
            "device": device.type,
            "name": setup["name"],
            "memory": setup["memory"],
            "share": setup["share"],
            "gpu": setup["gpu"],
            "torch": str(torch.__version__),
            "capability": list(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None,
        }
        acknowledged = hello.get("acknowledged")
        try:
            channel.send(Kind.WELCOME, 0, encode(said))
            if isinstance(acknowledged, int):
                self._report([each for each in self.executor.failures if each.batch > acknowledged])
        except ConnectionLostError:
            self.hang_up()
        self._tell_clients()

    def _receive_lease(self, destination: MigrationDestination) -> None:
        """Continue the migration of a lease to this process."""
        state = destination.step(0.0)
        if self._claims and state is not DestinationState.DISCARDED and destination.claim():
            state = destination.state
        if state is DestinationState.LIVING:
            self._destination = None
            self.tell("arrived")
            for channel, hello in self._claims:
                self._welcome(channel, hello)
            self._claims.clear()
        elif state is DestinationState.DISCARDED:
            self._destination = None
            why = f"this lease is lost: it was being moved, and did not arrive: {destination.reason}"
            self.over = LeaseLostError(why)
            for channel, _ in self._claims:
                refuse(channel, self.over)
            self._claims.clear()
            self.tell("failed", type="DeviceError", message=destination.reason)

    def _converse(self) -> None:
        """Handle the client's frames that are here, and those that follow within a moment: to look at everything else
        and to be woken takes longer than many a frame."""
        channel = self.channel
        if channel is None:
            return
        try:
            frame, self._kept = self._kept or channel.receive(0.0), None
            alone = self._work is None and self._destination is None and self._time_slices is None
            ends = time.monotonic() + _AT_ONCE
            while frame is not None and not self.over and not self.moved:
                if self._has_to_wait(frame):
                    self._kept = frame
                    break
                self._deal(channel, frame)
                if self._owed >= _UNACKNOWLEDGED:
                    self._acknowledge()
                if time.monotonic() >= ends or not (alone or channel.pending()):
                    break
                frame = self._next_frame(channel, ends) if alone else channel.receive(0.0)
            if self._owed and (self._kept or not channel.pending()):
                self._acknowledge()
        except ConnectionLostError:
            self.hang_up()
        except (
            DeviceError,
            PoolError,
        ) as error:  # a batch that is none, or one that is missing: nothing after it makes sense
            with suppress(ConnectionLostError):
                self._report([CallFailure.of(error, "batch", self.executor.executed)])
                channel.send(Kind.BYE)
            self.hang_up()

    def _has_to_wait(self, frame: Frame) -> bool:
        """Whether a frame of the client waits: for the lease's memory if it is swapped out, or for a time slice."""
        if self._swapping.out and frame.kind in (Kind.BATCH, Kind.ASK, Kind.READ):
            self._swapping.want()
            return True
        slices = self._time_slices
        return frame.kind is Kind.BATCH and slices is not None and not slices.may_execute(time.monotonic())

    def _next_frame(self, channel: Channel, ends: float) -> Frame | None:
        """The client's next frame, if it comes soon; until `ends` for answers that are on their way from the GPU."""
        while not channel.pending():
            if self._leaving and time.monotonic() < ends:
                self._deliver()
            elif channel.spin(SPIN_SECONDS):
                break
            else:
                return None
        return channel.receive(0.0)

    def _deal(self, channel: Channel, frame: Frame) -> None:
        self._dealt += 1
        if frame.kind is _READ:
            self._answer_read(channel, frame)
        elif frame.kind is _BATCH:
            self._meter.begin()
            try:
                failures = self.executor.execute(frame.number, frame.payload)
            finally:
                self._owed += 1
                self._meter.end()
            self._report(failures)
        elif frame.kind is Kind.ASK:
            self._answer(channel, frame)
        elif frame.kind is Kind.BYE:
            raise ConnectionLostError("the client said goodbye")
        else:
            raise ProtocolError(f"a client does not send {frame.kind.name} frames in the middle of a session")

    def _answer_read(self, channel: Channel, frame: Frame) -> None:
        """Send bytes of a storage."""
        handle, offset, nbytes = read_request(frame)
        if self._owed:
            self._acknowledge(more=True)
        self._fail_in_flight()
        storages = self.executor.storages
        try:
            if nbytes > _SMALL:
                for part in storages.stream(handle, offset, nbytes):
                    if failed := self.executor.failed_in_flight():  # the bytes may be of what did not come
                        raise PoisonedError(failed[0])
                    channel.send(_DATA, frame.number, part)
            elif self._on_gpu:
                while not storages.has_room(nbytes):
                    self._deliver()
                    if self.channel is not channel:
                        return  # the client is gone, and its answers with it
                # The GPU goes on with what the client has sent meanwhile.
                self._leaving.append((frame.number, storages.leave(handle, offset, nbytes)))
            else:
                channel.send(_DATA, frame.number, storages.read(handle, offset, nbytes))
        except Exception as error:
            self._answer_failed(channel, frame, error)

    def _answer(self, channel: Channel, frame: Frame) -> None:
        question: Any = decode(frame.payload)
        self._acknowledge(more=True)
        try:
            parts: Iterable[memoryview | Value]
            match question:
                case ["checkpoint", str(name), int(start)] if start >= 0:
                    parts = [self._checkpoints.describe(name, start)]
                case ["join" | "leave" | "linked" as action, *values]:
                    parts = [self._change_groups(action, values)]
                case ["load", str(name), list(wanted)]:
                    self._checkpoints.load(name, wanted)
                    parts = [None]
                case _:
                    parts = self.executor.answer(question if isinstance(question, list) else [question])
            for part in parts:
                if isinstance(part, memoryview):
                    channel.send(Kind.DATA, frame.number, part)
                else:
                    channel.send(Kind.ANSWER, frame.number, encode(part))
        except Exception as error:
            self._answer_failed(channel, frame, error)

    def _answer_failed(self, channel: Channel, frame: Frame, error: Exception) -> None:
        """Send the error of a question. CUDA's, too: what was launched before may come to light here."""
        if isinstance(error, ConnectionLostError):
            raise error
        failure = error.failure if isinstance(error, PoisonedError) else None
        failure = failure or CallFailure.of(error, "", self.executor.executed)
        channel.send(Kind.ERROR, frame.number, encode(failure.plain()))

    def _change_groups(self, action: str, values: list[Any]) -> Value:
        """Join or leave a group, or tell which of its ranks are connected."""
        groups = self.executor.groups
        if action == "join":
            if self._work is not None:
                raise StateError("the lease is being moved or suspended: join a group when that is done")
            groups.join(GroupPlace.read(values))
            return None
        if len(values) != 1 or not isinstance(values[0], bytes):
            raise ProtocolError(f"{action}: give the id of a group")
        if action == "leave":
            groups.leave(values[0])
            return None
        return list(groups.get(values[0]).linked)

    def _attend_in_step(self) -> None:
        """While a step of a group waits for other leases: see to the daemon and to the client's connections. A client
        that is gone is reported, so that its lease ends after some time, and the step with it."""
        if self.channel is not None and hung_up(self.channel):
            self.hang_up()
        if ready(self._end, select.POLLIN, 0.0) and not self._obey():
            self._ends = 0.0
            raise LeaseLostError("the lease has been ended")
        while (come := self._acceptor.come()) is not None:
            self._meet(*come)
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + _TICK
            self._tell_clients()

    def _deliver(self) -> None:
        """Send the answers whose copy from the GPU has completed."""
        while self._leaving and self.channel is not None:
            number, leaving = self._leaving[0]
            try:
                if not leaving.arrived:
                    return
                self._fail_in_flight()
                if not self._leaving:
                    return
                self.channel.send(Kind.DATA, number, leaving.take())
            except ConnectionLostError:
                self.hang_up()
                return
            except Exception as error:  # CUDA's: what was launched before comes to light here
                failure = CallFailure.of(error, "", self.executor.executed)
                with suppress(ConnectionLostError):
                    self.channel.send(Kind.ERROR, number, encode(failure.plain()))
            self._leaving.popleft()

    def _fail_in_flight(self) -> None:
        """See to a step of a group that has failed: answers that are on their way were read after it."""
        failures = self.executor.failed_in_flight()
        if not failures or self.channel is None:
            return
        self.executor.failures.extend(failures)
        self._report(failures)
        while self._leaving:
            number, _ = self._leaving.popleft()
            self.channel.send(Kind.ERROR, number, encode(failures[0].plain()))

    def _report(self, failures: list[CallFailure]) -> None:
        for failure in failures:
            if self.channel is not None:
                self.channel.send(Kind.ERROR, 0, encode(failure.plain()))

    def _acknowledge(self, *, more: bool = False) -> None:
        """Say which batches were executed; with `more` together with the frame that is sent next."""
        if self.channel is not None and self._owed:
            self.channel.send(Kind.ACK, self.executor.executed, more=more)
            self._owed = 0

    def _attend(self) -> float:
        """Measure the GPU's work and end a time slice that is over. Returns the seconds until the next check."""
        self._meter.collect(behind=self._time_slices is not None)
        if self._time_slices is None:
            return _TICK
        now, waiting = time.monotonic(), self._kept is not None and not self._swapping.out
        self._time_slices.attend(now, waiting=waiting, running=self._meter.running or bool(self._leaving))
        patience = self._time_slices.patience(now, waiting=waiting)
        return _TICK if patience is None else min(patience, _TICK)

    def _tell_clients(self) -> None:
        now = (int(self.channel is not None), self._swapping.used, self._dealt)
        if now != self._reported:
            self._reported = now
            self.tell("clients", connected=now[0], memory=now[1], busy=self._meter.busy, work=now[2])

    def _say_goodbye(self) -> None:
        """Close the client's connection after it has read the last message: closing a socket that has unread input
        resets the connection, which would discard the message."""
        channel, until = self.channel, time.monotonic() + _LINGER
        with suppress(PoolError):
            if channel is not None:
                if not self.moved:
                    channel.send(Kind.BYE)
                while time.monotonic() < until:
                    channel.receive(until - time.monotonic())
