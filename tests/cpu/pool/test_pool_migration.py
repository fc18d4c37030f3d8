"""A lease moves, and at every frame something breaks: one copy lives on, or none and it is known why."""

import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_migration_work import CUT_SHORT, ask, contents, execute, lease
from pool_random_lease import CPU, TOKEN, Lease

from warpbus.cuda.ipc import IpcLocation
from warpbus.errors import ConnectionLostError, DeviceError, LeaseLostError, PeerTimeoutError, PoolError, StateError
from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.failures import PoisonedError
from warpbus.pool.protocol.frames import Frame, Kind
from warpbus.pool.protocol.geometry import contiguous
from warpbus.pool.protocol.instructions import Writer, call_prefix
from warpbus.pool.protocol.signature import Input, New, Signature
from warpbus.pool.protocol.wire import decode
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.migration_destination import ENDS, DestinationState, MigrationDestination
from warpbus.pool.tenant.migration_source import MigrationReport, MigrationSource, SourceState
from warpbus.pool.tenant.staging import CHUNK


def undisturbed(batches: int, **options: int) -> dict[int, bytes]:
    lease = Lease(**options)
    for number in range(1, batches + 1):
        lease.execute(number)
    return lease.contents()


class KilledError(BaseException):
    """A side's process has died."""


@dataclass
class Wire:
    """Both ends of a connection, in one thread: what one side sends, the other deals with at once.

    `breaks` is called with who sends which frame, before and after it is sent.
    """

    destination: MigrationDestination
    breaks: Callable[["Wire", str, int, str], None] = lambda *_: None
    frames: list[str] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)
    busy: bool = False  # the destination gets to nothing

    def __post_init__(self) -> None:
        self.ends = {name: End(sock, self, name) for name, sock in zip("sd", socket.socketpair(), strict=True)}

    def let_destination_work(self) -> None:
        try:
            end = self.ends["d"]
            if not end.closed and self.destination.state is DestinationState.WAITING and end.pending():
                try:
                    hello = end.receive(0.0)
                except ConnectionLostError:
                    return
                assert hello is not None
                self.destination.admit(end, decode(hello.payload))  # type: ignore[arg-type]
            while not (self.busy or end.closed) and self.destination.fileno() is not None and end.pending():
                self.destination.step(0.0)
        except KilledError:
            self.kill("d")

    def kill(self, side: str) -> None:
        self.dead.add(side)
        self.ends[side].close()

    def cut(self) -> None:
        for end in self.ends.values():
            end.close()


class End(Channel):
    def __init__(self, sock: socket.socket, wire: Wire, side: str) -> None:
        super().__init__(sock)
        self.closed = False
        self._wire, self._side = wire, side

    def send(self, kind: Kind, number: int = 0, *payload: bytes | bytearray | memoryview) -> None:
        wire = self._wire
        index = len(wire.frames)
        wire.frames.append(self._side)
        wire.breaks(wire, self._side, index, "before")
        super().send(kind, number, *payload)
        if self._side == "s":
            wire.let_destination_work()
        wire.breaks(wire, self._side, index, "after")

    def receive(self, timeout: float | None = None) -> Frame | None:
        if self._side == "s":
            self._wire.let_destination_work()
        return super().receive(timeout)

    def close(self) -> None:
        self.closed = True
        super().close()


@dataclass
class Outcome:
    lease: Lease | None
    frames: list[str]
    source: SourceState
    destination: DestinationState
    report: MigrationReport | None


def move(
    breaks: Callable[[Wire, str, int, str], None] = lambda *_: None,
    *,
    batches: int = 30,
    plan: tuple[int, ...] = (3, 0, 2, 1),
    budget: int = 2000,
    largest: int = 3000,
) -> Outcome:
    """Move a lease after 15 of its batches and go on to the end on whichever side has it, as a client would."""
    here, there = Lease(largest=largest), Lease(largest=largest)
    for number in range(1, 16):
        here.execute(number)
    destination = MigrationDestination(there, migration_token=TOKEN, reads=lambda _: None)
    wire = Wire(destination, breaks)
    source = MigrationSource(here, wire.ends["s"], migration_token=TOKEN, timeout=0.05, little=0)
    reported, report, lost = False, None, ""
    try:
        ask(source)
        for between in plan:
            source.copy_ahead(budget)
            for _ in range(between):
                here.execute(here.executed + 1)
        reported = True
        report = source.finish()
    except (DeviceError, PoolError):
        reported = False  # the source tells the client that this is off
    except KilledError:
        wire.kill("s")
    wire.let_destination_work()

    living = None
    source_executes = source.state not in (SourceState.STOPPED, SourceState.MOVED)
    if "s" not in wire.dead and source_executes:
        living = here
    elif "d" not in wire.dead and reported:
        try:
            living = there if destination.claim() else None
        except LeaseLostError as error:
            lost = str(error)
        assert living is not None or "this lease is lost" in lost
    if not wire.dead:
        assert not (source_executes and destination.state is DestinationState.LIVING)
    if living is not None:
        for number in range(living.executed + 1, batches + 1):
            living.execute(number)
        assert living.contents() == undisturbed(batches, largest=largest)
    return Outcome(living, wire.frames, source.state, destination.state, report)


