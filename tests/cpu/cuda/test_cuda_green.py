"""Who gets which multiprocessors: H100's 132 in groups of 8, of which 4 are left over."""

from types import SimpleNamespace

import pytest
import torch

from warpbus.cuda import green
from warpbus.cuda.green import Groups, Resource
from warpbus.errors import DeviceError, UsageError


def groups():
    return Groups(132, [Resource(count=8, minimum=8, alignment=8) for _ in range(16)])


def count(taken):
    return sum(group.count for group in taken)


@pytest.mark.parametrize(
    ("share", "got"), [(0.25, 32), (0.75, 96), (0.5, 64), (0.01, 8), (0.1, 16), (1.0, 128), (0.97, 128)]
)
def test_shares_are_whole_groups(share, got):
    assert count(groups().take(share)) == got


def test_contexts_have_nothing_in_common():
    all_groups = groups()
    first, second = all_groups.take(0.25), all_groups.take(0.75)
    assert not {id(group) for group in first} & {id(group) for group in second}
    with pytest.raises(DeviceError, match=r"share 0\.1 is 2 groups of 8 multiprocessors, 0 of 16 are free"):
        all_groups.take(0.1)
    all_groups.give_back(first)
    assert count(all_groups.take(0.25)) == 32


@pytest.mark.parametrize("share", [0, -1, 1.5, float("nan")])
def test_no_share(share):
    with pytest.raises(UsageError, match="above 0 and at most 1"):
        groups().take(share)


def test_a_kernel_has_those_of_its_stream(monkeypatch):
    current, gpu = SimpleNamespace(cuda_stream=7), torch.device("cuda", 63)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    assert green.multiprocessors(gpu) == 132
    share = SimpleNamespace(multiprocessors=8)
    monkeypatch.setitem(green._of_streams, 7, share)
    assert green.multiprocessors(gpu) == 8
    assert green.current(gpu) is share
    current.cuda_stream = 9
    assert green.multiprocessors(gpu) == 132
    assert green.current(gpu) is None
