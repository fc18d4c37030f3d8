"""Quotas to the byte, views by geometry, poison, versions."""

import pytest
import torch

from warpbus.errors import ProtocolError
from warpbus.pool.protocol.failures import CallFailure, PoisonedError
from warpbus.pool.protocol.geometry import Geometry, contiguous
from warpbus.pool.tenant.storages import MAX_STORAGES, Storages

FAILURE = CallFailure("ValueError", "no", "aten::add", 3)


@pytest.fixture
def storages():
    return Storages(torch.device("cpu"), 1000)


def test_the_quota_is_exact(storages):
    storages.create(1, 600)
    storages.create(2, 400)
    assert storages.used == storages.peak == 1000
    with pytest.raises(torch.OutOfMemoryError, match="1 bytes do not fit: 1,000 of the lease's 1,000"):
        storages.create(3, 1)
    assert (storages.used, 3 in storages.live) == (1000, False)
    storages.create(3, 0)
    storages.free(1)
    assert (storages.used, storages.peak) == (400, 1000)
    with pytest.raises(torch.OutOfMemoryError):
        storages.create(4, 601)
    storages.create(4, 600)
    assert storages.sizes() == {2: 400, 3: 0, 4: 600}


def test_what_cannot_be_allocated_is_not_charged(storages, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "zeros", fails)
    with pytest.raises(RuntimeError):
        storages.create(1, 10)
    assert (storages.used, storages.sizes()) == (0, {})


def test_memory_is_zero(storages):
    for _ in range(20):
        storages.create(1, 1000)
        assert not any(storages.read(1, 0, 1000))
        storages.write(1, 0, b"\xff" * 1000)
        storages.free(1)


def test_bytes_go_in_and_out(storages):
    storages.create(1, 10)
    storages.write(1, 3, b"abc")
    assert bytes(storages.read(1, 2, 5)) == b"\0abc\0"
    assert [bytes(part) for part in storages.stream(1, 3, 3)] == [b"abc"]
    for offset, size in ((8, 3), (-1, 2), (11, 0)):
        with pytest.raises(ProtocolError, match="must be inside"):
            storages.read(1, offset, size)
    with pytest.raises(ProtocolError, match="must be inside"):
        storages.write(1, 8, b"abc")


def test_tensors_are_made_once_and_stay_inside(storages):
    storages.create(1, 48)
    geometry = Geometry(torch.float32, (3, 2), (4, 1), 1)
    tensor = storages.tensor(1, geometry)
    tensor.fill_(1)
    assert storages.tensor(1, Geometry(torch.float32, (3, 2), (4, 1), 1)) is tensor
    assert storages.tensor(1, contiguous(torch.float32, (12,))).tolist() == [0, 1, 1, 0] * 3
    with pytest.raises(ProtocolError, match="must end inside"):
        storages.tensor(1, Geometry(torch.float32, (3, 2), (4, 1), 3))
    assert len(storages.raw(1)) == 48


def test_a_result_is_adopted_if_there_is_room(storages):
    storages.adopt(1, torch.ones(250))
    assert storages.used == 1000
    with pytest.raises(torch.OutOfMemoryError):
        storages.adopt(2, torch.ones(1))
    assert storages.used == 1000
    assert storages.sizes() == {1: 1000}


def test_handles_are_not_chosen_twice_and_not_out_of_range(storages, monkeypatch):
    storages.create(1, 1)
    for wrong in (1, 2**63, -1):
        with pytest.raises(ProtocolError):
            storages.create(wrong, 1)
    monkeypatch.setattr("warpbus.pool.tenant.storages.MAX_STORAGES", 1)
    with pytest.raises(ProtocolError, match="at most 1"):
        storages.create(2, 0)
    assert MAX_STORAGES >= 1 << 20


def test_poison(storages):
    storages.create(1, 600)
    storages.poison(1, FAILURE)
    storages.poison(2, FAILURE)
    assert storages.used == 0
    for handle in (1, 2):
        with pytest.raises(PoisonedError, match="aten::add: no") as caught:
            storages.tensor(handle, contiguous(torch.uint8, (1,)))
        assert caught.value.failure == FAILURE
        storages.free(handle)
    assert storages.live == {}


def test_versions_are_never_given_twice(storages):
    storages.create(1, 4)
    storages.create(2, 4)
    seen = {storages.version(1), storages.version(2)}
    storages.write(1, 0, b"a")
    seen.add(storages.version(1))
    storages.written(2)
    seen.add(storages.version(2))
    storages.free(1)
    storages.create(1, 4)
    assert storages.version(1) > max(seen)
    assert len(seen) == 4
