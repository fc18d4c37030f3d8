"""The router sends prompts to replicas that know them, as long as that is less work."""

from warpbus.engine.blocks import BLOCK, block_keys
from warpbus.engine.routing import PrefixRouter


def router(count: int, blocks: int = 100) -> PrefixRouter:
    found = PrefixRouter()
    for replica in range(count):
        found.add(replica, blocks)
    return found


def order(found: PrefixRouter, keys: list[bytes], length: int, loads: dict[int, int]) -> list[int]:
    return [replica for replica, _ in found.rank(keys, length, loads)]


def tokens(blocks: int, seed: int) -> list[int]:
    return [seed] * (blocks * BLOCK)


def test_the_longest_prefix_decides_among_equal_loads() -> None:
    found = router(3)
    short, long = block_keys(tokens(2, 1)), block_keys(tokens(2, 1) + tokens(3, 2))
    found.record(1, short)
    found.record(2, long)
    idle = dict.fromkeys(range(3), 0)
    assert order(found, long, 5 * BLOCK, idle)[:2] == [2, 1]
    # Blocks behind one that differs do not count.
    other = block_keys(tokens(1, 9) + tokens(4, 2))
    assert order(found, other, 5 * BLOCK, idle)[0] == 0


def test_a_cached_token_is_worth_two_that_wait() -> None:
    found = router(2)
    keys = block_keys(tokens(4, 1))
    found.record(0, keys)
    length = 4 * BLOCK + 5
    assert order(found, keys, length, {0: 8 * BLOCK - 1, 1: 0}) == [0, 1]
    assert order(found, keys, length, {0: 8 * BLOCK + 1, 1: 0}) == [1, 0]
    assert order(found, keys, length, {1: 0}) == [1]


def test_the_same_prompt_stays_where_it_is_being_computed() -> None:
    """As the answers of one request with `n`: the first one has to compute it, wherever the others are."""
    found = router(2)
    keys = block_keys(tokens(3, 1))
    assert found.rank(keys, 3 * BLOCK + 1, {0: 0, 1: 0}) == [(0, 0), (1, 0)]
    found.record(0, keys)
    load = 3 * BLOCK + 1
    for _ in range(16):
        assert found.rank(keys, 3 * BLOCK + 1, {0: load, 1: 0})[0] == (0, 3 * BLOCK)
        load += 1


def test_unknown_prompts_go_round() -> None:
    found = router(3)
    sent = []
    for seed in range(6):
        keys = block_keys(tokens(1, seed))
        sent.append(order(found, keys, BLOCK, dict.fromkeys(range(3), 0))[0])
        found.record(sent[-1], keys)
    assert sent == [0, 1, 2, 0, 1, 2]


def test_what_does_not_fit_the_cache_is_forgotten_from_its_end() -> None:
    found = router(2, blocks=5)
    first, second = block_keys(tokens(3, 1)), block_keys(tokens(3, 2))
    found.record(1, first)
    found.record(1, second)
    loads = {0: 0, 1: 4 * BLOCK - 1}
    assert order(found, first, 3 * BLOCK, loads)[0] == 1  # two blocks are left of it
    assert order(found, first, 3 * BLOCK, {0: 0, 1: 4 * BLOCK + 1})[0] == 0
    found.forget(1)
    assert order(found, second, 3 * BLOCK, loads)[0] == 0
    found.remove(1)
    found.add(1, 5)
    assert order(found, second, 3 * BLOCK, {0: 1, 1: 0})[0] == 1