def test_a_lease_moves_with_all_that_it_holds() -> None:
    outcome = move()
    assert outcome.source is SourceState.MOVED
    assert outcome.destination is DestinationState.LIVING
    assert outcome.report is not None
    assert outcome.report.confirmed
    assert outcome.report.ahead > 0
    assert outcome.report.path == "sockets"


def test_calls_are_prepared_before_the_pause() -> None:
    here, there = Lease(), Lease()
    here.execute(1)
    destination = MigrationDestination(there, migration_token=TOKEN, reads=lambda _: None)
    source = MigrationSource(here, Wire(destination).ends["s"], migration_token=TOKEN)
    ask(source)
    assert source.copy_ahead().stop_reason
    assert there.foreseen == {1: b"1"}
    for number in range(2, 22):
        here.execute(number)  # the last of them defines the first one's anew
    while not source.copy_ahead().stop_reason:
        pass
    assert there.foreseen == {number % 20: b"%d" % number for number in range(2, 22)}
    source.finish()
    assert destination.state is DestinationState.LIVING


def test_who_is_not_ready_keeps_the_lease_executing() -> None:
    here = Lease()
    here.execute(1)
    wire = Wire(MigrationDestination(Lease(), migration_token=TOKEN, reads=lambda _: None))
    source = MigrationSource(here, wire.ends["s"], migration_token=TOKEN)
    ask(source)
    wire.busy = True
    assert [source.copy_ahead().stop_reason for _ in range(3)] == [""] * 3
    wire.busy = False
    assert source.copy_ahead().stop_reason
    source.finish()


FRAMES = move().frames


def test_the_move_that_is_broken_below_has_frames_of_all_kinds() -> None:
    assert len(FRAMES) > 12
    assert set(FRAMES) == {"s", "d"}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("index", range(len(FRAMES)))
def test_the_connection_breaks_at_a_frame(index: int, when: str) -> None:
    def breaks(wire: Wire, _: str, at: int, moment: str) -> None:
        if (at, moment) == (index, when):
            wire.cut()

    outcome = move(breaks)
    assert outcome.lease is not None, "nobody died, and still the lease is gone"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("index", range(len(FRAMES)))
def test_a_side_dies_at_a_frame_that_it_sends(index: int, when: str) -> None:
    def breaks(wire: Wire, side: str, at: int, moment: str) -> None:
        if (at, moment) == (index, when):
            wire.kill(side)
            raise KilledError(side)

    outcome = move(breaks)
    if FRAMES[index] == "s":
        # What the source held dies with it, unless all of it had arrived, which it says before it says COMMIT.
        end = [at for at, side in enumerate(FRAMES) if side == "s"][-2]
        assert (outcome.lease is not None) == (index > end or (index, when) == (end, "after"))
    else:
        committed = outcome.source is SourceState.MOVED
        assert (outcome.lease is None) == committed


@pytest.mark.parametrize("index", [at for at, side in enumerate(FRAMES) if side == "s"])
def test_the_destination_dies_while_the_source_sends(index: int) -> None:
    def breaks(wire: Wire, _: str, at: int, moment: str) -> None:
        if (at, moment) == (index, "before"):
            wire.kill("d")

    outcome = move(breaks)
    # Whoever says COMMIT to a process that has just died cannot know it: only then nobody has the lease.
    assert (outcome.lease is None) == (outcome.source is SourceState.MOVED)
    assert outcome.lease is not None or index == len(FRAMES) - 2


