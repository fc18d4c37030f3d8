"""The block allocator of the KV cache, with prefix caching. Knows no tensors and no text.

A block holds the keys and values of `BLOCK` consecutive tokens of a sequence. The key of a full block is a digest of
its tokens and of all tokens before them: sequences with the same leading tokens can use the same blocks, since keys and
values depend on nothing else. Full blocks are found by their keys until their memory is needed for other tokens, and
then, if there is room for them, in main memory (`HostBlocks`).
"""

import hashlib
import heapq
from array import array
from collections import OrderedDict, abc
from collections.abc import Callable

from warpbus.engine.host_blocks import Fetch, HostBlocks

BLOCK = 32
"""Tokens per block."""

NULL_BLOCK = 0
"""The null block, which no sequence owns: padding rows of a batch write there."""


def blocks_for(tokens: int) -> int:
    """The number of blocks that hold so many tokens."""
    return -(-tokens // BLOCK)


def block_keys(
    token_ids: abc.Sequence[int], known: abc.Sequence[bytes] = (), *, salt: bytes = b"", offset: int = 0
) -> list[bytes]:
    """The keys of the full blocks of a sequence of tokens.

    Args:
        known: the keys of its first blocks, if they are already computed.
        salt: sequences of different salts share no blocks.
        offset: positions at the front of the first block, fewer than `BLOCK`, that hold the end of a prefix instead of
            tokens. Sequences of one salt have the same prefix.
    """
    keys = list(known)
    for start in range(len(keys) * BLOCK - offset, len(token_ids) - BLOCK + 1, BLOCK):
        before = keys[-1] if keys else salt
        tokens = array("q", token_ids[max(0, start) : start + BLOCK])
        keys.append(hashlib.blake2b(before + tokens.tobytes(), digest_size=32).digest())
    return keys


class BlockAllocator:
    """Allocates the blocks of a cache, those with the lowest numbers first.

    A block is free (unused, its content is meaningless), used (by one sequence or by several that share it), or idle
    (unused, but in the prefix cache until its memory is needed). Idle blocks are evicted least recently released first.

    Args:
        count: the most blocks, `NULL_BLOCK` included.
        commit: called before a block without committed memory is allocated, with the number of first blocks that need
            memory; returns how many have it then, which are fewer if there is no more memory. None: all have memory.
        sharing: whether there is a prefix cache.
        reserved: how many blocks after `NULL_BLOCK` are never allocated; they hold prefixes.
        host: where evicted blocks are kept; None: nowhere.

    Attributes:
        count: the most blocks.
        committed: how many blocks, the first ones, have committed memory.
    """

    def __init__(
        self,
        count: int,
        *,
        commit: Callable[[int], int] | None = None,
        sharing: bool = True,
        reserved: int = 0,
        host: HostBlocks | None = None,
    ) -> None:
        self.count = count
        self._host = host
        self.committed = count if commit is None else 0
        self._commit = commit
        self._sharing = sharing
        self._last_reserved = NULL_BLOCK + reserved
        self._free = list(range(self._last_reserved + 1, count))  # a heap: ascending
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def used(self) -> int:
        """The number of used blocks."""
        return len(self._users)

    @property
    def idle(self) -> int:
        """The number of idle blocks."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """The number of blocks that `take` can allocate, if memory for all of them can be committed."""
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int] | None:
        """Allocate `count` blocks for one sequence; None, and no change, if there are not enough."""
        if count > self.available:
            return None
        taken: list[int] = []
        while len(taken) < count:
            block = self._next()
            if block is None:
                self.release(taken)
                return None
            self._users[block] = 1
            taken.append(block)
        return taken

    def share(self, keys: abc.Sequence[bytes]) -> list[int]:
        """Find the blocks of the longest prefix of `keys` that is cached; the caller uses them from now on."""
        found: list[int] = []
        for key in keys if self._sharing else ():
            block = self._by_key.get(key)
            if block is None:
                break
            self._users[block] = self._users.get(block, 0) + 1
            self._idle.pop(block, None)
            found.append(block)
        return found

    def fetch(self, keys: abc.Sequence[bytes]) -> Fetch:
        """Begin to read the blocks of a prefix that only the disk has to main memory."""
        if self._host is None:
            return Fetch()
        return self._host.fetch(keys[next((at for at, key in enumerate(keys) if key not in self._by_key), len(keys)) :])

    def hold(self, keys: abc.Sequence[bytes]) -> None:
        """Keep the blocks of a prefix in main memory before others, if they are there, so that they can be restored."""
        if self._host is not None:
            self._host.hold(keys)

    def restore(self, keys: abc.Sequence[bytes], blocks: abc.Sequence[int]) -> tuple[int, int]:
        """Load the longest prefix of `keys` that main memory has to used blocks, and register them.

        Returns:
            how many blocks are loaded, and for how many steps of other sequences a prompt should wait for them.
        """
        if self._host is None:
            return 0, 0
        count = self._host.load(keys, blocks)
        for key, block in zip(keys[:count], blocks[:count], strict=True):
            self.publish(block, key)
        return count, self._host.steps_to_load(count)

    def publish(self, block: int, key: bytes) -> None:
        """Register a used block, which is full and not written any more, in the prefix cache."""
        if self._sharing and key not in self._by_key and block not in self._key_of:
            self._by_key[key] = block
            self._key_of[block] = key

    def unpublish(self, blocks: abc.Sequence[int]) -> None:
        """Remove used blocks from the prefix cache, and what main memory has of them."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._by_key[key]
                if self._host is not None:
                    self._host.drop(key)

    def release(self, blocks: abc.Sequence[int]) -> None:
        """Release the blocks of a sequence, given in its order: the last ones are evicted first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            del self._users[block]
            if block in self._key_of:
                self._idle[block] = None
            else:
                heapq.heappush(self._free, block)

    def forget(self, *, keep: bool = False) -> int:
        """Evict all idle blocks; returns how many first blocks are still in use, null and reserved blocks included.

        Args:
            keep: in main memory, if there is room; otherwise the prefix cache is empty there, too.
        """
        self.evict(len(self._idle))
        if self._host is not None and not keep:
            self._host.clear()
        return max(self._users, default=self._last_reserved) + 1

    def evict(self, count: int) -> int:
        """Evict up to `count` idle blocks, least recently released first; how many they were."""
        count = min(count, len(self._idle))
        for _ in range(count):
            heapq.heappush(self._free, self._evict())
        return count

    def keyed(self) -> dict[int, bytes]:
        """The blocks in the prefix cache, with their keys."""
        return dict(self._key_of)

    def use_memory(self, commit: Callable[[int], int], committed: int) -> None:
        """Use the memory of another cache with the same content; `commit` and `committed` as above."""
        self._commit, self.committed = commit, committed

    def uncommit(self, committed: int) -> None:
        """Record that only the first `committed` blocks have memory; the blocks after them are free."""
        self.committed = min(self.committed, committed)

    def _next(self) -> int | None:
        if self._free and self._is_committed(self._free[0]):
            return heapq.heappop(self._free)
        return self._evict() if self._idle else None

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        key = self._key_of.pop(block)
        del self._by_key[key]
        if self._host is not None:
            self._host.store(key, block)
        return block

    def _is_committed(self, block: int) -> bool:
        if block >= self.committed and self._commit is not None:
            self.committed = max(self.committed, self._commit(block + 1))
        return block < self.committed
