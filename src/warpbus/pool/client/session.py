"""The client's session on a remote GPU: buffered instructions, definitions of calls, and memory accounting."""

import gc
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from warpbus.errors import ProtocolError, StateError, UsageError
from warpbus.pool.client.connection import Connection, PendingRead
from warpbus.pool.client.group_member import GroupMember
from warpbus.pool.client.tensors import NAME, FreedStorages, Remote
from warpbus.pool.protocol.group_steps import ExchangeStep, ReduceStep
from warpbus.pool.protocol.instructions import (
    MAX_DEFINITIONS,
    MAX_RANDOM_STATE,
    MAX_WRITE,
    Writer,
    definition_number,
)
from warpbus.pool.protocol.signature import Signature
from warpbus.pool.protocol.wire import Value

_FIRST_BATCH = 8
_BATCH_INSTRUCTIONS = 64
_BATCH_BYTES = 1 << 18

FORKED = (
    "this process is a forked child of one with a remote GPU and cannot use its connection: use the GPU in the parent "
    "only, or call warpbus.pool.connect in the child"
)
_NOT_CONNECTED = "no remote GPU is connected: gpu = warpbus.pool.connect('warpbus://host:7700', memory='8GB')"


@dataclass
class SessionStatistics:
    """Counts since the connection was made."""

    operators: int = 0
    batches: int = 0
    round_trips: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    definitions: int = 0