@settings(deadline=None, max_examples=40)
@given(
    plan=st.lists(st.integers(0, 4), max_size=5).map(tuple),
    budget=st.integers(1, 20_000),
    largest=st.integers(2, 20_000),
)
def test_whatever_is_executed_between_the_copies_arrives(plan: tuple[int, ...], budget: int, largest: int) -> None:
    outcome = move(plan=plan, budget=budget, largest=largest, batches=36)
    assert outcome.destination is DestinationState.LIVING


def pair(
    here: Lease | Executor, there: Lease | Executor, *, memory_shared: bool = False, readable: bool = True
) -> tuple[MigrationSource, MigrationDestination, threading.Thread]:
    """Both sides, the destination in a thread of its own."""
    ours, theirs = (Channel(sock) for sock in socket.socketpair())
    fake = FakeMemory(readable)
    destination = MigrationDestination(there, migration_token=TOKEN, reads=lambda _: fake if memory_shared else None)
    source = MigrationSource(
        here,
        ours,
        migration_token=TOKEN,
        timeout=20.0,
        little=0,
        shared=lambda _: fake if memory_shared else None,
    )

    def work() -> None:
        hello = theirs.receive(90)
        assert hello is not None
        destination.admit(theirs, decode(hello.payload))  # type: ignore[arg-type]
        while destination.step(1.0) not in ENDS:
            pass

    thread = threading.Thread(target=work)
    thread.start()
    return source, destination, thread


class FakeMemory:
    """Shared memory of a GPU, were it a GPU: tensors by a name."""

    def __init__(self, readable: bool) -> None:
        self.readable = readable
        self.copied = 0
        self._tensors: dict[bytes, torch.Tensor] = {}

    def synchronize(self) -> None: ...

    def locations(self, tensors: list[torch.Tensor]) -> list[IpcLocation]:
        locations = []
        for tensor in tensors:
            name = tensor.data_ptr().to_bytes(64, "little")
            self._tensors[name] = tensor
            locations.append(IpcLocation(name, len(tensor), 0))
        return locations

    def copy(self, parts: list[tuple[torch.Tensor, IpcLocation]]) -> None:
        if not self.readable:
            raise DeviceError("the driver does not open it")
        for tensor, place in parts:
            tensor.numpy()[:] = self._tensors[place.handle].numpy()
            self.copied += len(tensor)

    def close(self) -> None: ...


@pytest.mark.parametrize(("shared", "readable"), [(False, True), (True, True), (True, False)])
def test_storages_larger_than_a_chunk_arrive_by_either_way(shared: bool, readable: bool) -> None:
    here, there = Lease(), Lease()
    for handle, size in ((1, 2 * CHUNK + 12_345), (2, CHUNK), (3, 7)):
        here.storages.create(handle, size)
        here.storages.write(handle, 0, random.Random(handle).randbytes(size))
    source, destination, thread = pair(here, there, memory_shared=shared, readable=readable)
    ask(source)
    source.copy_ahead(CHUNK + 1)
    here.storages.write(1, 2 * CHUNK, b"written again")
    source.copy_ahead(1)
    report = source.finish()
    thread.join()
    assert report.path == ("GPU to GPU" if shared and readable else "sockets")
    assert destination.state is DestinationState.LIVING
    assert there.contents() == here.contents()


def test_work_that_writes_everything_is_not_copied_ahead_for_ever() -> None:
    here, there = Lease(), Lease()
    size = 5 * 2**20
    for handle in range(1, 9):
        here.storages.create(handle, size)
    source, _, thread = pair(here, there)
    ask(source)
    while not (progress := source.copy_ahead(2 * size)).stop_reason:
        for handle in here.storages.sizes():
            here.storages.write(handle, 0, b"a step")
    assert progress.rounds <= 3
    assert "written as fast" in progress.stop_reason
    report = source.finish()
    thread.join()
    assert report.paused >= 8 * size
    assert there.contents() == here.contents()


def test_weights_go_ahead_and_only_what_is_written_goes_in_the_pause() -> None:
    here, there = Lease(), Lease()
    for handle in range(1, 9):
        here.storages.create(handle, 4 * 2**20)
    here.storages.create(100, 1000)
    source, _, thread = pair(here, there)
    ask(source)
    while not source.copy_ahead(6 * 2**20).stop_reason:
        here.storages.write(100, 0, b"a token")
    report = source.finish()
    thread.join()
    assert report.ahead >= 32 * 2**20
    assert report.paused < 10_000
    assert there.contents() == here.contents()


