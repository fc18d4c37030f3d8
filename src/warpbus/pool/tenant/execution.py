"""The state of a lease, and the execution of its batches. This module knows no sockets.

Batches are numbered 1, 2, 3 ... for the life of the lease, across reconnections and migrations; each is executed once.
A call that fails poisons its new results, and the results of calls that use them; tensors that it was writing stay as
it left them. Autograd runs at the client, never here. Data is read back from the device only to answer a question.
"""

import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import DeviceError, ProtocolError, StateError
from warpbus.pool.protocol.failures import CallFailure, PoisonedError
from warpbus.pool.protocol.geometry import Geometry
from warpbus.pool.protocol.group_steps import decode_step
from warpbus.pool.protocol.instructions import MAX_DEFINITIONS, SHA256_BYTES, Instruction, parse
from warpbus.pool.protocol.wire import Value
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.content import ContentStore, Uploads
from warpbus.pool.tenant.definitions import ALONE, Definition, standing_alone
from warpbus.pool.tenant.groups import LeaseGroups
from warpbus.pool.tenant.native_calls import NativeCalls, load_native_calls
from warpbus.pool.tenant.programs import Programs
from warpbus.pool.tenant.random_state import generator_of, random_state, set_random_state
from warpbus.pool.tenant.storages import Storages

MAX_DEFINED_BYTES = 64 << 20
"""The most bytes of all encoded definitions of a lease. They are in main memory, which has no quota."""
MAX_ASKED = 1 << 16
"""The most handles or hashes in one question."""

_REPORTED = 16  # failures of a batch: what fails once fails a thousand times
_REMEMBERED = 256
_CALL = int(Instruction.CALL)
_uses = torch._C._storage_Use_Count


