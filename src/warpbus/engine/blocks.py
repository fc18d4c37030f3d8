"""Which blocks of the cache belong to whom, and which a new prompt can share. Knows no tensors and no text.

A block holds the keys and values of `BLOCK` consecutive tokens of a sequence. Its key is a digest of these tokens and
of all before them: whoever begins with the same tokens can use the same block, since keys and values depend on nothing
else. Full blocks are found by their keys as long as their memory is not wanted for something else.
"""

import hashlib
import heapq
from array import array
from collections import OrderedDict, abc
from collections.abc import Callable

BLOCK = 32
"""Tokens of a block."""

NULL_BLOCK = 0
"""A block that belongs to nobody: rows that only fill up a batch write there."""


def block_keys(
    token_ids: abc.Sequence[int], known: abc.Sequence[bytes] = (), *, salt: bytes = b"", lead: int = 0
) -> list[bytes]:
    """The keys of the full blocks of a sequence of tokens.

    Args:
        known: the keys of its first blocks, if they were computed before.
        salt: sequences of different salts share nothing.
        lead: places of the first block, fewer than `BLOCK`, that something else has taken: it holds fewer tokens.
            Sequences of one salt have the same there.
    """
    keys = list(known)
    for start in range(len(keys) * BLOCK - lead, len(token_ids) - BLOCK + 1, BLOCK):
        before = keys[-1] if keys else salt
        tokens = array("q", token_ids[max(0, start) : start + BLOCK])
        keys.append(hashlib.blake2b(before + tokens.tobytes(), digest_size=32).digest())
    return keys


class BlockAllocator:
    """Hands out the blocks of a cache, the lowest first, and takes them back.

    A block is free (nobody uses it and its content is worth nothing), used (by one sequence or several that share it),
    or idle (nobody uses it, but it can be found by its key until it is needed).

    Args:
        count: the blocks there can be, `NULL_BLOCK` included.
        back: called before a block is handed out that was never backed by memory, with the number of blocks to back;
            returns how many are backed then, fewer if there is no more memory. None: all are.
        sharing: whether blocks are found by keys.
        kept: so many blocks after `NULL_BLOCK` are never handed out: what they hold stays.

    Attributes:
        count: the blocks there can be.
        backed: how many of them, the first ones, have memory.
    """

    def __init__(
        self, count: int, *, back: Callable[[int], int] | None = None, sharing: bool = True, kept: int = 0
    ) -> None:
        self.count = count
        self.backed = count if back is None else 0
        self._back = back
        self._sharing = sharing
        self._last_kept = NULL_BLOCK + kept
        self._free = list(range(self._last_kept + 1, count))  # a heap: ascending
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # what was given back longest ago comes first
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def used(self) -> int:
        """Blocks that somebody uses."""
        return len(self._users)

    @property
    def idle(self) -> int:
        """Blocks that nobody uses, but that can be found."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that `take` could hand out if all that are wanted can be backed."""
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int] | None:
        """So many blocks for one user, or None if there are not enough: then nothing has changed."""
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
        """The blocks of the longest beginning of `keys` that can be found; the caller uses them from now on."""
        found: list[int] = []
        for key in keys if self._sharing else ():
            block = self._by_key.get(key)
            if block is None:
                break
            self._users[block] = self._users.get(block, 0) + 1
            self._idle.pop(block, None)
            found.append(block)
        return found

    def publish(self, block: int, key: bytes) -> None:
        """Let a used block, which is full and not written any more, be found by its key."""
        if self._sharing and key not in self._by_key and block not in self._key_of:
            self._by_key[key] = block
            self._key_of[block] = key

    def unpublish(self, blocks: abc.Sequence[int]) -> None:
        """Let used blocks be found no more."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._by_key[key]

    def release(self, blocks: abc.Sequence[int]) -> None:
        """Give blocks back, in their order within the sequence: the last ones are forgotten first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            del self._users[block]
            if block in self._key_of:
                self._idle[block] = None
            else:
                heapq.heappush(self._free, block)

    def forget(self) -> int:
        """Forget all idle blocks; the number of first blocks still needed, `NULL_BLOCK` and the reserved ones included."""
        while self._idle:
            heapq.heappush(self._free, self._evict())
        return max(self._users, default=self._last_kept) + 1

    def keyed(self) -> dict[int, bytes]:
        """The blocks that can be found, and their keys."""
        return dict(self._key_of)

    def rest_on(self, back: Callable[[int], int], backed: int) -> None:
        """Note that another cache holds the same blocks from now on; as `back` and `backed` are described above."""
        self._back, self.backed = back, backed

    def unback(self, backed: int) -> None:
        """Note that only so many of the first blocks have memory; those beyond are free."""
        self.backed = min(self.backed, backed)

    def _next(self) -> int | None:
        if self._free and self._is_backed(self._free[0]):
            return heapq.heappop(self._free)
        return self._evict() if self._idle else None

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._by_key[self._key_of.pop(block)]
        return block

    def _is_backed(self, block: int) -> bool:
        if block >= self.backed and self._back is not None:
            self.backed = max(self.backed, self._back(block + 1))
        return block < self.backed