@dataclass(eq=False)
class Session:
    """One lease, as the client's kernels use it. Thread-safe, because autograd calls kernels from several threads.

    Args:
        connection: to the lease's tenant process.
        memory: quota in bytes. The client counts with the tenant, byte for byte, because every allocation and every
            release is an instruction of the client's own: what does not fit is refused here, at the line that asks.
        kind: "cuda" or "cpu", the type of the device behind.
        capability: the compute capability of a GPU behind.
    """

    connection: Connection
    memory: int
    kind: str
    capability: tuple[int, int] | None = None
    used: int = 0
    peak: int = 0
    statistics: SessionStatistics = field(default_factory=SessionStatistics)
    lock: threading.RLock = field(default_factory=threading.RLock)
    freed: FreedStorages = field(default_factory=FreedStorages)
    writer: Writer = field(default_factory=Writer)
    generation: int = 0
    """Incremented when the places of definitions are reused: numbers of earlier generations are invalid."""
    unknown: Counter[int] = field(default_factory=Counter)
    """By size in bytes: uploads offered since the pool last knew the content of one."""
    programs: int = 0
    recording: bool = False
    """Whether calls are being recorded into a program; nothing can be read meanwhile."""
    enough: int = _FIRST_BATCH
    """Instructions in the next batch: few after a wait, so that the idle tenant starts early, then more and more."""
    beside: bool = False
    """Whether arguments decide if a call is for this session: there are others, or its device is not `warpbus:0`."""
    member: GroupMember | None = None
    """How the lease gets connections to others; None where it cannot."""
    kinds: dict[Any, dict[Any, Any]] = field(default_factory=dict)
    """By operator: the calls that were prepared."""

    @property
    def index(self) -> int:
        """The index of the device, as in `warpbus:0`."""
        return self.freed.device_index

    @property
    def device(self) -> torch.device:
        """The device that PyTorch knows it by."""
        return torch.device(NAME, self.freed.device_index)

    def remote(self, nbytes: int) -> Remote:
        """Allocate the handle of a new storage. Its bytes count from now on; the call that produces it allocates them.

        Raises:
            torch.OutOfMemoryError: it does not fit into the quota.
        """
        if self.used + nbytes > self.memory:
            self._make_room(nbytes)
        self.used += nbytes
        if self.used > self.peak:
            self.peak = self.used
        return Remote(nbytes, self.freed)

    def allocate(self, nbytes: int) -> Remote:
        """Create a storage of zeros."""
        with self.lock:
            remote = self.remote(nbytes)
            self.writer.new(remote.handle, nbytes)
            self.advance()
        return remote

    def count(self, nbytes: int) -> None:
        """Count the bytes of results whose shapes depend on values, after the call."""
        with self.lock:
            self.used += nbytes
            self.peak = max(self.peak, self.used)

    def define(self, signature: Signature) -> int:
        """Define a kind of call at the tenant. Returns its number."""
        generation, place = divmod(self.statistics.definitions, MAX_DEFINITIONS)
        self.statistics.definitions += 1
        if generation != self.generation:
            self.generation = generation
            _tell_watchers()
        encoded = signature.encode()
        number = definition_number(place, encoded)
        self.writer.define(number, encoded)
        return number

    def call(self, encoded: bytes) -> None:
        """Append a call to the batch."""
        writer = self.writer
        writer.buffer += encoded
        writer.count += 1
        self.statistics.operators += 1
        if writer.count >= self.enough or self.recording or len(writer.buffer) >= _BATCH_BYTES:
            self.advance()

    def advance(self) -> None:
        """After each instruction: send the batch if it is long enough."""
        if self.recording:
            self._free()  # what goes now is free for the program's next call
        if self.writer.count >= self.enough or len(self.writer.buffer) >= _BATCH_BYTES:
            self.flush()

    def flush(self, *, more: bool = False) -> None:
        """Send all buffered instructions; with `more` together with the question that follows.

        Raises the error of a call that was sent earlier, if one failed.
        """
        with self.lock:
            self._free()
            if self.writer.count:
                payload = self.writer.take()
                self.statistics.batches += 1
                self.statistics.bytes_sent += len(payload)
                self.enough = min(2 * self.enough, _BATCH_INSTRUCTIONS)
                self.connection.send(payload, more=more)

    def ask(self, question: list[Value]) -> Value:
        """Send all instructions and a question. Returns the answer, once all instructions before it are executed."""
        with self.lock:
            self._waits()
            return self.connection.ask(question)

    def read(self, remote: Remote, offset: int, into: memoryview) -> None:
        """The bytes of a storage from `offset` on."""
        with self.lock:
            self._waits()
            self.statistics.bytes_received += len(into)
            self.connection.read(remote.handle, offset, into)

    def read_little(self, remote: Remote, offset: int, nbytes: int) -> memoryview:
        """So many bytes of a storage, `MAX_DATA` at most."""
        with self.lock:
            self._waits()
            self.statistics.bytes_received += nbytes
            return self.connection.read_little(remote.handle, offset, nbytes)

    def ask_for(self, remote: Remote, offset: int, nbytes: int) -> PendingRead:
        """Request bytes of a storage that is not written any more, without waiting."""
        with self.lock:
            self._waits()
            self.statistics.bytes_received += nbytes
            return self.connection.ask_for(remote.handle, offset, nbytes)

    def wait_for(self, reading: PendingRead) -> bytearray | memoryview:
        """Wait for the data of a read; calls that were sent since run meanwhile."""
        with self.lock:
            return self.connection.wait_for(reading)

    def watch(self) -> None:
        """Handle pending frames of the connection; reconnect if it broke. Raises LeaseLostError."""
        with self.lock:
            self.connection.watch()

    def write(self, remote: Remote, offset: int, data: memoryview) -> None:
        """Write bytes into a storage, at most `MAX_WRITE` at a time."""
        with self.lock:
            for start in range(0, len(data), MAX_WRITE):
                self.writer.write(remote.handle, offset + start, data[start : start + MAX_WRITE])
                self.advance()

    def seed(self, seed: int) -> None:
        """Seed the generator of the tenant with an unsigned 64-bit integer.

        Raises:
            UsageError: a program is being recorded.
        """
        with self.lock:
            self._refuse_recording()
            self.writer.seed(seed)
            self.advance()

    def do_step(self, step: ExchangeStep | ReduceStep) -> None:
        """Do a step of a group of leases, after everything sent before. Does not wait. Raises the error of an earlier
        call, if one failed, when the step has been sent.

        Raises:
            UsageError: a program is being recorded; nothing was sent.
        """
        with self.lock:
            self.check_step(step)
            self.writer.group(step.encode())
            self.flush()  # others wait for it

    def check_step(self, step: ExchangeStep | ReduceStep) -> None:
        """Raises UsageError if a program is being recorded."""
        if self.recording:
            raise UsageError(f"{step.label}: a program that is recorded cannot have it: call it between programs")

    def random_state(self) -> bytes:
        """The state of the tenant's generator, after everything sent before: one round trip."""
        state = self.ask(["random"])
        if not isinstance(state, bytes):
            raise ProtocolError("the pool answered with no random state: use one version of Warpbus on both sides")
        return state

    def set_random_state(self, state: bytes) -> None:
        """Set a state that `random_state` returned. Does not wait.

        Raises:
            UsageError: a program is being recorded, or it is longer than any generator's state.
        """
        if len(state) > MAX_RANDOM_STATE:
            raise UsageError(f"a random state of {len(state)} bytes: give what get_rng_state gave")
        with self.lock:
            self._refuse_recording()
            self.writer.random(state)
            self.advance()

    def _refuse_recording(self) -> None:
        if self.recording:
            raise UsageError("the random state cannot be set while a program is recorded: set it before")

    def _waits(self) -> None:
        if self.recording:
            raise UsageError("values cannot be read while a program is recorded: nothing is computed until it runs")
        if self.writer.count or self.freed:
            self.flush(more=True)
        self.enough = _FIRST_BATCH
        self.statistics.round_trips += 1

    def abandon(self) -> None:
        """In a forked child: leave the connection to the parent. Methods raise StateError from now on."""
        self.lock = threading.RLock()  # another thread of the parent may have held it
        self.connection.abandon(FORKED)

    def _free(self) -> None:
        freed = self.freed
        handles = []
        while freed:
            handle, nbytes = freed.popleft()
            handles.append(handle)
            self.used -= nbytes
        if handles:
            self.writer.free(handles)

    def _make_room(self, nbytes: int) -> None:
        self._free()
        if self.used + nbytes > self.memory:
            gc.collect()  # tensors in cycles of Python objects hold memory that is not theirs to hold
            self._free()
        if self.used + nbytes > self.memory:
            raise torch.OutOfMemoryError(
                f"remote GPU out of memory: tried to allocate {nbytes} bytes; "
                f"{self.used} of the lease's {self.memory} bytes are in use, {self.memory - self.used} are free"
            )


