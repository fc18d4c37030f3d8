"""The memory of an engine's KV cache: how large the cache is, and which of its blocks have memory.

Memory is committed when blocks are allocated. It is returned when the engine sleeps or shrinks, and exchanged when the
engine moves to another device. Knows blocks and bytes, and nothing of requests.
"""

from collections import abc
from functools import partial

import torch

from warpbus.cuda.devices import free_memory
from warpbus.cuda.remote import remote_backend
from warpbus.dist import Group
from warpbus.engine.blocks import BLOCK, BlockAllocator
from warpbus.engine.disk_cache import DiskSpace
from warpbus.engine.host_cache import HostCache, staging_bytes
from warpbus.engine.kv_cache import KVCache, token_bytes, usable_dtype
from warpbus.engine.prefixes import Prefixes
from warpbus.errors import DeviceError
from warpbus.models import Decoder

_RESERVE = 0.1  # of the free memory at the start of an engine: for activations and other programs
_RESERVE_REMOTE = 0.25  # the same on a remote device, where the cache allocates all of its memory at once, for good


class CacheMemory:
    """The KV cache of an engine, the allocator of its blocks, and main memory for evicted blocks.

    Args:
        model: on its device.
        prefixes: have the first blocks, which `begin` writes.
        sharing: prompts with a common prefix share the blocks of it.
        max_model_len, max_num_seqs, kv_dtype, cache_tokens, host_bytes, disk: as of `Engine`. If several processes
            share the model, all get the smallest cache of any.

    Attributes:
        cache: the keys and values, on the device where the engine runs now.
        prefixes: as given.
        blocks: the allocator of the cache's blocks.
        host: the evicted blocks in main memory; None: they are forgotten.
        tokens: the most tokens of all sequences together.

    Raises:
        UsageError: a cache of codes without kernels that read it, or as `HostCache`.
        DeviceError: less memory than one sequence needs, on the device or in the host.
    """

    def __init__(
        self,
        model: Decoder,
        prefixes: Prefixes,
        *,
        max_model_len: int | None,
        max_num_seqs: int,
        kv_dtype: str,
        cache_tokens: int | None,
        sharing: bool,
        host_bytes: int | None,
        disk: DiskSpace | None = None,
    ) -> None:
        config, dtype, device = model.config, model.final_norm.weight.dtype, model.final_norm.weight.device
        kv_dtype = usable_dtype(model, kv_dtype)
        if cache_tokens is None:
            each = -(-(max_model_len or config.max_context) // BLOCK) + prefixes.extra_blocks
            blocks = _affordable_blocks(model, prefixes, kv_dtype, wanted=max_num_seqs * each)
        else:
            blocks = cache_tokens // BLOCK
        if model.group is not None:
            blocks = model.group.smallest(blocks)
        least = max_model_len or 2 * BLOCK
        self.tokens = blocks * BLOCK
        if self.tokens < least:
            raise DeviceError(
                f"{device}: there is room for a cache of {max(0, self.tokens):,} tokens, {least:,} are needed: end "
                "what else uses its memory, lower max_model_len, quantize the model, or give kv_dtype int8 or int4"
            )
        count = 1 + prefixes.blocks + blocks + prefixes.extra_blocks
        self.prefixes = prefixes
        self.cache = KVCache(config, count, device=device, dtype=dtype, kv_dtype=kv_dtype, scales=model.kv_scales)
        if host_bytes is None and disk is not None:
            longest = -(-min(self.tokens, max_model_len or config.max_context) // BLOCK)
            host_bytes = staging_bytes(self.cache.block_bytes, longest)
        self.host = None if host_bytes is None else HostCache(self.cache, host_bytes, disk)
        self.blocks = BlockAllocator(
            count,
            # Not a method: the reference to this object would keep it, and its memory, alive in a cycle.
            commit=partial(_commit, self.cache, model.group),
            sharing=sharing,
            reserved=prefixes.blocks,
            host=None if self.host is None else self.host.blocks,
        )

    @property
    def usable(self) -> int:
        """The maximum number of blocks of all sequences together."""
        return self.blocks.count - 1 - self.prefixes.blocks

    def begin(self, dtype: torch.dtype, advice: str) -> None:
        """Commit memory for the null block and the prefixes, and write the prefixes. Does nothing if they have memory.

        Args:
            dtype: of the activations.
            advice: for the message of an error.

        Raises:
            DeviceError: there is no memory for them.
        """
        first = 1 + self.prefixes.blocks
        if self.blocks.committed >= first:
            return
        if self.cache.commit(first) < first:
            raise DeviceError(f"{self.cache.device}: out of memory for a cache: {advice}")
        self.blocks.committed = self.cache.committed
        self.prefixes.write(self.cache, dtype)

    def uncommit(self, blocks: int) -> None:
        """Return the memory of all but the first blocks, which no sequence uses."""
        if self.host is not None:
            self.host.wait()
        self.cache.shrink(blocks)
        self.blocks.uncommit(self.cache.committed)

    def forget(self, *, save_seconds: float = 0.0) -> int:
        """Evict all idle blocks, to main memory and to the disk if there are these.

        Args:
            save_seconds: for how long to write to the disk what does not fit main memory at once.

        Returns:
            as `BlockAllocator.forget`.
        """
        if self.host is not None:
            self.host.save(self.blocks.evict, save_seconds)
        return self.blocks.forget(keep=True)

    def copy(self, blocks: abc.Sequence[int], target: "CacheMemory") -> int:
        """Copy blocks, as they are after the launched steps, to the same blocks of another cache; the bytes copied.

        Raises:
            DeviceError: the other device has no memory for as many blocks as this cache has.
        """
        source, other = self.cache, target.cache
        if other.commit(self.blocks.committed) < self.blocks.committed:
            raise DeviceError(
                f"{other.device}: out of memory for the cache of the engine on {source.device}: end what else uses it"
            )
        if self.host is not None:
            self.host.wait()
        if blocks:
            other.store(blocks, source.fetch(blocks))
        return len(blocks) * source.block_bytes

    def use_cache(self, cache: KVCache, group: Group | None) -> None:
        """Use another cache, which has the content of all used and full blocks."""
        self.cache = cache
        if self.host is not None:
            self.host.use_cache(cache)
        self.blocks.use_memory(partial(_commit, cache, group), cache.committed)


def _affordable_blocks(model: Decoder, prefixes: Prefixes, kv_dtype: str, *, wanted: int) -> int:
    """How many of the `wanted` blocks fit the free memory of the model's device; may be negative."""
    weight = model.final_norm.weight
    free = free_memory(weight.device)
    if free is None:
        return wanted
    block_bytes = BLOCK * token_bytes(model.config, weight.dtype, kv_dtype)
    reserve = _RESERVE if remote_backend(weight.device) is None else _RESERVE_REMOTE
    return min(wanted, int(free * (1 - reserve)) // block_bytes - (1 + prefixes.blocks + prefixes.extra_blocks))


def _commit(cache: KVCache, group: Group | None, blocks: int) -> int:
    """Commit memory for the first blocks of a cache; how many are committed.

    Raises:
        DeviceError: one of several processes that share a model has not enough memory. By itself it would go on with
            fewer blocks, but all processes must schedule the same sequences.
    """
    committed = cache.commit(blocks)
    if committed < blocks and group is not None and group.world > 1:
        raise DeviceError(f"{group.device}: out of memory for the cache: end what else uses it")
    return committed
