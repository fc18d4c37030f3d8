"""A lease is written to a file and goes on from it; what is damaged ends in a sentence."""

import stat
from pathlib import Path

import pytest
import torch
from pool_migration_work import CUT_SHORT, QUOTA, WEIGHTS, contents, execute, lease
from safetensors import safe_open

from warpbus.errors import DeviceError, StorageError, WarpbusError
from warpbus.pool.protocol.failures import PoisonedError
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.suspension import look, resume, suspend

CPU = torch.device("cpu")
LARGE = 9 * 2**20 + 5  # more than two chunks


def worked(batches: int, weights: int = LARGE) -> Executor:
    executor = lease(CPU)
    for number in range(1, batches + 1):
        execute(executor, number, weights)
    return executor


def test_a_resumed_lease_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    path = tmp_path / "lease.safetensors"
    first = worked(5)
    before = contents(first)
    assert suspend(first, path) == path.stat().st_size
    assert contents(first) == before
    second = lease(CPU)
    resume(path, second)
    assert contents(second) == before
    assert second.storages.used == first.storages.used
    for number in range(6, 10):
        execute(second, number)
    assert contents(second) == contents(worked(9))
    with pytest.raises(PoisonedError):
        second.storages.read(CUT_SHORT, 0, 1)


def test_only_its_owner_can_read_the_file_and_it_is_a_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "lease.safetensors"
    executor = worked(2)
    suspend(executor, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    with safe_open(path, "pt") as file:
        assert file.get_tensor(f"storage.{WEIGHTS}").numpy().tobytes() == contents(executor)[WEIGHTS]


def test_a_file_can_be_looked_at_without_being_resumed(tmp_path: Path) -> None:
    path = tmp_path / "lease.safetensors"
    executor = worked(3)
    suspend(executor, path)
    found = look(path)
    assert (found.device, found.executed, found.used) == ("cpu", 3, executor.storages.used)


def test_a_write_that_fails_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lease.safetensors"
    executor = worked(2)
    suspend(executor, path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(executor.storages, "stream", full)
    with pytest.raises(StorageError, match="No space left"):
        suspend(executor, path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("at", [0, 5, 20, 3000, -1, -40, -500, -3000, -6000])
def test_a_damaged_file_gives_a_sentence_and_an_empty_executor(tmp_path: Path, at: int) -> None:
    path = tmp_path / "lease.safetensors"
    suspend(worked(3, 5000), path)
    data = bytearray(path.read_bytes())
    data[at] ^= 0x55
    path.write_bytes(data)
    executor = lease(CPU)
    with pytest.raises(WarpbusError) as caught:
        resume(path, executor)
    assert "\n" not in str(caught.value)
    assert executor.storages.used == 0


@pytest.mark.parametrize("size", [0, 7, 100, 2000, -1])
def test_a_truncated_file_gives_a_sentence(tmp_path: Path, size: int) -> None:
    path = tmp_path / "lease.safetensors"
    suspend(worked(2, 5000), path)
    data = path.read_bytes()
    path.write_bytes(data[:size])
    with pytest.raises(StorageError, match="cannot be resumed"):
        resume(path, lease(CPU))


def test_a_lease_that_does_not_fit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "lease.safetensors"
    executor = worked(2)
    suspend(executor, path)
    small = Executor(CPU, Quota(executor.storages.used - 1, 1.0))
    with pytest.raises(torch.OutOfMemoryError, match="lease more memory"):
        resume(path, small)
    assert small.storages.peak == 0


def test_a_file_that_is_not_there_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no suspended lease"):
        resume(tmp_path / "nothing", lease(CPU))
    other = lease(CPU)
    other.storages.device = torch.device("meta")
    suspend(other, tmp_path / "other")
    with pytest.raises(DeviceError, match="'meta' cannot be resumed on cpu"):
        resume(tmp_path / "other", Executor(CPU, QUOTA))
