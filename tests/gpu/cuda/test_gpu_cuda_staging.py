"""What goes through pinned buffers arrives as it was."""

import pytest
import torch
from torch import Tensor

from warpbus.cuda.staging import PinnedStaging

DEVICE = torch.device("cuda")
BUFFER = 2**23


def numbers(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randint(-100, 100, shape).to(dtype)


@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (5,), (BUFFER // 2,), (BUFFER // 2 + 1,), (0, 7), (3000, 5001), (7, 1, 3), (2, BUFFER)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint8])
def test_there_and_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    staging, source = PinnedStaging(DEVICE), numbers(*shape, dtype=dtype)
    target = torch.full(shape, 77, dtype=dtype, device=DEVICE)
    staging.put(target, source)
    assert torch.equal(target.cpu(), source)
    back = staging.get(target)
    assert (back.device.type, back.dtype) == ("cpu", dtype)
    assert torch.equal(back, source)


def test_strides_and_dtypes_are_those_of_the_tensors() -> None:
    staging, source = PinnedStaging(DEVICE), numbers(4000, 3000)
    target = torch.zeros(4000, 5000, dtype=torch.bfloat16, device=DEVICE)
    staging.put(target[:, 100:2100], source[:, 7:2007])
    assert torch.equal(target[:, 100:2100].cpu(), source[:, 7:2007].bfloat16())
    assert not target[:, :100].any()
    assert not target[:, 2100:].any()
    assert torch.equal(staging.get(target[:, 100:2100]), source[:, 7:2007].bfloat16())
    assert torch.equal(staging.get(target.T), target.T.cpu())


def test_a_source_may_change_once_put_has_returned() -> None:
    staging, source = PinnedStaging(DEVICE), numbers(6 * BUFFER, dtype=torch.uint8)
    expected, target = source.clone(), torch.zeros(6 * BUFFER, dtype=torch.uint8, device=DEVICE)
    torch.cuda._sleep(20_000_000)  # the copies wait for it
    staging.put(target, source)
    source.zero_()
    assert torch.equal(target.cpu(), expected)


def test_copies_are_in_the_order_of_the_current_stream() -> None:
    staging, stream = PinnedStaging(DEVICE), torch.cuda.Stream(DEVICE)
    source, tensor = numbers(3 * BUFFER, dtype=torch.uint8), torch.zeros(3 * BUFFER, dtype=torch.uint8, device=DEVICE)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        staging.put(tensor, source)
        tensor += 1
        found = staging.get(tensor)
        tensor.zero_()
    assert torch.equal(found, source + 1)
