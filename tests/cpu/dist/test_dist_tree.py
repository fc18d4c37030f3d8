"""Sums over shares: the same bits whatever the number of processes, whatever the shares that have no data."""

import random
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from queue import Queue

import pytest
import torch
from torch import Tensor

from warpbus.dist import SHARES, Group, Send, TreeSum, launch
from warpbus.errors import UsageError

CPU = torch.device("cpu")
ALL = frozenset(range(SHARES))


def leaf(share: int, shape: tuple[int, ...]) -> Tensor:
    """Numbers of very different size, so that their sum depends on the order; -0.0 in front."""
    generator = torch.Generator().manual_seed(share)
    # From integers: the last digit of a power depends on how many threads share the elements.
    exponents, fractions, signs = (
        torch.randint(low, high, shape, generator=generator, dtype=torch.int32)
        for low, high in ((127 - 24, 127 + 24), (0, 2**23), (0, 2))
    )
    tensor = (exponents << 23 | fractions).view(torch.float32) * (1 - 2 * signs)
    tensor.view(-1)[:1] = -0.0
    return tensor


def expected(shares: range, present: frozenset[int], shape: tuple[int, ...]) -> Tensor | None:
    """The tree as its definition says."""
    if len(shares) == 1:
        return leaf(shares.start, shape) if shares.start in present else None
    middle = len(shares) // 2
    left, right = expected(shares[:middle], present, shape), expected(shares[middle:], present, shape)
    return right if left is None else left if right is None else left + right


def add_up(group: Group, present: frozenset[int], shape: tuple[int, ...]) -> Tensor:
    total = TreeSum(group, shape)
    for share in group.shares():
        if share in present:
            total.add(share, leaf(share, shape))
        elif share % 2:  # left out is as good as None
            total.add(share, None)
    return total.total()


def bits(tensor: Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.int32).tolist()


@dataclass(frozen=True)
class Threaded(Group):
    """A process that is a thread: worlds of eight, quickly."""

    mail: dict[tuple[int, int], "Queue[Tensor]"] = field(default_factory=dict)

    def exchange(self, sent: Iterable[tuple[int, Tensor]], received: Iterable[tuple[int, Tensor]]) -> None:
        for rank, tensor in sent:
            self.mail[self.rank, rank].put(tensor.clone())
        for rank, tensor in received:
            tensor.copy_(self.mail[rank, self.rank].get(timeout=90))


def in_threads(world: int, present: frozenset[int], shape: tuple[int, ...]) -> list[Tensor]:
    mail: dict[tuple[int, int], Queue[Tensor]] = {(a, b): Queue() for a in range(world) for b in range(world)}
    totals: dict[int, Tensor] = {}

    def work(rank: int) -> None:
        totals[rank] = add_up(Threaded(rank, world, CPU, mail=mail), present, shape)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(queue.empty() for queue in mail.values())
    return [totals[rank] for rank in range(world)]


@pytest.mark.parametrize("world", range(1, SHARES + 1))
def test_the_bits_are_those_of_the_tree(world: int) -> None:
    chosen = random.Random(world)
    patterns = [ALL, ALL - {1}, ALL - {7}, frozenset({0, 1, 2, 3}), frozenset({6})]
    patterns += [frozenset(chosen.sample(range(SHARES), chosen.randint(1, SHARES))) for _ in range(10)]
    for present in patterns:
        for shape in ((1,), (3, 3), (40, 7)):
            wanted = expected(range(SHARES), present, shape)
            assert wanted is not None
            for total in in_threads(world, present, shape):
                assert total.shape == shape
                assert bits(total) == bits(wanted)


@pytest.mark.parametrize("world", [1, 5])
def test_a_sum_of_nothing_is_zero(world: int) -> None:
    assert all(not total.any() for total in in_threads(world, frozenset(), (3, 3)))


def test_order_matters_here() -> None:
    """What this is for: added up in a row, the same tensors give other bits."""
    in_a_row = sum((leaf(share, (40, 7)) for share in range(SHARES)), start=torch.zeros(40, 7))
    wanted = expected(range(SHARES), ALL, (40, 7))
    assert wanted is not None
    assert bits(in_a_row) != bits(wanted)


def test_sums_grow_in_place() -> None:
    total = TreeSum(Group(0, 1, CPU), (2, 2))
    first = leaf(0, (2, 2))
    total.add(0, first)
    for share in range(1, SHARES):
        total.add(share, leaf(share, (2, 2)))
    assert total.total().data_ptr() == first.data_ptr()


def test_what_does_not_belong_is_refused() -> None:
    total = TreeSum(Group(1, 2, CPU), (2, 2))
    total.add(5, leaf(5, (2, 2)))
    for share in (3, 4, 5, 8):
        with pytest.raises(ValueError, match=f"share {share}: the next of this process"):
            total.add(share, leaf(share, (2, 2)))
    for wrong in (torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 4)[:, ::2]):
        with pytest.raises(ValueError, match=r"expected torch\.float32 \(2, 2\), contiguous"):
            total.add(6, wrong)


def test_more_processes_than_shares() -> None:
    with pytest.raises(UsageError, match="9 processes: the work has 8 shares: use at most 8 processes"):
        TreeSum(Group(0, 9, CPU), (2, 2))


DTYPES = [
    *(torch.uint8, torch.int8, torch.int32, torch.bool),
    *(torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32),
]


def job(group: Group, send: Send, patterns: list[frozenset[int]]) -> None:
    sums = [bits(add_up(group, present, (9, 5))) for present in patterns]
    gathered = []
    for dtype in DTYPES:
        lines = torch.arange(3 * SHARES).reshape(SHARES, 3)
        # One row a share, none for the first, and not contiguous.
        rows = [share for share in group.shares() if share > 0]
        mine = lines[rows].to(dtype).T.contiguous().T
        for lengths in (None, [len([s for s in group.shares(rank) if s > 0]) for rank in range(group.world)]):
            everything = group.gather(mine, lengths)
            assert everything.dtype == dtype
            gathered.append(everything.float().tolist())
            assert torch.equal(everything.float(), lines[1:].to(dtype).float())
            for several in ([lines], [lines, lines + 1, lines]):
                each = group.gather_each([whole[rows].to(dtype) for whole in several], lengths)
                assert [one.dtype for one in each] == [dtype] * len(several)
                for one, whole in zip(each, several, strict=True):
                    assert torch.equal(one.float(), whole[1:].to(dtype).float())
    send((sums, gathered))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_processes_sum_and_gather_what_one_does(world: int) -> None:
    patterns = [ALL, ALL - {1}, frozenset({5})]
    got: list[object] = []
    launch(job, (patterns,), devices=[CPU] * world, receive=got.append)
    alone: list[object] = []
    launch(job, (patterns,), devices=[CPU], receive=alone.append)
    assert got == alone * world
