"""Programs: recorded calls on fixed handles, run again and again with one instruction.

What a recorded call gives is computed anew at each run, in the same storages as long as the program lives; what was
freed while it was recorded is memory of a run only. The first run is an ordinary one: libraries load and compile what
they need. On CUDA the second is captured as a graph (capturing executes nothing) and from then on a run is one launch.
A program that cannot be captured, and any on a CPU, is run call by call; `usage` says so. It is captured again when
memory that it has the address of went away, so also after a migration.

Graphs run one after another, so they share the memory of a run: nothing in it lasts, since what stays is copied to its
storage.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.capture import Graph, GraphMemory, capture
from warpbus.errors import DeviceError, ProtocolError, StateError
from warpbus.kernels.ops.workspace import use_counters
from warpbus.pool.protocol.failures import CallFailure
from warpbus.pool.protocol.operators import SOLVERS
from warpbus.pool.protocol.wire import Value
from warpbus.pool.tenant.definitions import Definition
from warpbus.pool.tenant.storages import Storage, Storages

MAX_PROGRAMS = 1024
MAX_STEPS = 1 << 20

_COUNTERS = 1 << 14  # of kernels, see `workspace`

Step = tuple[Definition, tuple[Any, ...]] | int
"""A call and its operands, or the handle of a result that no later call needs."""


@dataclass(slots=True, eq=False)
class RecordedProgram:
    """Calls.

    Attributes:
        steps: in order.
        made: bytes of each result that stays after a run, by handle.
        inner: bytes of each result that does not.
        kept: storages that the client made while it recorded.
        gone: storages to free with the program: those of `made` and `kept` that the client has released.
        used: storages that it reads or writes, and has not made.
        written: those of them that it writes.
        peak: bytes of a run that are there at one time, at most: of `inner`, and of what is about to be copied.
        ran: it was run here before.
        why: it is not captured, or "".
        graph: once it is captured.
        bases: the memory that the graph has the addresses of, by handle.
        moved: `Storages.moved` when that was looked at.
    """

    steps: list[Step] = field(default_factory=list)
    made: dict[int, int] = field(default_factory=dict)
    inner: dict[int, int] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    peak: int = 0
    ran: bool = False
    why: str = ""
    graph: Graph | None = None
    bases: dict[int, Tensor | None] = field(default_factory=dict)
    moved: int = 0

    def close(self) -> None:
        """It is recorded: sum up what its steps do."""
        now = 0
        for step in self.steps:
            if isinstance(step, int):
                now -= self.inner[step]
                continue
            definition, operands = step
            self.used.update(operands[: len(definition.inputs)])
            if definition.operator.removeprefix("aten::").partition(".")[0].removesuffix("_") in SOLVERS:
                # Not even tried: a library of the GPU's that is interrupted in a capture computes nothing afterwards.
                self.why = f"{definition.operator} waits for the GPU"
            self.written.update(operands[index] for index in definition.written)
            results = operands[definition.carried :]
            now += sum(self.inner.get(handle, 0) for handle in results)
            self.peak = max(self.peak, now + sum(self.made.get(handle, 0) for handle in results))
        self.used -= self.made.keys() | self.inner.keys()
        self.written &= self.used


class Programs:
    """The programs of a lease.

    Args:
        storages: that their calls work on.

    Attributes:
        recording: the program that calls are added to, or None.
        owned: handles of what a program has made, and which program.
        at: the operator that a run has reached.
    """

    def __init__(self, storages: Storages) -> None:
        self.recording: RecordedProgram | None = None
        self.owned: dict[int, RecordedProgram] = {}
        self.at = ""
        self._storages = storages
        self._programs: dict[int, RecordedProgram] = {}
        self._memory: GraphMemory | None = None  # of graphs, and the bytes of it that are charged
        self._held = 0
        self._counters: Tensor | None = None

    def record(self, number: int) -> None:
        """Begin to record a program."""
        if self.recording is not None or number in self._programs or len(self._programs) == MAX_PROGRAMS:
            raise StateError(
                f"program {number} cannot be recorded: it exists, or another one is being recorded, or there are "
                f"{MAX_PROGRAMS}"
            )
        self.recording = self._programs[number] = RecordedProgram()

    def add(self, definition: Definition, operands: tuple[Any, ...]) -> None:
        """Record a call. What is wrong with it comes out when the program is run."""
        program = self.recording
        assert program is not None
        if len(program.steps) >= MAX_STEPS:
            raise ProtocolError(f"a program of more than {MAX_STEPS} calls")
        program.steps.append((definition, operands))
        sizes = (
            [nbytes for _, nbytes in definition.news] if definition.news else [0] * len(operands[definition.carried :])
        )
        for handle, nbytes in zip(operands[definition.carried :], sizes, strict=True):
            program.made[handle] = nbytes
            self.owned[handle] = program

    def free(self, handle: int) -> None:
        """The client lets go of what a program has made."""
        program = self.owned[handle]
        if program is self.recording and handle in program.made:
            program.inner[handle] = program.made.pop(handle)
            program.steps.append(handle)
        else:
            program.gone.add(handle)

    def keep(self, handle: int) -> None:
        """The client has made a storage; if it is recording, the program has it as long as it lives."""
        if self.recording is not None:
            self.recording.kept.add(handle)
            self.owned[handle] = self.recording

    def stop(self) -> None:
        """End recording."""
        program, self.recording = self.recording, None
        if program is None:
            raise StateError("no program is being recorded that could end here")
        program.close()

    def run(self, number: int) -> None:
        """Run a program. Raises what its calls raise; nothing of what it was to make can be relied on then."""
        program = self._program(number)
        self.at = ""
        if program is self.recording:
            raise StateError(f"program {number} is still being recorded: it cannot be run yet")
        if program.graph is not None and program.moved != self._storages.moved:
            self._look(program)
        if program.graph is None:
            for handle in program.used:
                self._storages.memory_of(handle)
            new = self._missing(program)
            if (
                not program.ran
                or new
                or self._storages.device.type != "cuda"
                or program.why
                or not self._capture(program)
            ):
                self._run(program, new)
        if program.graph is not None:
            program.graph.replay()
        for handle in (*program.made, *program.written):
            self._storages.written(handle)
        program.ran = True

    def poison(self, number: int, failure: CallFailure) -> None:
        """A run failed."""
        program = self._programs.get(number)
        if program is not None and program is not self.recording:
            self._forget(program)
            self._storages.written_in_part(program.written)
            for handle in program.made:
                self._storages.poison(handle, failure)
            for step in program.steps:
                if not isinstance(step, int):
                    definition, operands = step
                    definition.poison_resized(operands, self._storages, failure)

    def drop(self, number: int) -> None:
        """Forget a program; what it made stays if the client has not let go of it."""
        program = self._program(number)
        if program is self.recording:
            self.recording = None
        self._forget(program)
        del self._programs[number]
        for handle in (*program.made, *program.inner, *program.kept):
            self.owned.pop(handle, None)
        for handle in program.gone:
            self._storages.free(handle)

    def clear(self) -> None:
        """Forget all programs, and what they made."""
        for program in self._programs.values():
            self._forget(program)
        self._programs.clear()
        self.owned.clear()
        self.recording = self._counters = None

    def usage(self) -> dict[str, Value]:
        """How many there are, how many are graphs, and why others cannot be."""
        programs = self._programs.values()
        return {
            "programs": len(programs),
            "captured": sum(each.graph is not None for each in programs),
            "not captured": list[Value](sorted({each.why for each in programs if each.why})),
        }

    def state(self) -> list[Value]:
        """All programs, as a value of `warpbus.pool.protocol.wire`."""
        return [
            [
                number,
                program is self.recording,
                _packed(program.steps),
                list[Value](sorted(program.kept)),
                list[Value](sorted(program.gone)),
            ]
            for number, program in self._programs.items()
        ]

    def restore(self, state: list[Any]) -> None:
        """Create the programs that `state` describes. A malformed state raises any of Python's errors."""
        recording = None
        for number, open_still, (signatures, steps), kept, gone in state:
            self.record(number)
            program = self.recording
            assert program is not None
            definitions = [Definition(signature, self._storages) for signature in signatures]
            for index, packed in steps:
                definition = definitions[index]
                self.add(definition, definition.layout.unpack(packed)) if index >= 0 else self.free(packed)
            for handle in kept:
                self.keep(handle)
            program.gone.update(gone)
            if open_still:
                recording, self.recording = program, None
            else:
                self.stop()
        self.recording = recording

    def _program(self, number: int) -> RecordedProgram:
        try:
            return self._programs[number]
        except KeyError:
            raise StateError(f"there is no program {number}: it was dropped, or never recorded") from None

    def _missing(self, program: RecordedProgram) -> dict[int, int]:
        """Bytes of what the program makes and is not there yet, or not any more, by handle.

        Raises:
            ProtocolError: one of its handles has something else.
        """
        live = self._storages.live
        for handle, nbytes in program.made.items():
            storage = live.get(handle)
            if storage is None:
                continue
            if storage.failure is not None:
                self._storages.free(handle)
            elif storage.base is None or storage.nbytes != nbytes:
                raise ProtocolError(
                    f"the handle {handle}, of {nbytes} bytes that a program makes, is in use for others"
                )
        new = {handle: nbytes for handle, nbytes in program.made.items() if handle not in live}
        self._storages.check_all_new(new)
        return new

    def _run(self, program: RecordedProgram, new: dict[int, int]) -> None:
        """Run it call by call."""
        storages = self._storages
        fresh = sum(new.values())
        storages.charge(fresh + program.peak)
        try:
            memories = self._execute(program, new)
        except Exception:
            storages.used -= fresh
            raise
        finally:
            storages.used -= program.peak
        for handle in new:
            storages.take(handle, memories[handle])

    def _execute(self, program: RecordedProgram, new: dict[int, int]) -> dict[int, Storage]:
        """Let its operators run, or be captured. Returns what is `new`; what it makes else is copied to its storage."""
        storages = self._storages
        memories: dict[int, Storage] = {}
        for step in program.steps:
            if isinstance(step, int):
                del memories[step]
                continue
            definition, operands = step
            self.at = definition.operator
            if definition.refusal is not None:
                raise definition.refusal
            if definition.dynamic:
                raise DeviceError(f"{self.at} cannot be in a program: what it gives is known only after it ran")
            values: list[Any] = []
            for checked, handle in zip(definition.inputs, operands, strict=False):
                values.append(storages.at(memories.get(handle) or storages.memory_of(handle), checked))
            values += operands[len(values) : definition.carried]
            result = definition.run(values)
            definition.check_written(values)
            fresh = definition.fresh(result, values)
            for handle, tensor, (checked, nbytes) in zip(
                operands[definition.carried :], fresh, definition.news, strict=True
            ):
                if handle in program.made and handle not in new:
                    storages.at(storages.memory_of(handle), checked).copy_(tensor)
                else:
                    memories[handle] = Storage(nbytes, tensor, {checked: tensor}, 0)
        return memories

    def _capture(self, program: RecordedProgram) -> bool:
        """Make a graph of it, if that can be done."""
        storages = self._storages
        more = max(0, program.peak - self._held)
        storages.charge(more)
        if self._memory is None:
            self._memory = GraphMemory(storages.device)
        if self._counters is None:
            self._counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=storages.device)
        try:
            with capture(self._memory) as graph, use_counters(self._counters):
                self._execute(program, {})
        except Exception as error:  # CUDA's, torch's, or an operator's own: the run without a graph tells which
            storages.used -= more
            program.why = f"{self.at}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            return False
        self._held += more
        program.graph = graph
        program.bases = {handle: storages.live[handle].base for handle in (*program.used, *program.made)}
        for handle in program.bases:
            storages.live[handle].pinned = True
        program.moved = storages.moved
        return True

    def _look(self, program: RecordedProgram) -> None:
        """Some memory went away that graphs have the address of: forget this graph if it was its."""
        live = self._storages.live
        if all(handle in live and live[handle].base is base for handle, base in program.bases.items()):
            program.moved = self._storages.moved
        else:
            self._forget(program)

    def _forget(self, program: RecordedProgram) -> None:
        """Let go of the graph. What it made stays as it is."""
        if program.graph is not None:
            self._storages.synchronize()
            program.graph, program.bases = None, {}
            if not any(each.graph for each in self._programs.values()):
                self._storages.used -= self._held
                self._memory, self._held = None, 0


def _packed(steps: list[Step]) -> list[Value]:
    """Steps as signatures, each once, and pairs: which of them and its operands, or -1 and a handle."""
    numbers: dict[bytes, int] = {}
    pairs: list[Value] = []
    for step in steps:
        if isinstance(step, int):
            pairs.append([-1, step])
        else:
            definition, operands = step
            pairs.append([numbers.setdefault(definition.encoded, len(numbers)), definition.layout.pack(*operands)])
    return [list(numbers), pairs]