class Executor:
    """The state of one lease.

    Args:
        device: "cpu" or a CUDA device.
        quota: of the lease; its memory is in bytes.
        content: the store of earlier uploads, or None.
        gpu_links: see `LeaseGroups`.
        native: does most calls; None: what is compiled already, if something is.

    Attributes:
        executed: the number of the last executed batch.
        storages: the storages of the lease.
        failures: the latest reported failures, kept for a client that was not connected.
        calls: the number of executed calls, without those of programs.
        groups: the groups of leases that the lease is in. They are not a part of the state.
    """

    def __init__(
        self,
        device: torch.device,
        quota: Quota,
        content: ContentStore | None = None,
        *,
        gpu_links: bool = False,
        native: NativeCalls | None = None,
    ) -> None:
        self.executed = 0
        self.storages = Storages(device, quota.memory)
        self.device = self.storages.device
        self.failures: deque[CallFailure] = deque(maxlen=_REMEMBERED)
        self.calls = 0
        self.content = content
        self._uploads = None if content is None else Uploads(content)
        self._definitions: dict[int, Definition] = {}
        self._defined: dict[int, int] = {}  # by place: the number of the definition that has it
        self._defined_bytes = 0
        self._programs = Programs(self.storages)
        self.groups = LeaseGroups(self.storages, gpu_links=gpu_links)
        self._failed: list[CallFailure] = []
        self._native = native or load_native_calls()
        self._others: dict[int, Callable[..., None]] = {
            Instruction.NEW: self._new,
            Instruction.FREE: self._free,
            Instruction.DEFINE: self._define,
            Instruction.WRITE: self._write,
            Instruction.KNOWN: self._known,
            Instruction.SEED: self._seed,
            Instruction.RANDOM: self._random,
            Instruction.RECORD: self._programs.record,
            Instruction.STOP: self._programs.stop,
            Instruction.RUN: self._run,
            Instruction.DROP: self._programs.drop,
            Instruction.GROUP: self._group,
        }

    def execute(self, number: int, payload: memoryview) -> list[CallFailure]:
        """Execute a batch; a batch that was executed before is skipped.

        Returns:
            What failed in it, the first few. What was to be computed by it gives the same errors when it is read.

        Raises:
            ProtocolError: batches are missing before this one, and nothing was done; or it is malformed, and what came
                before the damage was done: it counts as executed.
        """
        if number <= self.executed:
            return [failure for failure in self.failures if failure.batch == number]
        if number != self.executed + 1:
            raise ProtocolError(f"batch {number} came after batch {self.executed}: those between are missing")
        self.executed = number
        self.groups.keep_pace()
        self._failed = self.failed_in_flight()
        definitions, call, programs = self._definitions, self._call, self._programs
        try:
            with torch.inference_mode():
                for instruction in parse(payload, self._layout, None if self._native is None else self._do_calls):
                    if instruction[0] != _CALL:
                        self._other(*instruction)
                    elif programs.recording is None:
                        call(definitions[instruction[1]], instruction[2])
                    else:
                        programs.add(definitions[instruction[1]], instruction[2])
        finally:
            self.failures.extend(self._failed)
        return self._failed

    def use_native(self, native: NativeCalls) -> None:
        """Do calls by `execution.cpp` from now on, also those of definitions that are there already."""
        self._native = native
        for definition in self._definitions.values():
            definition.plan = native.plan(definition)

    def failed_in_flight(self) -> list[CallFailure]:
        """What failed in a step of a group after it was launched. All that was written since it began is poisoned: it
        may have been computed from what did not come."""
        found = []
        while (failed := self.groups.failure()) is not None:
            failure = CallFailure.of(StateError(f"{failed.label}: {failed.why}"), failed.label, self.executed)
            self._poison(self.storages.since(failed.clock), failure, new=0)
            found.append(failure)
        return found

    def answer(self, question: list[Any]) -> Iterator[memoryview | Value]:
        """Answer a question of a client.

        Yields:
            For "read" the bytes, in pieces each of which holds until the next is asked for; else one value.

        Raises:
            PoisonedError: the requested tensor was never computed.
            ProtocolError: there is no such question, or it is about something that is not there.
        """
        match question:
            case ["read", int(handle), int(offset), int(nbytes)]:
                yield from self.storages.stream(handle, offset, nbytes)
            case ["describe", list(handles)] if len(handles) <= MAX_ASKED:
                yield [self._described(handle) for handle in handles]
            case ["known", list(hashes)] if len(hashes) <= MAX_ASKED:
                if not all(isinstance(each, bytes) and len(each) == SHA256_BYTES for each in hashes):
                    raise ProtocolError(f"what is asked to be known are SHA-256 hashes, of {SHA256_BYTES} bytes each")
                yield self._promises(hashes)
            case ["random"]:
                yield random_state(self.device)
            case ["usage"]:
                yield self.usage()
            case ["sync"]:
                self.groups.keep_pace(0.0)
                self.storages.synchronize()
                yield None
            case _:
                raise ProtocolError(f"a pool cannot answer {question!r:.80}")

    def settle(self) -> None:
        """Wait until received uploads are stored."""
        if self._uploads is not None:
            self._uploads.settle()

    def usage(self) -> dict[str, Value]:
        """The counters of the lease."""
        storages = self.storages
        return {
            "memory": storages.memory,
            "used": storages.used,
            "peak": storages.peak,
            "storages": len(storages.live),
            "definitions": len(self._definitions),
            "executed": self.executed,
            "calls": self.calls,
            **self._programs.usage(),
            "groups": asdict(self.groups.times),
        }

    def state(self) -> dict[str, Value]:
        """Everything but the storages' bytes, as a value of `warpbus.pool.protocol.wire`."""
        live = self.storages.live
        return {
            "executed": self.executed,
            "calls": self.calls,
            "definitions": [[number, each.encoded] for number, each in self._definitions.items()],
            "programs": self._programs.state(),
            "random": random_state(self.device),
            "failures": [failure.plain() for failure in self.failures],
            "poisoned": [[handle, each.failure.plain()] for handle, each in live.items() if each.failure],
            "values": [[handle, each.value] for handle, each in live.items() if not each.failure and each.base is None],
            "results": [[handle, *_outline(each.result)] for handle, each in live.items() if each.result is not None],
        }

    @property
    def definitions(self) -> Mapping[int, Definition]:
        """The definitions of calls, by number."""
        return self._definitions

    def foresee(self, number: int, encoded: bytes | memoryview) -> None:
        """Prepare a definition of the state that will be restored: preparing takes longer than transferring the state.

        Raises:
            ProtocolError: the bytes are no definition.
        """
        self._define(number, encoded)

    def clear(self) -> None:
        """Free all that the lease holds, which was saved: storages and programs. Definitions stay prepared."""
        self.settle()
        self._programs.clear()
        for handle in list(self.storages.live):
            self.storages.free(handle)

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of another executor, whose storages have been created here already.

        Raises:
            ProtocolError: the value is no state, or the state of another kind of device.
        """
        try:
            for number, encoded in state["definitions"]:
                if number not in self._definitions or self._definitions[number].encoded != encoded:
                    self._define(number, encoded)
            for handle, failure in state["poisoned"]:
                self.storages.poison(handle, CallFailure.read(failure))
            for handle, value in state["values"]:
                self.storages.keep(handle, value)
            for handle, dtype, shape, stride in state["results"]:
                self.storages.memory_of(handle).result = Geometry(dtype, tuple(shape), tuple(stride))
            self._programs.restore(state["programs"])
            failures = [CallFailure.read(failure) for failure in state["failures"]]
            self.failures.clear()
            self.failures.extend(failures)
            set_random_state(self.device, state["random"])
            self.executed, self.calls = int(state["executed"]), int(state["calls"])
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, struct.error) as error:
            raise ProtocolError(f"what was to be a lease's state is none: {type(error).__name__}: {error}") from None

    def _layout(self, number: int) -> struct.Struct:
        try:
            return self._definitions[number].layout
        except KeyError:
            raise ProtocolError(f"a call of kind {number}, which was not defined") from None

    def _do_calls(self, payload: memoryview, at: int) -> int:
        """Run the calls of a batch from `at` on without Python. Returns where they end, or where Python is needed."""
        if self._native is None or self._programs.recording is not None or self.storages.writes is not None:
            return at
        return self._native.run(self, payload, at)

    def _call(self, definition: Definition, operands: tuple[Any, ...]) -> None:
        """Run a call. Without `execution.cpp`, which does the same for most calls, this is the hot path: the code is
        inlined to keep the overhead per operator low."""
        storages = self.storages
        live = storages.live
        charge = 0
        try:
            values: list[Any] = []
            for checked, handle in zip(definition.inputs, operands, strict=False):
                storage = live.get(handle) or storages.memory_of(handle)
                tensor = storage.views.get(checked)
                values.append(storages.view(storage, checked) if tensor is None else tensor)
            if definition.numbers:
                values += operands[len(values) : definition.carried]
            if definition.refusal is not None:
                raise definition.refusal
            if definition.charge:
                storages.charge(definition.charge)
                charge = definition.charge
            result = definition.run(values)
        except Exception as error:  # operators raise anything
            storages.used -= charge
            self._fail(definition, operands, error)
        else:
            self._complete(definition, operands, values, result)

    def _complete(self, definition: Definition, operands: tuple[Any, ...], values: list[Any], result: Any) -> None:
        """Store what a call gave. The bytes are charged."""
        storages, charge = self.storages, definition.charge
        live = storages.live
        try:
            only = definition.only
            if only is not None:
                geometry, memory = only.geometry, result.untyped_storage()
                if (
                    result.stride() != geometry.stride
                    or result.shape != geometry.shape
                    or result.dtype is not geometry.dtype
                    or memory.nbytes() != charge
                    or _uses(memory._cdata) != ALONE
                    or id(result) in map(id, values)
                ):
                    del memory  # it would count as a use
                    result = definition.conformed(result, geometry, charge, {*map(id, values)})
                storages.hold(operands[-1], result, charge, only)
            elif not definition.quiet and not (definition.several and self._hold(definition, operands, values, result)):
                self._settle(definition, operands, values, result)
            if definition.written:
                clock, logs = storages.clock, storages.writes is not None
                for index in definition.written:
                    clock += 1
                    storage = live[operands[index]]
                    if logs:
                        storages.log_write(operands[index], storage.version, clock, definition.inputs[index].geometry)
                    storage.version = clock
                storages.clock = clock
            self.calls += 1
        except Exception as error:
            self._failed_call(definition, operands, error)

    def _failed_call(self, definition: Definition, operands: tuple[Any, ...], error: Exception) -> None:
        """A call has failed whose bytes are charged."""
        self.storages.used -= definition.charge
        self._fail(definition, operands, error)

    def _hold(self, definition: Definition, operands: tuple[Any, ...], values: list[Any], result: Any) -> bool:
        """Store several results if they are as announced, in storages that nothing else uses. Otherwise returns False,
        and nothing is stored."""
        news, handles = definition.news, operands[definition.carried :]
        if len(result) != len(news):
            return False
        known = [*map(id, values)]
        for tensor, (checked, nbytes) in zip(result, news, strict=True):
            if tensor.__class__ is not Tensor or id(tensor) in known:
                return False
            geometry, memory = checked.geometry, tensor.untyped_storage()
            if (
                tensor.stride() != geometry.stride
                or tensor.shape != geometry.shape
                or tensor.dtype is not geometry.dtype
                or memory.nbytes() != nbytes
                or _uses(memory._cdata) != ALONE
            ):
                return False
            known.append(id(tensor))
        storages = self.storages
        storages.check_all_new(handles)
        for handle, tensor, (checked, nbytes) in zip(handles, result, news, strict=True):
            storages.hold(handle, tensor, nbytes, checked)
        return True

    def _settle(self, definition: Definition, operands: tuple[Any, ...], values: list[Any], result: Any) -> None:
        """Store the results of a call that has several, or none."""
        handles = operands[definition.carried :]
        definition.check_written(values)
        if definition.dynamic:
            self._settle_dynamic(definition, handles, values, result)
        elif handles:
            fresh = definition.fresh(result, values)
            self.storages.check_all_new(handles)
            for handle, tensor, (checked, nbytes) in zip(handles, fresh, definition.news, strict=True):
                self.storages.hold(handle, tensor, nbytes, checked)

    def _settle_dynamic(self, definition: Definition, handles: tuple[int, ...], values: list[Any], result: Any) -> None:
        results = _leaves(result)
        if len(results) > len(handles):
            raise ProtocolError(
                f"{definition.operator} gave {len(results)} results: at most {len(handles)} can be kept"
            )
        kept: list[int] = []
        try:
            for handle, item in zip(handles, results, strict=False):
                if isinstance(item, Tensor):
                    tensor, geometry = standing_alone(item.to(self.device), values)
                    self.storages.adopt(handle, tensor)
                    self.storages.live[handle].result = geometry
                else:
                    self.storages.keep(handle, item)
                values.append(item)
                kept.append(handle)
        except Exception:
            for handle in kept:
                self.storages.free(handle)
            raise

    def _fail(self, definition: Definition, operands: tuple[Any, ...], error: Exception) -> None:
        poisoned = isinstance(error, PoisonedError)
        failure = error.failure if isinstance(error, PoisonedError) else self._report(error, definition.operator)
        handles = list(operands[definition.carried :])
        self.storages.written_in_part(operands[index] for index in definition.written)
        if poisoned:  # it should have been written from what was never computed
            handles += [operands[index] for index in definition.written]
        self._poison(handles, failure, new=len(operands) - definition.carried)
        definition.poison_resized(operands, self.storages, failure)

    def _poison(self, handles: list[int], failure: CallFailure, *, new: int) -> None:
        """Poison storages. The first `new` would have been created by the call; an existing one belongs to another."""
        for index, handle in enumerate(handles):
            if index >= new or handle not in self.storages.live:
                with suppress(ProtocolError):  # a handle that cannot be
                    self.storages.poison(handle, failure)

    def _report(self, error: Exception, operator: str) -> CallFailure:
        failure = CallFailure.of(error, operator, self.executed)
        if len(self._failed) < _REPORTED:
            self._failed.append(failure)
        return failure

    def _other(self, kind: Instruction, *operands: Any) -> None:
        """Execute an instruction that is not a call."""
        if kind == Instruction.DEFINE:
            self._define(*operands)
            return
        try:
            self._others[kind](*operands)
        except PoisonedError:
            pass  # it was reported
        except Exception as error:
            failure = self._report(error, Instruction(kind).name)
            if kind == Instruction.KNOWN:
                self._poison([operands[0]], failure, new=0)
            elif kind == Instruction.NEW:
                self._poison([operands[0]], failure, new=1)

    def _define(self, number: int, encoded: bytes | memoryview) -> None:
        place = number % MAX_DEFINITIONS
        replaced = self._defined.get(place, number)
        before = self._definitions.get(replaced)
        defined = self._defined_bytes + len(encoded) - (0 if before is None else len(before.encoded))
        if defined > MAX_DEFINED_BYTES:
            raise ProtocolError(f"kinds of calls of {defined:,} bytes together: a lease may have {MAX_DEFINED_BYTES:,}")
        definition = Definition(bytes(encoded), self.storages)
        if self._native is not None:
            definition.plan = self._native.plan(definition)
        self._definitions.pop(replaced, None)
        self._definitions[number] = definition
        self._defined[place] = number
        self._defined_bytes = defined

    def _new(self, handle: int, nbytes: int) -> None:
        self.storages.create(handle, nbytes)
        self._programs.keep(handle)

    def _free(self, handles: tuple[int, ...]) -> None:
        owned = self._programs.owned
        if not owned:
            self.storages.free_all(handles)
            return
        for handle in handles:
            if handle in owned:
                self._programs.free(handle)
            else:
                self.storages.free(handle)

    def _write(self, handle: int, offset: int, data: memoryview) -> None:
        self.storages.write(handle, offset, data)
        if self._uploads is not None:
            self._uploads.wrote(handle, offset, data, self.storages.sizes()[handle])

    def _promises(self, hashes: list[bytes]) -> list[Value]:
        """Which contents are stored here, and keep them."""
        content = self.content
        if content is not None and any(each in content.expected for each in hashes):
            self.settle()  # what was asked for before may have come, and not be kept yet
        return [content is not None and content.promise(each) for each in hashes]

    def _known(self, handle: int, offset: int, nbytes: int, sha256: bytes) -> None:
        content = None if self.content is None else self.content.take(sha256)
        if content is None or len(content) != nbytes:
            raise ProtocolError(f"{nbytes} bytes that were to be known here are not: upload them")
        self.storages.write(handle, offset, content)

    def _seed(self, seed: int) -> None:
        generator_of(self.device).manual_seed(seed)

    def _random(self, state: memoryview) -> None:
        set_random_state(self.device, state)

    def _group(self, payload: memoryview) -> None:
        step = decode_step(payload)
        try:
            if self._programs.recording is not None:
                raise StateError(f"{step.label}: a program that is recorded cannot have it: call it between programs")
            self.groups.get(step.group).run(step)
        except Exception as error:
            failure = error.failure if isinstance(error, PoisonedError) else self._report(error, step.label)
            self._poison(step.written, failure, new=0)
        else:
            self.storages.written_all(step.written)

    def _run(self, program: int) -> None:
        self.storages.join_all()
        try:
            self._programs.run(program)
        except PoisonedError as error:
            self._programs.poison(program, error.failure)
        except Exception as error:
            self._programs.poison(program, self._report(error, self._programs.at or f"program {program}"))

    def _described(self, handle: int) -> Value:
        storage = self.storages.live.get(handle)
        if storage is None:
            return None  # reserved for a result that there was none of
        if storage.failure is not None:
            raise PoisonedError(storage.failure)
        if storage.result is None:
            return storage.value
        return [*_outline(storage.result), storage.nbytes]


def _outline(geometry: Geometry) -> list[Value]:
    return [geometry.dtype, list(geometry.shape), list(geometry.stride)]


def _leaves(result: Any) -> list[Any]:
    """An operator's results, lists flattened."""
    if isinstance(result, tuple | list):
        return [leaf for item in result for leaf in _leaves(item)]
    if result is None or isinstance(result, Tensor | bool | int | float | complex | str):
        return [result]
    raise DeviceError(f"a result of the kind {type(result).__name__} cannot be given to a client")
