"""Chooses the replica of a model that computes a request, by cached prefixes and by load.

Knows which prompts were sent to which replica, as digests of their blocks, and nothing of processes.
"""

from collections import OrderedDict, abc
from itertools import count

from warpbus.engine.blocks import BLOCK

_WEIGHT = 2  # of a token of the prompt that has to be computed, against one of a request that the replica has
_MOST_KEYS = 2**18  # per replica: 8 million tokens, some 40 MB


class PrefixRouter:
    """Ranks replicas for a prompt, by the tokens that they were sent and by those that they have to do.

    The router records the keys of the full blocks of each prompt (see `block_keys`) for the replica that got it, and
    forgets the least recently used ones beyond the number of blocks that the replica's KV cache has. It does not ask
    the replicas: what they have evicted earlier, or still know of answers, makes a prompt slower, and nothing else.
    """

    def __init__(self) -> None:
        self._keys: dict[int, OrderedDict[bytes, None]] = {}
        self._limits: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._requests = count(1)

    def add(self, replica: int, blocks: int) -> None:
        """Add a replica whose cache has so many blocks."""
        self._keys[replica] = OrderedDict()
        self._limits[replica] = min(blocks, _MOST_KEYS)
        self._last[replica] = 0

    def remove(self, replica: int) -> None:
        """Remove a replica."""
        del self._keys[replica], self._limits[replica], self._last[replica]

    def forget(self, replica: int) -> None:
        """Record that the cache of a replica is empty."""
        self._keys[replica].clear()

    def rank(self, keys: abc.Sequence[bytes], length: int, loads: abc.Mapping[int, int]) -> list[tuple[int, int]]:
        """The replicas, best first, each with the number of the prompt's tokens that it was sent before.

        Best is the one with the fewest tokens to compute: those of its requests, and twice those of the prompt that it
        does not have; twice, since they delay other requests, too. So the longest cached prefix decides among replicas
        with similar loads, and a prefix that everybody asks for spreads to other replicas once one has much more to do.
        Among equal ones, the one with the longer prefix is best, and then the one whose last request is the oldest.

        Args:
            keys: of the prompt's full blocks.
            length: tokens of the prompt.
            loads: tokens to compute for the requests that run or wait, of each replica that may get it.
        """
        cached = {replica: min(length, BLOCK * self._known(replica, keys)) for replica in loads}
        best = sorted(loads, key=lambda each: (loads[each] - _WEIGHT * cached[each], -cached[each], self._last[each]))
        return [(replica, cached[replica]) for replica in best]

    def record(self, replica: int, keys: abc.Sequence[bytes]) -> None:
        """Record that a replica got a prompt."""
        self._last[replica] = next(self._requests)
        known = self._keys[replica]
        for key in reversed(keys):  # the end of a prompt is forgotten before its beginning
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._limits[replica]:
            known.popitem(last=False)

    def _known(self, replica: int, keys: abc.Sequence[bytes]) -> int:
        """How many leading blocks of a prompt a replica was sent."""
        known = self._keys[replica]
        return next((index for index, key in enumerate(keys) if key not in known), len(keys))