_open: dict[int, Session] = {}
"""The sessions of all connected GPUs, by the index of their device."""

_current: Session | None = None
"""That of the only GPU, or one of several."""

_forked = False

_watchers: list[Callable[[Session | None], None]] = []


class _ThreadSelection(threading.local):
    """The choices of a thread: the current device, and within a kernel the session that it is for."""

    index: int = 0
    session: Session | None = None


_thread = _ThreadSelection()


def current() -> Session:
    """The session that a kernel is for, or else that of the current device.

    Raises:
        StateError: none is connected.
    """
    session = _current
    if session is None:
        raise StateError(FORKED if _forked else _NOT_CONNECTED)
    return session if not session.beside else _thread.session or session_at(current_index())


def session_at(index: int | None) -> Session:
    """The session of the device `warpbus:index`; None stands for the current device.

    Raises:
        StateError: none is connected.
    """
    session = _open.get(current_index() if index is None else index)
    if session is None:
        if not _open:
            raise StateError(FORKED if _forked else _NOT_CONNECTED)
        raise StateError(f"no remote GPU is connected as {NAME}:{index}: this process has {_names()}")
    return session


def _names() -> str:
    return ", ".join(f"{NAME}:{index}" for index in sorted(_open))


def sessions() -> list[Session]:
    """All open sessions, in the order of their devices."""
    return [_open[index] for index in sorted(_open)]


def current_index() -> int:
    """The index of the current device of this thread: 0, what `set_current` set, or the first device there is."""
    return _thread.index if _thread.index in _open or not _open else min(_open)


def set_current(index: int) -> None:
    """Make `warpbus:index` the current device of this thread.

    Raises:
        StateError: there is no such device.
    """
    session_at(index)
    _thread.index = index


@contextmanager
def selected(session: Session) -> Iterator[Session]:
    """In the block, kernels of this thread that get no tensor are for this session."""
    before, _thread.session = _thread.session, session
    try:
        yield session
    finally:
        _thread.session = before


def is_connected() -> bool:
    """Whether this process has a remote GPU."""
    return _current is not None


def is_forked() -> bool:
    """Whether the remote GPU belongs to the parent that this process was forked from."""
    return _forked


def use(session: Session) -> None:
    """Make a session the first free device: `warpbus:0`, `warpbus:1` and so on."""
    global _forked
    session.freed.device_index = next(index for index in range(len(_open) + 1) if index not in _open)
    _open[session.index] = session
    _forked = False
    _choose()


def leave(session: Session) -> None:
    """The device of a session is no more, because it is closed. Nothing happens if it was left before."""
    if _open.get(session.index) is session:
        del _open[session.index]
        _choose()


def watch_current(watcher: Callable[[Session | None], None]) -> None:
    """Have a function called with the session of the only GPU whenever that changes, or its definitions are numbered
    anew; with None if there is no GPU or there are several."""
    _watchers.append(watcher)
    _tell_watchers()


def _tell_watchers() -> None:
    for watcher in _watchers:
        watcher(None if _current is None or _current.beside else _current)


def _choose() -> None:
    global _current
    for session in _open.values():
        session.beside = len(_open) > 1 or session.index > 0
    _current = _open[min(_open)] if _open else None
    _tell_watchers()


def _leave_to_parent() -> None:
    """In a forked child: the sessions stay the parent's. The child has copies of their locks and of what they were
    about to send, and must use neither."""
    global _forked
    for session in sessions():
        session.abandon()
        leave(session)
        _forked = True


os.register_at_fork(after_in_child=_leave_to_parent)
