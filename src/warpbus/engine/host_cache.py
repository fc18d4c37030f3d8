"""Main memory for evicted blocks of the KV cache, the copies to it and from it, and the disk behind it.

On a GPU the memory is pinned and the copies run on a separate stream: a step waits only for copies of the blocks that
it uses, and for the stores, because it may overwrite the evicted blocks. On the CPU the copies are made immediately.
"""

import time
from collections import abc
from functools import partial

import torch
from torch import Tensor

from warpbus.cuda.devices import free_memory
from warpbus.cuda.memory_size import gigabytes
from warpbus.cuda.remote import remote_backend
from warpbus.engine.disk_cache import DiskCache, DiskSpace
from warpbus.engine.host_blocks import HostBlocks
from warpbus.engine.kv_cache import KVCache
from warpbus.engine.sequence import Sequence
from warpbus.errors import DeviceError, UsageError

# Bytes per allocation: a power of two, since torch rounds pinned allocations up to one.
_CHUNK = 2**28
# Bytes that a link copies in about the time of a step; longer loads run beside the steps of other sequences.
_LOADED_PER_STEP = 2**28
_SHARE_OF_HOST = 0.9  # of the free main memory
# Bytes of main memory that a disk needs: room for some prompts of the longest length, within limits.
_STAGED_PROMPTS = 2
_LEAST_STAGED, _MOST_STAGED = 2**28, 2**32
_POLL_SECONDS = 0.05


def staging_bytes(block_bytes: int, prompt_blocks: int) -> int:
    """The main memory between the cache and a disk, if none is given: for two prompts of so many blocks."""
    wanted = min(max(_LEAST_STAGED, _STAGED_PROMPTS * prompt_blocks * block_bytes), _MOST_STAGED)
    return max(wanted, block_bytes)


def check_memory(nbytes: int, block_bytes: int) -> None:
    """Raises UsageError if the memory is less than a block of `block_bytes` bytes."""
    if nbytes < block_bytes:
        raise UsageError(f"kv_host_memory is {nbytes:,} bytes, a block of the cache has {block_bytes:,}: give more")


