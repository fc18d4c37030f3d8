"""The blocks of a cache by themselves: against a model that knows who has what, and what each block is found by."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from warpbus.engine.blocks import BLOCK, NULL_BLOCK, BlockAllocator, block_keys

TOKENS = st.lists(st.integers(0, 2**40), max_size=3 * BLOCK)


@given(TOKENS, TOKENS, st.binary(max_size=100), st.binary(max_size=100))
def test_keys_are_equal_where_all_tokens_so_far_are(one, other, salt, another):
    ours, theirs = block_keys(one, salt=salt), block_keys(other, salt=another)
    assert len(ours) == len(one) // BLOCK
    for at, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        end = (at + 1) * BLOCK
        assert (a == b) == (one[:end] == other[:end] and salt == another)
    assert len(set(ours)) == len(ours)


@given(TOKENS, st.binary(max_size=70), st.data())
def test_keys_go_on_from_those_that_are_known(tokens, salt, data):
    whole = block_keys(tokens, salt=salt)
    known = data.draw(st.integers(0, len(whole)))
    assert block_keys(tokens, whole[:known], salt=salt) == whole
    assert block_keys(tokens[: known * BLOCK], salt=salt) == whole[:known]


@given(TOKENS, st.integers(0, BLOCK - 1), st.data())
def test_keys_of_tokens_that_do_not_begin_a_block(tokens, lead, data):
    whole = block_keys(tokens, salt=b"s", offset=lead)
    assert len(whole) == (lead + len(tokens)) // BLOCK
    known = data.draw(st.integers(0, len(whole)))
    assert block_keys(tokens, whole[:known], salt=b"s", offset=lead) == whole
    if whole:
        others = [1 + token for token in tokens]
        end = len(whole) * BLOCK - lead
        assert block_keys([*tokens[:end], *others[end:]], salt=b"s", offset=lead)[: len(whole)] == whole
        assert not set(whole) & set(block_keys(others, salt=b"s", offset=lead))


def test_blocks_that_are_kept_are_never_handed_out():
    blocks = BlockAllocator(6, reserved=2)
    assert (blocks.used, blocks.available) == (0, 3)
    assert blocks.take(3) == [3, 4, 5]
    blocks.release([5, 4])
    assert blocks.forget() == 4
    blocks.release([3])
    assert blocks.forget() == 3


def test_salts_that_begin_alike_share_nothing():
    tokens = list(range(BLOCK))
    assert block_keys(tokens, salt=b"x" * 80) != block_keys(tokens, salt=b"x" * 81)


def test_the_lowest_free_blocks_come_first_and_none_is_taken_in_vain():
    blocks = BlockAllocator(6)
    assert blocks.take(3) == [1, 2, 3]
    blocks.release([2])
    assert blocks.take(2) == [2, 4]
    assert blocks.take(2) is None
    assert (blocks.used, blocks.available) == (4, 1)
    assert blocks.take(0) == []


def test_what_was_given_back_longest_ago_is_forgotten_first_and_a_sequences_end_before_its_beginning():
    blocks = BlockAllocator(5)
    keys = [bytes([at]) for at in range(4)]
    first, second = blocks.take(2), blocks.take(2)
    for block, key in zip(first + second, keys, strict=True):
        blocks.publish(block, key)
    blocks.release(second)
    blocks.release(first)
    assert (blocks.used, blocks.idle) == (0, 4)
    assert blocks.take(1) == [second[1]]
    assert blocks.take(1) == [second[0]]
    assert blocks.share(keys[:2]) == first
    assert blocks.share(keys[2:]) == []


def test_a_key_is_one_blocks_and_a_block_has_one_key():
    blocks = BlockAllocator(4)
    a, b, _ = blocks.take(3)
    blocks.publish(a, b"k")
    blocks.publish(b, b"k")
    blocks.publish(a, b"other")
    assert blocks.share([b"k"]) == [a]
    assert blocks.share([b"other"]) == []
    blocks.release([b])
    assert (blocks.idle, blocks.available) == (0, 1)


def test_without_sharing_nothing_is_found_or_kept():
    blocks = BlockAllocator(4, sharing=False)
    taken = blocks.take(2)
    blocks.publish(taken[0], b"k")
    assert blocks.share([b"k"]) == []
    blocks.release(taken)
    assert (blocks.idle, blocks.available) == (0, 3)


def test_idle_blocks_serve_where_there_is_no_more_memory():
    """A free block that cannot be backed is worth less than an idle one that is."""
    asked = []

    def back(wanted):
        asked.append(wanted)
        return 3

    blocks = BlockAllocator(10, commit=back)
    taken = blocks.take(2)
    assert (taken, asked, blocks.committed) == ([1, 2], [2], 3)
    assert blocks.take(1) is None
    blocks.publish(1, b"k")
    blocks.release([1])
    assert blocks.take(1) == [1]
    assert blocks.share([b"k"]) == []


@pytest.mark.parametrize("wanted", [2, 3])
def test_nothing_changes_where_not_all_can_be_backed(wanted):
    blocks = BlockAllocator(10, commit=lambda _: 2)
    assert blocks.take(wanted) is None
    assert (blocks.used, blocks.available) == (0, 9)
    assert blocks.take(1) == [1]


class Machine(RuleBasedStateMachine):
    """Users that take, share, publish and give back, while memory comes and goes."""

    @initialize(count=st.integers(2, 24), sharing=st.booleans(), limit=st.integers(0, 24))
    def begin(self, count, sharing, limit):
        self.limit = limit
        self.held = []  # lists of blocks, each a user's
        self.key_of = {}  # what may be found, and where
        self.sharing = sharing
        self.blocks = BlockAllocator(count, commit=lambda wanted: self.limit, sharing=sharing)

    def users(self, block):
        return sum(held.count(block) for held in self.held)

    @rule(count=st.integers(0, 6))
    def take(self, count):
        used, available, idle = self.blocks.used, self.blocks.available, self.blocks.idle
        before = {block for block in range(self.blocks.count) if self.users(block)}
        taken = self.blocks.take(count)
        if taken is None:
            # What lies idle may have been forgotten on the way.
            assert (self.blocks.used, self.blocks.available) == (used, available)
            assert count > min(available, max(self.limit, self.blocks.committed) - 1 - used)
        else:
            assert len(set(taken)) == len(taken) == count
            assert not before & set(taken)
            assert NULL_BLOCK not in taken
            assert all(block < self.blocks.committed for block in taken)
            self.held.append(taken)
        assert self.blocks.idle <= idle

    @rule(data=st.data())
    def share(self, data):
        keys = data.draw(st.lists(st.sampled_from([bytes([at]) for at in range(8)]), max_size=4, unique=True))
        found = self.blocks.share(keys)
        assert all(self.key_of[block] == key for block, key in zip(found, keys, strict=False))
        self.held.append(found)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), key=st.integers(0, 7))
    def publish(self, data, key):
        block = data.draw(st.sampled_from(sorted({block for held in self.held for block in held})))
        self.blocks.publish(block, bytes([key]))
        found = self.blocks.share([bytes([key])])
        if found == [block]:
            self.key_of[block] = bytes([key])
        assert bool(found) == self.sharing or block in self.key_of
        self.blocks.release(found)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        self.blocks.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(limit=st.integers(0, 24))
    def memory(self, limit):
        self.limit = limit

    @rule()
    def shrink(self):
        needed = self.blocks.forget()
        assert needed == max((block for held in self.held for block in held), default=NULL_BLOCK) + 1
        self.blocks.uncommit(needed)
        assert (self.blocks.idle, self.blocks.committed <= needed) == (0, True)

    @invariant()
    def all_are_accounted_for(self):
        used = {block for held in self.held for block in held}
        assert self.blocks.used == len(used)
        assert self.blocks.used + self.blocks.available == self.blocks.count - 1
        assert used <= set(range(NULL_BLOCK + 1, max(NULL_BLOCK + 1, self.blocks.committed)))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
