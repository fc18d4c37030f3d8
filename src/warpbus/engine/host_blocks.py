"""Selects the evicted blocks of the KV cache that are kept in main memory. Works on keys and numbers, without tensors.

The block allocator stores a block here when it evicts it, and loads it when a prompt needs it again. Both only decide:
the copies are made before the next step, all stores before all loads (`HostCache`).
"""

from collections import OrderedDict, abc
from dataclasses import dataclass


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


class HostBlocks:
    """The blocks in main memory by their keys, least recently used first.

    A block stays in main memory when it is loaded: if it is evicted again, it needs no copy.

    Args:
        slots: how many blocks there is room for.
        loads_per_step: how many blocks are loaded in about the time of a step; see `steps_to_load`.

    Attributes:
        stored, loaded: blocks that were copied to main memory, and back, since the start.
    """

    def __init__(self, slots: int, loads_per_step: int) -> None:
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
        slot = self._take_slot()
        if slot is not None:
            self._slots[key] = slot
            self._stores.append((block, slot))
            self.stored += 1

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

    def steps_to_load(self, count: int) -> int:
        """The number of steps that a prompt should wait for `count` loaded blocks while other sequences are
        computed."""
        return count // self._loads_per_step

    def drop(self, key: bytes) -> None:
        """Forget a block."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Forget all blocks, and the copies that are not made yet."""
        for key in list(self._slots):
            self.drop(key)
        self.take_copies()

    def take_copies(self) -> BlockCopies:
        """The copies since the last call."""
        copies = BlockCopies(self._stores, self._loads)
        self._stores, self._loads = [], []
        self._held.clear()
        return copies

    def _found(self, keys: abc.Sequence[bytes]) -> int:
        return next((index for index, key in enumerate(keys) if key not in self._slots), len(keys))

    def _take_slot(self) -> int | None:
        """A free slot, or that of the least recently used block; None if all are held."""
        for index in range(len(self._free))[::-1]:
            if self._free[index] not in self._held:
                return self._free.pop(index)
        key = next((key for key, slot in self._slots.items() if slot not in self._held), None)
        return None if key is None else self._slots.pop(key)
