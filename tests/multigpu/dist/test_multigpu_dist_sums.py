"""Sums of several GPUs: the same bits on all, of the size of a token and of a prompt, also from a CUDA graph."""

import pytest
import torch
from torch import Tensor

from warpbus.dist import Group, Send, launch

pytestmark = pytest.mark.multigpu

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Rows of 4096: one token, some that fill several blocks, the largest that goes through the GPUs' memory, a prompt; and
# sizes that are no whole number of blocks, or of 16 bytes.
SHAPES = ((1, 4096), (5, 4096), (64, 4096), (1000, 4096), (1, 8), (3, 40), (1, 13))


def devices(count: int) -> list[torch.device]:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    return [torch.device("cuda", index) for index in range(count)]


def leaf(rank: int, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def job(group: Group, send: Send) -> None:
    group = group.linked()
    assert "GPUs: " in group.describe()
    for seed, (shape, dtype) in enumerate((shape, dtype) for shape in SHAPES for dtype in DTYPES):
        for again in range(3):  # the buffers are used in turns
            parts = [leaf(rank, shape, 10 * seed + again, dtype) for rank in range(group.world + 1)]
            residual = parts[-1].to(group.device) if again else None
            total = group.all_reduce(parts[group.rank].to(group.device), residual)
            exact = torch.stack(parts if again else parts[:-1]).double().sum(0)
            # NCCL rounds each of its sums.
            allowed = (group.world + 1) * torch.finfo(dtype).eps * 4
            assert (total.cpu().double() - exact).abs().max() <= allowed
            everyones = group.all_gather(total)
            assert all(torch.equal(other, total) for other in everyones)
    chosen = torch.full((5,), group.rank + 3, device=group.device)
    assert group.broadcast(chosen).tolist() == [3] * 5
    send(group.describe())


@pytest.mark.parametrize("count", [2, 3, 4])
def test_sums_are_right_and_the_same_on_all(count: int) -> None:
    said: list[object] = []
    launch(job, (), devices=devices(count), receive=said.append)
    assert len(said) == count
    assert len(set(said)) == 1


def captured(group: Group, send: Send, rows: int) -> None:
    group = group.linked()
    x = torch.empty(rows, 4096, dtype=torch.bfloat16, device=group.device)
    chosen = torch.empty(4, dtype=torch.int64, device=group.device)

    def step() -> tuple[Tensor, Tensor]:
        first = group.all_reduce(x * 2, x)
        second = group.all_reduce(first * 0.25, None)
        return second, group.all_gather(second[:, :8])

    x.normal_()
    step()  # what is compiled or connected on first use
    group.broadcast(chosen)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        total, some = step()
        group.broadcast(chosen)
    for seed in range(20):
        x.copy_(leaf(7, tuple(x.shape), seed, x.dtype))
        chosen.fill_(group.rank + seed)
        graph.replay()
        if seed % 5 == 0:  # eager ones in between
            assert torch.equal(step()[0], total)
        first = x.float() * (2 * group.world + 1)
        expected = first.to(x.dtype).float() * 0.25 * group.world
        torch.testing.assert_close(total.float(), expected, rtol=0.03, atol=0.01)
        assert all(torch.equal(other, total) for other in group.all_gather(total))
        assert torch.equal(some[group.rank], total[:, :8])
        assert chosen.tolist() == [seed] * 4
    send("done")


@pytest.mark.parametrize(("count", "rows"), [(2, 1), (2, 200), (4, 1), (4, 64), (4, 200)])
def test_a_graph_of_sums(count: int, rows: int) -> None:
    said: list[object] = []
    launch(captured, (rows,), devices=devices(count), receive=said.append)
    assert said == ["done"] * count


def silent(group: Group, send: Send) -> None:
    """Sizes in any order: a block that sits out some rounds keeps step with its namesakes."""
    group = group.linked()
    generator = torch.Generator().manual_seed(1)
    for turn in range(300):
        rows = int(torch.randint(1, 64, (1,), generator=generator))
        x = torch.full((rows, 4096), float(group.rank + turn % 7), dtype=torch.float16, device=group.device)
        expected = sum(rank + turn % 7 for rank in range(group.world))
        total = group.all_reduce(x)
        assert bool((total == expected).all()), turn
    send("done")


@pytest.mark.parametrize("count", [2, 4])
def test_sizes_in_any_order(count: int) -> None:
    said: list[object] = []
    launch(silent, (), devices=devices(count), receive=said.append)
    assert said == ["done"] * count
