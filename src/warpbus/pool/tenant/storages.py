"""Every byte that a lease holds, by handle. The quota is exact, and looked at before anything is allocated.

Knows nothing of operators. A storage is memory that is charged with the bytes it was asked for with; tensors are made
of it by geometry, which is checked once and then looked up.
"""

import ctypes
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from warpbus.cuda.read_back import ReadBack
from warpbus.errors import ProtocolError
from warpbus.pool.protocol.failures import CallFailure, PoisonedError
from warpbus.pool.protocol.geometry import Geometry, contiguous
from warpbus.pool.protocol.wire import Value
from warpbus.pool.tenant.host_copies import FEW, HostCopies, HostCopy
from warpbus.pool.tenant.pending_steps import PendingStep
from warpbus.pool.tenant.staging import CHUNK, ByteStaging

MAX_STORAGES = 1 << 20
"""Storages of a lease: those without bytes are charged with nothing, and have to end somewhere."""
MAX_HANDLE = 1 << 63

_LEAST_SLACK = 512 << 20
_SLACK = 8


def allowance(memory: int) -> int:
    """Bytes that a process needs on a GPU beside its lease's quota: what operators use while they run, the libraries'
    workspaces, and what the allocator rounds up. An eighth of the quota and at least 512 MiB."""
    return max(_LEAST_SLACK, memory // _SLACK)


class CheckedGeometry:
    """A geometry that is known by what it is, not by what is in it: looked up without hashing its shape."""

    __slots__ = ("__weakref__", "_fits", "geometry")

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self._fits = -1  # a storage of so many bytes, and of all that have more

    def check(self, nbytes: int) -> None:
        """Raises ProtocolError unless every element lies in a storage of `nbytes` bytes."""
        if nbytes < self._fits or self._fits < 0:
            self.geometry.check(nbytes)
            self._fits = nbytes


@dataclass(slots=True, eq=False)
class Storage:
    """The target of a handle.

    Attributes:
        nbytes: that are charged for it.
        base: a tensor with its memory; None if it has none: a poisoned storage, or a value.
        views: tensors of it, by geometry.
        version: of its contents, see `Storages.version`.
        failure: why it was never computed, or None.
        result: its geometry if only the pool knows that: of the result of a dynamic call.
        value: a result that is no tensor.
        pinned: programs have its address.
        pending: the copies between leases that use it and that the current stream does not wait for yet, or None.
            Then it has no `views`.
    """

    nbytes: int
    base: Tensor | None
    views: dict[CheckedGeometry, Tensor]
    version: int
    failure: CallFailure | None = None
    result: Geometry | None = None
    value: Value = None
    pinned: bool = False
    pending: PendingStep | None = None


class Storages:
    """The storages of a lease.

    Args:
        device: "cpu" or a CUDA device. On CUDA this process's allocator is limited, too: to the quota and `allowance`.
        memory: the quota in bytes.

    Attributes:
        live: by handle. The executor's hot path reads and adds here itself.
        used: bytes charged; never above `memory`.
        peak: the most that `used` has been.
        clock: the last version given.
        moved: counts how often memory that programs have the address of went away.
        writes: where calls write while a migration copies the lease, else None. By handle: the version before the first
            logged write, that after the last, and the range of all these writes in bytes.
    """

    def __init__(self, device: torch.device, memory: int) -> None:
        self.device = device if device.type != "cuda" else torch.device("cuda", device.index or 0)
        self.memory = memory
        self.live: dict[int, Storage] = {}
        self.used = 0
        self.peak = 0
        self.clock = 0
        self.moved = 0
        self.writes: dict[int, tuple[int, int, int, int]] | None = None
        self._with_pending: set[Storage] = set()
        self._sizes: dict[int, int] = {}
        self._checked: WeakValueDictionary[Geometry, CheckedGeometry] = WeakValueDictionary()
        self._staging = ByteStaging(self.device)
        self._copies = HostCopies(ReadBack(self.device))
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, (memory + allowance(memory)) / total), self.device)

    def charge(self, nbytes: int) -> None:
        """Count bytes as used. Raises torch.OutOfMemoryError, and counts nothing, if that is more than the quota."""
        used = self.used + nbytes
        if used > self.memory:
            raise torch.OutOfMemoryError(
                f"{nbytes:,} bytes do not fit: {self.used:,} of the lease's {self.memory:,} bytes are in use; "
                "free tensors, or lease more memory"
            )
        self.used = used
        if used > self.peak:
            self.peak = used

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def create(self, handle: int, nbytes: int, *, zeros: bool = True) -> None:
        """A storage of zeros; without `zeros` of any bytes, which nobody may read before all of them are written.

        Raises:
            torch.OutOfMemoryError: with the figures; nothing has changed.
            ProtocolError: the handle is taken or not possible.
        """
        self.check_new(handle)
        self.charge(nbytes)
        try:
            base = (torch.zeros if zeros else torch.empty)(nbytes, dtype=torch.uint8, device=self.device)
        except Exception:
            self.used -= nbytes
            raise
        self._add(handle, Storage(nbytes, base, {}, 0))

    def adopt(self, handle: int, tensor: Tensor) -> None:
        """Take over a result whose storage nobody else has, and charge it. Raises what `create` raises."""
        self.check_new(handle)
        nbytes = tensor.untyped_storage().nbytes()
        self.charge(nbytes)
        self._add(handle, Storage(nbytes, tensor, {}, 0))

    def hold(self, handle: int, tensor: Tensor, nbytes: int, checked: CheckedGeometry) -> None:
        """Take over a result that is charged already and lies at `checked` in `nbytes` that nobody else has."""
        if handle in self.live or handle >= MAX_HANDLE or len(self.live) >= MAX_STORAGES:
            self.check_new(handle)
        self.clock = clock = self.clock + 1
        self.live[handle] = Storage(nbytes, tensor, {checked: tensor}, clock)
        self._sizes[handle] = nbytes

    def keep(self, handle: int, value: Value) -> None:
        """A result that is no tensor."""
        self.check_new(handle)
        self.live[handle] = Storage(0, None, {}, 0, value=value)

    def take(self, handle: int, storage: Storage) -> None:
        """Have a storage under a new handle that was made apart from the others, and is charged already."""
        self._add(handle, storage)

    def free(self, handle: int) -> None:
        """Let go of what a handle stands for; nothing happens if it stands for nothing: a result that never came."""
        storage = self.live.pop(handle, None)
        if storage is not None:
            self._forget(handle, storage)

    def free_all(self, handles: Sequence[int]) -> None:
        """The same of many: a training step lets go of as much as it makes."""
        live, sizes = self.live, self._sizes
        for handle in handles:
            storage = live.pop(handle, None)
            if storage is not None:
                self.used -= storage.nbytes
                sizes.pop(handle, None)
                if storage.pinned:
                    self._let_go(storage)

    def poison(self, handle: int, failure: CallFailure) -> None:
        """From now on there is only the failure; memory is let go of. The handle need not have stood for anything."""
        storage = self.live.get(handle)
        if storage is None:
            self.check_new(handle)
        elif storage.failure is not None:
            return
        else:
            self._forget(handle, storage)
        self.live[handle] = Storage(0, None, {}, 0, failure)

    def tensor(self, handle: int, geometry: Geometry) -> Tensor:
        """The tensor that lies in a storage so.

        Raises:
            ProtocolError: there is no such storage, it was never computed, or the tensor does not lie inside it.
        """
        return self.at(self.memory_of(handle), self.checked(geometry))

    def checked(self, geometry: Geometry) -> CheckedGeometry:
        """The one `CheckedGeometry` of equal geometries."""
        checked = self._checked.get(geometry)
        if checked is None:
            checked = self._checked[geometry] = CheckedGeometry(geometry)
        return checked

    def at(self, storage: Storage, checked: CheckedGeometry) -> Tensor:
        """The tensor of a geometry in a storage that need not have a handle."""
        found = storage.views.get(checked)
        return self.view(storage, checked) if found is None else found

    def view(self, storage: Storage, checked: CheckedGeometry) -> Tensor:
        """The tensor of a geometry that has not been looked up yet."""
        if storage.failure is not None:
            raise PoisonedError(storage.failure)
        if storage.base is None:
            raise ProtocolError(f"a result that is no tensor but {storage.value!r:.40} is used as one")
        if storage.pending is not None:
            self._join(storage)
        checked.check(storage.nbytes)
        geometry, base = checked.geometry, storage.base
        if base.dtype is geometry.dtype and torch.is_inference_mode_enabled():  # see `whole`
            tensor = base.as_strided(geometry.shape, geometry.stride, geometry.offset)
        else:
            tensor = torch.empty(0, dtype=geometry.dtype, device=self.device)
            tensor.set_(base.untyped_storage(), geometry.offset, geometry.shape, geometry.stride)
        storage.views[checked] = tensor
        return tensor

    def raw(self, handle: int) -> Tensor:
        """A storage's bytes, uint8 `[nbytes]`."""
        return self.whole(self.memory_of(handle))

    def whole(self, storage: Storage) -> Tensor:
        """The same of a storage that need not have a handle."""
        checked = self.checked(contiguous(torch.uint8, (storage.nbytes,)))
        found = storage.views.get(checked)
        if found is None:
            with torch.inference_mode(False):  # it is written outside of that mode, too
                found = self.view(storage, checked)
        return found

    def read(self, handle: int, offset: int, nbytes: int) -> memoryview:
        """Bytes of a storage: its memory itself on a CPU, or a copy if they are few; a copy on a GPU."""
        if self.device.type != "cuda":
            if nbytes <= FEW and (few := self._few(handle, offset, nbytes)) is not None:
                return few
            return self.slice(handle, offset, nbytes).numpy().data
        copy = bytearray(nbytes)
        at = 0
        for part in self.stream(handle, offset, nbytes):
            copy[at : at + len(part)] = part
            at += len(part)
        return memoryview(copy).toreadonly()

    def _few(self, handle: int, offset: int, nbytes: int) -> memoryview | None:
        """A few bytes of a storage, which programs read in each step; None if they are not all inside."""
        address = self._address(self.memory_of(handle), offset, nbytes)
        return None if address is None else memoryview(ctypes.string_at(address, nbytes))

    @staticmethod
    def _address(storage: Storage, offset: int, nbytes: int) -> int | None:
        """Where bytes of a storage with memory are, found without a tensor; None if they are not all inside, or if that
        is not known so."""
        assert storage.base is not None
        memory = storage.base.data_ptr()  # none if the tensor has no elements
        if not memory or offset < 0 or nbytes < 0 or offset + nbytes > storage.nbytes:
            return None
        return memory - int(storage.base.storage_offset()) * storage.base.itemsize + offset

    def stream(self, handle: int, offset: int, nbytes: int) -> Iterator[memoryview]:
        """The same in pieces of 4 MiB at most, each of which holds until the next is asked for."""
        source = self.slice(handle, offset, nbytes)
        for _, (part,) in self._staging.read((None, [piece]) for piece in source.split(CHUNK)):
            yield part

    def has_room(self, nbytes: int) -> bool:
        """Whether `leave` has pinned memory for so many bytes, 1 MiB at most; else drop what has been copied before."""
        return self._copies.has_room(nbytes)

    def leave(self, handle: int, offset: int, nbytes: int) -> HostCopy:
        """The same of a GPU, as they are now, without waiting for them; `has_room` was true."""
        storage = self.memory_of(handle)
        if storage.pending is not None:
            self._join(storage)
        address = self._address(storage, offset, nbytes)
        if address is None:
            address = self.slice(handle, offset, nbytes).data_ptr()
        return self._copies.begin(address, nbytes)

    def write(self, handle: int, offset: int, data: bytes | memoryview) -> None:
        """Overwrite bytes of a storage; on a GPU it is done when its stream gets there."""
        data = memoryview(data)
        target = self.slice(handle, offset, len(data))
        for start in range(0, len(data), CHUNK):
            self._staging.write([(target[start : start + CHUNK], data[start : start + CHUNK])])
        self.written(handle)

    def written(self, handle: int) -> None:
        """Something wrote into a storage."""
        self.clock += 1
        self.live[handle].version = self.clock

    def written_all(self, handles: Sequence[int]) -> None:
        """Something wrote into several."""
        live, clock = self.live, self.clock
        for handle in handles:
            clock += 1
            live[handle].version = clock
        self.clock = clock

    def written_in_part(self, handles: Iterable[int]) -> None:
        """A call has failed that writes into these, as far as they are there; it may have written until then."""
        for handle in handles:
            if handle in self.live:
                self.written(handle)

    def version(self, handle: int) -> int:
        """A number that grows with every write, and that no two writes, to whatever storages, have in common."""
        return self.live[handle].version

    def log_write(self, handle: int, before: int, after: int, geometry: Geometry) -> None:
        """A call wrote into a tensor of a storage, whose versions before and after that are given."""
        assert self.writes is not None
        start, end = geometry.offset * geometry.dtype.itemsize, geometry.extent
        if not end:  # it has no elements, but there is a new version, of which something has to be copied
            start, end = 0, 1
        first, last, low, high = self.writes.get(handle, (before, before, start, end))
        if last != before:  # something else wrote in between
            first, low, high = before, start, end
        self.writes[handle] = first, after, min(low, start), max(high, end)

    def changed(self, handle: int, since: int) -> tuple[int, int]:
        """A range of bytes, `[start, end)`, that has all that were written since a version; all bytes if that is not
        known."""
        storage = self.live[handle]
        first, last, start, end = (self.writes or {}).get(handle, (0, -1, 0, 0))
        if last != storage.version or since < first:
            return 0, storage.nbytes
        return start, min(end, storage.nbytes)

    def forget_writes(self, handle: int) -> None:
        """`changed` will not be asked for versions before the present one."""
        if self.writes is not None:
            self.writes.pop(handle, None)

    def sizes(self) -> dict[int, int]:
        """Bytes of each storage that has memory, by handle. Not to be changed."""
        return self._sizes

    def check_new(self, handle: int) -> None:
        """Raises ProtocolError unless the handle may come to stand for something."""
        if handle in self.live:
            raise ProtocolError(f"the handle {handle} is in use: a client must not choose one twice")
        if not 0 <= handle < MAX_HANDLE or len(self.live) >= MAX_STORAGES:
            raise ProtocolError(f"a storage more, with handle {handle}: a lease has at most {MAX_STORAGES}")

    def check_all_new(self, handles: Collection[int]) -> None:
        """The same of handles that come to stand for something together, or not at all."""
        possible = min(handles, default=0) >= 0 and max(handles, default=0) < MAX_HANDLE
        if not possible or not self.live.keys().isdisjoint(handles):
            for handle in handles:
                self.check_new(handle)
        if len(set(handles)) != len(handles):
            raise ProtocolError(f"a handle stands twice among the results {[*handles]!r:.80}: each needs its own")
        if len(self.live) + len(handles) > MAX_STORAGES:
            raise ProtocolError(f"{len(handles)} storages more: a lease has at most {MAX_STORAGES}")

    def memory_of(self, handle: int) -> Storage:
        """The storage of a handle, which has memory. Raises ProtocolError if there is none or it was never computed."""
        storage = self.live.get(handle)
        if storage is None:
            raise ProtocolError(f"there is no storage with the handle {handle}: it was freed, or never made")
        if storage.failure is not None:
            raise PoisonedError(storage.failure)
        if storage.base is None:
            raise ProtocolError(f"the handle {handle} stands for {storage.value!r:.40}, which is no tensor")
        return storage

    def mark_pending(self, handles: Iterable[int], pending: PendingStep) -> None:
        """Copies were launched that use these storages, and only what uses them too waits for them."""
        for storage in self._present(handles):
            storage.pending = pending
            storage.views.clear()
            self._with_pending.add(storage)

    def pending_steps(self, handles: Iterable[int]) -> list[PendingStep]:
        """The pending copies that use storages, each once."""
        found = [storage.pending for storage in self._present(handles)]
        return list({id(pending): pending for pending in found if pending is not None}.values())

    def join_all(self) -> None:
        """Let the current stream wait for all pending copies."""
        for storage in list(self._with_pending):
            self._join(storage)

    def since(self, clock: int) -> list[int]:
        """The handles of storages that were written after `clock` had this value."""
        return [handle for handle, storage in self.live.items() if storage.version > clock]

    def slice(self, handle: int, offset: int, nbytes: int, *, join: bool = True) -> Tensor:
        """Bytes of a storage, uint8 `[nbytes]`, over its memory. Raises ProtocolError if they are not inside.

        Args:
            join: what is launched next waits for the copies that use the storage.
        """
        storage = self.memory_of(handle)
        if join and storage.pending is not None:
            self._join(storage)
        if offset < 0 or nbytes < 0 or offset + nbytes > storage.nbytes:
            raise ProtocolError(
                f"bytes {offset} to {offset + nbytes} of a storage of {storage.nbytes}: they must be inside"
            )
        assert storage.base is not None
        part = torch.empty(0, dtype=torch.uint8, device=self.device)
        return part.set_(storage.base.untyped_storage(), offset, (nbytes,), (1,))

    def _present(self, handles: Iterable[int]) -> list[Storage]:
        """The storages that have memory."""
        found = [self.live.get(handle) for handle in handles]
        return [storage for storage in found if storage is not None and storage.base is not None]

    def _join(self, storage: Storage) -> None:
        if storage.pending is not None:
            storage.pending.join()
            storage.pending = None
        self._with_pending.discard(storage)

    def _add(self, handle: int, storage: Storage) -> None:
        self.live[handle] = storage
        self._sizes[handle] = storage.nbytes
        self.written(handle)

    def _forget(self, handle: int, storage: Storage) -> None:
        self.used -= storage.nbytes
        self._sizes.pop(handle, None)
        self._let_go(storage)

    def _let_go(self, storage: Storage) -> None:
        if storage.pinned:
            self.moved += 1
            storage.pinned = False
