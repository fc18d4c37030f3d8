"""Selects the evicted blocks of the KV cache that are kept in main memory. Works on keys and numbers, without tensors.

The block allocator stores a block here when it evicts it, and loads it when a prompt needs it again. Both only decide:
the copies are made before the next step, all stores before all loads (`HostCache`).

With a disk (`BlockDisk`), a block is also written there once it is in main memory, and a block that only the disk has
is fetched to main memory before a prompt that needs it is admitted.
"""

from collections import OrderedDict, abc
from dataclasses import dataclass
from typing import Protocol

_WRITING_SHARE = 0.5  # of the slots; blocks that come while so many are being written are not written


@dataclass(frozen=True)
class BlockCopies:
    """The copies to be made before the next step.

    Attributes:
        stores: (block of the cache, slot of main memory) of each evicted block.
        loads: (slot of main memory, block of the cache) of each block that a prompt needs.
    """

    stores: list[tuple[int, int]]
    loads: list[tuple[int, int]]

    def __bool__(self) -> bool:
        return bool(self.stores or self.loads)


class BlockDisk(Protocol):
    """The part of `DiskCache` that decides need."""

    def __contains__(self, key: object) -> bool: ...

    def write(self, key: bytes, slot: int) -> bool:
        """Begin to write a slot, which is used until `HostBlocks.written`; whether it is being written."""
        ...

    def load(self, key: bytes, slot: int) -> None:
        """Begin to read a block to a slot, which is used until `HostBlocks.fetched`."""
        ...

    def drop(self, key: bytes) -> None:
        """Forget a block."""
        ...


class Fetch:
    """Blocks that are read from the disk for a prompt.

    Attributes:
        keys: of the blocks that are read, or were.
        left: how many are not read yet.
    """

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.left = 0


class HostBlocks:
    """The blocks in main memory by their keys, least recently used first.

    A block stays in main memory when it is loaded: if it is evicted again, it needs no copy.

    Args:
        slots: how many blocks there is room for.
        loads_per_step: how many blocks are loaded in about the time of a step; see `steps_to_load`.
        disk: where blocks are kept besides; None: nowhere.

    Attributes:
        stored, loaded: blocks that were copied to main memory, and back, since the start.
    """

    def __init__(self, slots: int, loads_per_step: int, disk: BlockDisk | None = None) -> None:
        self._count = slots
        self._disk = disk
        self._unwritten: dict[int, bytes] = {}  # by slot: keys of stored blocks that the disk may get
        self._writing: set[int] = set()  # slots
        self._fetching: dict[bytes, tuple[int, list[Fetch]]] = {}  # by key: the slot, and who waits
        self._dropped: set[bytes] = set()  # keys that are being read and must not be used
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(slots))[::-1]
        self._loads_per_step = loads_per_step
        self._stores: list[tuple[int, int]] = []
        self._loads: list[tuple[int, int]] = []
        self._held: set[int] = set()  # slots that loads read, or may read
        self.stored = 0
        self.loaded = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def store(self, key: bytes, block: int) -> None:
        """Keep the content of an evicted block. Replaces the least recently used one if there is no free slot."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return
        slot = None if key in self._fetching else self._take_slot()
        if slot is not None:
            self._slots[key] = slot
            self._stores.append((block, slot))
            self.stored += 1
            if self._disk is not None:
                self._unwritten[slot] = key

    def hold(self, keys: abc.Sequence[bytes]) -> None:
        """Protect the blocks of a prefix until the next copies; later, its end is replaced before its beginning."""
        for key in reversed(keys[: self._found(keys)]):
            self._slots.move_to_end(key)
            self._held.add(self._slots[key])

    def load(self, keys: abc.Sequence[bytes], blocks: abc.Sequence[int]) -> int:
        """Load the longest prefix of `keys` that is stored here into the first of `blocks`; returns the number of
        blocks."""
        count = min(self._found(keys), len(blocks))
        self.hold(keys[:count])
        self._loads += [(self._slots[key], block) for key, block in zip(keys[:count], blocks[:count], strict=True)]
        self.loaded += count
        return count

    def fetch(self, keys: abc.Sequence[bytes]) -> Fetch:
        """Begin to read the blocks of the longest prefix of `keys` that the disk has and main memory has not.

        It ends where there is no slot that could be replaced.
        """
        fetch = Fetch()
        if self._disk is None:
            return fetch
        # Blocks that a prompt needs must not be evicted for the rest of it; nor slots that are still to be stored.
        needed = {slot for key in keys if (slot := self._slots.get(key)) is not None}
        needed.update(slot for _, slot in self._stores)
        for key in keys:
            if key in self._slots:
                continue
            if key in self._dropped:
                break
            if key not in self._fetching:
                slot = self._take_slot(needed) if key in self._disk else None
                if slot is None:
                    break
                self._fetching[key] = slot, []
                self._disk.load(key, slot)
            self._fetching[key][1].append(fetch)
            fetch.keys.add(key)
            fetch.left += 1
        return fetch

    def fetched(self, key: bytes, *, good: bool) -> None:
        """The disk has read a block, or could not."""
        slot, waiting = self._fetching.pop(key)
        for fetch in waiting:
            fetch.left -= 1
        if good and key not in self._dropped:
            self._slots[key] = slot
        else:
            self._free.append(slot)
        self._dropped.discard(key)

    def write(self) -> None:
        """Begin to write the stored blocks, whose copies are made, to the disk."""
        unwritten, self._unwritten = self._unwritten, {}
        for slot, key in unwritten.items() if self._disk is not None else ():
            if len(self._writing) >= self.writable:
                break
            if self._disk is not None and self._disk.write(key, slot):
                self._writing.add(slot)

    @property
    def writable(self) -> int:
        """How many blocks can be stored and written before any of them is replaced."""
        return max(1, int(_WRITING_SHARE * self._count))

    def written(self, slot: int) -> None:
        """The disk does not read a slot any more."""
        self._writing.discard(slot)

    def steps_to_load(self, count: int) -> int:
        """The number of steps that a prompt should wait for `count` loaded blocks while other sequences are
        computed."""
        return count // self._loads_per_step

    def drop(self, key: bytes) -> None:
        """Forget a block."""
        self._forget(key)
        if self._disk is not None:
            self._disk.drop(key)
        if key in self._fetching:
            self._dropped.add(key)

    def clear(self) -> None:
        """Forget all blocks in main memory, and the copies that are not made yet. The disk keeps its blocks."""
        for key in list(self._slots):
            self._forget(key)
        self.take_copies()
        self._unwritten.clear()

    def take_copies(self) -> BlockCopies:
        """The copies since the last call."""
        copies = BlockCopies(self._stores, self._loads)
        self._stores, self._loads = [], []
        self._held.clear()
        return copies

    def _found(self, keys: abc.Sequence[bytes]) -> int:
        return next((index for index, key in enumerate(keys) if key not in self._slots), len(keys))

    def _forget(self, key: bytes) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._unwritten.pop(slot, None)
            self._free.append(slot)

    def _take_slot(self, needed: abc.Set[int] = frozenset()) -> int | None:
        """A free slot, or that of the least recently used block; None if all are held, needed or used by the disk."""

        def usable(slot: int) -> bool:
            return not (slot in self._held or slot in self._writing or slot in needed)

        for index in range(len(self._free))[::-1]:
            if usable(self._free[index]):
                return self._free.pop(index)
        key = next((key for key, slot in self._slots.items() if usable(slot)), None)
        if key is None:
            return None
        slot = self._slots.pop(key)
        self._unwritten.pop(slot, None)
        return slot