def test_a_destination_that_hears_nothing_gives_up() -> None:
    now = 0.0
    destination = MigrationDestination(
        Lease(), migration_token=TOKEN, silence=10.0, reads=lambda _: None, clock=lambda: now
    )
    assert destination.step(0.0) is DestinationState.WAITING
    now = 11.0
    assert destination.step(0.0) is DestinationState.DISCARDED
    assert "nothing was heard for 10 seconds" in destination.reason


def test_a_claim_before_all_is_here_waits_for_the_rest() -> None:
    here, there = Lease(), Lease()
    here.execute(1)
    destination = MigrationDestination(there, migration_token=TOKEN, reads=lambda _: None)
    wire = Wire(destination)
    source = MigrationSource(here, wire.ends["s"], migration_token=TOKEN, timeout=0.05)
    ask(source)
    assert not destination.claim()
    source.finish()
    assert destination.claim()
    assert source.state is SourceState.MOVED
    assert there.contents() == here.contents()


def test_a_move_that_fails_leaves_nothing_behind() -> None:
    here, there = Lease(), Lease()
    here.execute(1)
    destination = MigrationDestination(there, migration_token=TOKEN, reads=lambda _: None)
    wire = Wire(destination)
    source = MigrationSource(here, wire.ends["s"], migration_token=TOKEN, timeout=0.05)
    ask(source)
    source.copy_ahead()
    wire.busy = True
    with pytest.raises(PeerTimeoutError, match="has not answered"):
        source.finish()
    wire.busy = False
    wire.let_destination_work()
    assert source.state is SourceState.STAYS
    assert destination.state is DestinationState.DISCARDED
    assert there.storages.used == 0
    with pytest.raises(StateError, match="begin another"):
        source.copy_ahead()


def test_the_destinations_quota_is_checked_before_anything_is_taken() -> None:
    here, there = Lease(), Lease(memory=100)
    here.storages.create(1, 101)
    destination = MigrationDestination(there, migration_token=TOKEN, reads=lambda _: None)
    source = MigrationSource(here, Wire(destination).ends["s"], migration_token=TOKEN)
    with pytest.raises(DeviceError, match="100 are reserved"):
        ask(source)
    assert source.state is SourceState.STAYS
    assert there.storages.peak == 0


def test_an_executor_goes_on_elsewhere_as_if_nothing_had_been() -> None:
    def worked(batches: int) -> Executor:
        executor = lease(CPU)
        for number in range(1, batches + 1):
            execute(executor, number)
        return executor

    here, there = worked(5), lease(CPU)
    source, destination, thread = pair(here, there)
    ask(source)
    for number in range(6, 10):
        source.copy_ahead(10_000)
        execute(here, number)
    source.finish()
    thread.join()
    assert destination.state is DestinationState.LIVING
    assert there.executed == 9
    for number in range(10, 15):
        execute(there, number)
    assert contents(there) == contents(worked(14))
    with pytest.raises(PoisonedError):
        there.storages.read(CUT_SHORT, 0, 1)


def test_running_statistics_that_pytorch_does_not_declare_as_written_arrive() -> None:
    batch_of, channels = contiguous(torch.float32, (4, 3)), contiguous(torch.float32, (3,))
    norm = Signature(
        "aten::native_batch_norm",
        (Input(0), None, None, Input(1), Input(2), True, 0.5, 1e-5),
        (),
        (batch_of, channels, channels),
        (),
        (New(batch_of, 48), New(channels, 12), New(channels, 12)),
    )
    assert norm.written == (1, 2)
    writer = Writer()
    for handle, nbytes in ((1, 48), (2, 12), (3, 12)):
        writer.new(handle, nbytes)
    writer.write(1, 0, torch.arange(12.0).numpy().tobytes())
    writer.define(0, norm.encode())
    here, there = lease(CPU), lease(CPU)
    here.execute(1, memoryview(bytes(writer.take())))
    source, _, thread = pair(here, there)
    ask(source)
    while not source.copy_ahead().stop_reason:
        pass
    writer.call(call_prefix(0) + struct.pack("<6Q", 1, 2, 3, 10, 11, 12))
    assert here.execute(2, memoryview(bytes(writer.take()))) == []
    source.finish()
    thread.join()
    assert torch.frombuffer(bytearray(contents(there)[2]), dtype=torch.float32).tolist() == [2.25, 2.75, 3.25]
    assert contents(there) == contents(here)
