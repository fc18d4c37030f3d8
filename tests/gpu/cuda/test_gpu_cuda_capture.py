"""Graphs keep the workspace that their products were captured with, whatever PyTorch frees in between."""

import gc

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.cuda.capture import GraphMemory, capture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = torch.device("cuda", 0)
JUNK = 7.0


# Of some of ChatGLM2-6B's matrices; cuBLAS leaves parts of their sums in its workspace.
SIZES = ((4096, 4096), (4608, 4096), (4096, 13696))


class Products:
    """Of all sizes, with 128 rows, with and without bias; as a graph."""

    def __init__(self, memory: GraphMemory | None = None) -> None:
        self.arguments = [(numbers(128, k), numbers(n, k), numbers(n)) for n, k in SIZES]
        memory = memory or GraphMemory(DEVICE)
        memory.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(memory.stream):
            self.expected = self.compute()
        torch.cuda.current_stream().wait_stream(memory.stream)
        with capture(memory) as self.graph:
            self.found = self.compute()

    def compute(self) -> list[Tensor]:
        return [F.linear(x, weight, added) for x, weight, bias in self.arguments for added in (None, bias)]

    def check(self) -> None:
        for y in self.found:
            y.fill_(torch.nan)
        self.graph.replay()
        for y, expected in zip(self.found, self.expected, strict=True):
            torch.testing.assert_close(y, expected)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float16)


def everything_else() -> list[Tensor]:
    """Tensors that take what PyTorch has free, and a good deal more."""
    gc.collect()
    torch.cuda.empty_cache()
    return [torch.full((1 << 22,), JUNK, device=DEVICE) for _ in range(16)]


def test_a_graph_outlives_the_workspaces_that_torch_frees() -> None:
    product = Products()
    torch._C._cuda_clearCublasWorkspaces()  # as torch.compile does before and after its own graphs
    others = everything_else()
    for _ in range(3):
        product.check()
    assert all(bool((other == JUNK).all()) for other in others)


def test_a_graph_outlives_others_that_share_its_memory() -> None:
    memory = GraphMemory(DEVICE)
    first, second = Products(memory), Products(memory)
    del second
    others = everything_else()
    third = Products(memory)
    # Results of graphs are of the memory that they share: nothing of it has become the third one's.
    for _ in range(3):
        third.check()
        first.check()
        for y, expected in zip(third.found, third.expected, strict=True):
            torch.testing.assert_close(y, expected)
    assert all(bool((other == JUNK).all()) for other in others)


def test_a_graph_outlives_others_with_their_own_memory() -> None:
    first = Products()
    for _ in range(40):  # more than PyTorch has streams
        Products().check()
    others = everything_else()
    first.check()
    assert all(bool((other == JUNK).all()) for other in others)


def test_memory_goes_with_the_last_graph() -> None:
    Products().check()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(DEVICE)
    for _ in range(3):
        Products().check()
        gc.collect()
        torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(DEVICE) <= before


def test_a_capture_that_failed_is_followed_by_others() -> None:
    with pytest.raises(RuntimeError, match="during capture"), capture():
        torch.ones(1, device=DEVICE).item()
    gc.collect()
    Products().check()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(DEVICE)
    torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(DEVICE) == before
    assert torch.rand(1, device=DEVICE).item() < 1
