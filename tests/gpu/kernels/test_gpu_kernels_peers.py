"""Exchanges between GPUs, as two ranks on one GPU: each on a stream of its own, with a buffer of its own."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from warpbus.kernels.ops.peers import MOST_BYTES, buffer_bytes, new_epochs, peer_gather, peer_sum

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Ranks:
    """Two ranks. What a call allocates or loads on first use is so before they wait for each other."""

    def __init__(self) -> None:
        self.memory = [torch.zeros(buffer_bytes(2), dtype=torch.uint8, device=DEVICE) for _ in range(2)]
        self.buffers = torch.tensor([memory.data_ptr() for memory in self.memory], device=DEVICE)
        self.epochs = [new_epochs(DEVICE) for _ in range(2)]
        self.streams = [torch.cuda.Stream(DEVICE) for _ in range(2)]
        self._alone = torch.zeros(buffer_bytes(1), dtype=torch.uint8, device=DEVICE)

    def sum(self, parts: list[Tensor], residual: Tensor | None) -> list[Tensor]:
        return self._run(parts, lambda part, *place: peer_sum(part, residual, *place))

    def gather(self, parts: list[Tensor]) -> list[Tensor]:
        return self._run(parts, peer_gather)

    def _run(self, parts, exchange) -> list[Tensor]:
        alone = torch.tensor([self._alone.data_ptr()], device=DEVICE)
        results = []
        torch.cuda.synchronize()
        for stream, part in zip(self.streams, parts, strict=True):
            with torch.cuda.stream(stream):
                room = part.new_empty(2, *part.shape)
                exchange(part, alone, new_epochs(DEVICE), 0)
                del room
        torch.cuda.synchronize()
        for rank, (stream, part) in enumerate(zip(self.streams, parts, strict=True)):
            with torch.cuda.stream(stream):
                results.append(exchange(part, self.buffers, self.epochs[rank], rank))
        torch.cuda.synchronize()
        return results


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(dtype: torch.dtype) -> None:
    ranks = Ranks()
    generator = torch.Generator(DEVICE).manual_seed(1)
    for elements in (8, 4096, 20_000, MOST_BYTES // 4, 24, 4096):
        first, second, residual = torch.randn(3, elements, device=DEVICE, generator=generator).to(dtype)
        for added in (None, residual):
            totals = ranks.sum([first, second], added)
            expected = first.double() + second.double() + (0 if added is None else added.double())
            assert torch.equal(totals[0], totals[1])
            torch.testing.assert_close(totals[0].double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.uint8])
def test_gathered(dtype: torch.dtype) -> None:
    ranks = Ranks()
    for shape in ((16,), (3, 4096), (1, 37888)):
        parts = [torch.randint(0, 100, shape, device=DEVICE).to(dtype) for _ in range(2)]
        for gathered in ranks.gather(parts):
            assert torch.equal(gathered, torch.stack(parts))


ALONE = """
import torch
from warpbus.kernels.ops.peers import buffer_bytes, new_epochs, peer_sum
memory = [torch.zeros(buffer_bytes(2), dtype=torch.uint8, device="cuda") for _ in range(2)]
buffers = torch.tensor([each.data_ptr() for each in memory], device="cuda")
missing = torch.zeros(1, dtype=torch.int32, pin_memory=True)
peer_sum(torch.ones(4096, device="cuda"), None, buffers, new_epochs(buffers.device), 0, missing, 0.2)
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    assert "launch failure" in str(error), error
    print("rank", missing.item() - 1)
else:
    print("went on")
"""


def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    """In a process of its own: the GPU is of no more use to it."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "rank 1", done.stderr