class HostCache:
    """Main memory for blocks of an engine's cache.

    Args:
        cache: the cache; `use_cache` exchanges it.
        nbytes: the limit of the memory, which is allocated at once.
        disk: where blocks are kept besides; see `DiskCache`. None: nowhere.

    Attributes:
        blocks: which blocks are there.
        block_bytes: bytes per block.
        disk: the files, if there are any.

    Raises:
        UsageError: a limit is less than a block, or the cache is on a remote device.
        DeviceError: there is not enough main memory.
        StorageError: the directory of the disk cannot be used.
    """

    def __init__(self, cache: KVCache, nbytes: int, disk: DiskSpace | None = None) -> None:
        self.block_bytes = cache.block_bytes
        check_memory(nbytes, self.block_bytes)
        slots = nbytes // self.block_bytes
        self._widths = [rows.shape[1] for rows in cache.rows()]
        self._chunk_slots = max(1, min(slots, _CHUNK // self.block_bytes))
        self.use_cache(cache)
        self._memory = self._allocate(slots)
        self._copied = _LastCopies()
        self.disk: DiskCache | None = None
        if disk is not None:
            # No methods of this object: the references would keep it, and its memory, alive in a cycle.
            memory = partial(_slot_bytes, self._memory, self._chunk_slots)
            self.disk = DiskCache(disk, self.block_bytes, memory, self._copied.waiter)
        self.blocks = HostBlocks(slots, max(1, _LOADED_PER_STEP // self.block_bytes), self.disk)

    def stats(self) -> dict[str, int]:
        """The fields of `Stats` for it."""
        self.poll()
        return {
            **({} if self.disk is None else self.disk.stats()),
            "host_bytes": len(self.blocks) * self.block_bytes,
            "host_stored_bytes": self.blocks.stored * self.block_bytes,
            "host_loaded_bytes": self.blocks.loaded * self.block_bytes,
        }

    def use_cache(self, cache: KVCache) -> None:
        """Copy from and to another cache of the same shape from now on."""
        device = cache.device
        if remote_backend(device) is not None:
            raise UsageError(
                f"kv_host_memory: the KV cache is on {device}, from which copies pass over the network: leave it out"
            )
        self._cache = cache
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arriving: dict[int, torch.cuda.Event] = {}  # by block

    def poll(self) -> None:
        """Take notice of what the disk has read and written. Does not wait."""
        for each in () if self.disk is None else self.disk.finished():
            if each.read:
                self.blocks.fetched(each.key, good=each.good)
            else:
                self.blocks.written(each.slot)

    def wait_for_disk(self) -> None:
        """Wait a moment for the disk, when there is nothing else to do."""
        if self.disk is not None:
            self.disk.wait(_POLL_SECONDS)

    def save(self, evict: abc.Callable[[int], int], seconds: float) -> None:
        """Evict idle blocks and write them to the disk, for about so many seconds at most.

        Args:
            evict: up to a number of blocks; how many they were.
        """
        if self.disk is None:
            return
        end = time.monotonic() + seconds
        while True:
            evicted = evict(self.blocks.writable)
            self.copy()
            self.disk.wait(max(0.0, end - time.monotonic()), all_of_them=True)
            self.poll()
            if not evicted or time.monotonic() > end:
                return

    def close(self) -> None:
        """End the threads of the disk."""
        if self.disk is not None:
            self.disk.close()

    def begin_step(self, sequences: abc.Iterable[Sequence]) -> None:
        """Make the copies, so that a step of these sequences can be launched on the current stream."""
        self.copy()
        if self._arriving:
            self._wait_for([block for sequence in sequences for block in _new_blocks(sequence)])

    @torch.inference_mode()
    def copy(self) -> None:
        """Make the copies that `blocks` has asked for. What is launched afterwards may overwrite stored blocks."""
        copies = self.blocks.take_copies()
        if not copies:
            return
        rows = self._cache.rows()
        if self._stream is None:
            self._store(copies.stores, rows)
            self._load(copies.loads, rows)
            self.blocks.write()
            return
        computing = torch.cuda.current_stream(self._cache.device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            self._store(copies.stores, rows)
            stored = self._stream.record_event()
            self._load(copies.loads, rows)
            loaded = self._stream.record_event()
        if copies.stores:
            computing.wait_event(stored)
        self._copied.event = loaded
        self.blocks.write()
        self._arriving.update((block, loaded) for _, block in copies.loads)

    def wait(self) -> None:
        """Make the copies, and have the current stream wait for all of them."""
        self.copy()
        self._wait_for(list(self._arriving))

    def _wait_for(self, blocks: abc.Iterable[int]) -> None:
        """Have the current stream wait for the loads of some blocks, before it reads or writes them."""
        events = {event for block in blocks if (event := self._arriving.pop(block, None)) is not None}
        for event in events:
            torch.cuda.current_stream(self._cache.device).wait_event(event)

    def _store(self, stores: abc.Sequence[tuple[int, int]], rows: abc.Sequence[Tensor]) -> None:
        for block, slot in stores:
            for own, kept in zip(rows, self._slot(slot), strict=True):
                kept.copy_(own[block], non_blocking=True)

    def _load(self, loads: abc.Sequence[tuple[int, int]], rows: abc.Sequence[Tensor]) -> None:
        for slot, block in loads:
            for own, kept in zip(rows, self._slot(slot), strict=True):
                own[block].copy_(kept, non_blocking=True)

    def _slot(self, slot: int) -> tuple[Tensor, ...]:
        """The memory of a slot: one tensor per tensor of `KVCache.rows`."""
        return self._memory[slot // self._chunk_slots][slot % self._chunk_slots].split(self._widths)

    def _allocate(self, slots: int) -> list[Tensor]:
        """The memory, int64 `[slots, elements]` in chunks."""
        wanted, free = slots * self.block_bytes, free_memory(torch.device("cpu"))
        if free is not None and wanted > _SHARE_OF_HOST * free:
            raise DeviceError(
                f"kv_host_memory needs {gigabytes(wanted)}, of main memory {gigabytes(free)} are free, of which "
                f"{_SHARE_OF_HOST:.0%} can be used: give less, or free main memory"
            )
        sizes = [min(self._chunk_slots, slots - start) for start in range(0, slots, self._chunk_slots)]
        pinned = self._stream is not None
        try:
            return [torch.empty(size, sum(self._widths), dtype=torch.int64, pin_memory=pinned) for size in sizes]
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise DeviceError(
                f"kv_host_memory is {gigabytes(wanted)}: so much main memory cannot be had ({reason}): give less"
            ) from error


class _LastCopies:
    """The end of the last copies to and from main memory.

    Attributes:
        event: recorded behind them; None on the CPU, or before the first ones.
    """

    def __init__(self) -> None:
        self.event: torch.cuda.Event | None = None

    def waiter(self) -> abc.Callable[[], None]:
        """Waits for the copies that are the last ones now."""
        event = self.event
        return _no_wait if event is None else event.synchronize


def _no_wait() -> None:
    pass


def _slot_bytes(memory: abc.Sequence[Tensor], chunk_slots: int, slot: int) -> memoryview:
    """The bytes of a slot."""
    return memory[slot // chunk_slots][slot % chunk_slots].numpy().data.cast("B")


def _new_blocks(sequence: Sequence) -> list[int]:
    """The blocks that a sequence has got since its last step."""
    scheduled, state = sequence.scheduler_state, sequence.runner_state
    known = state.table_length if state.preemptions == scheduled.preemptions else 0
    return scheduled.blocks[known:]
