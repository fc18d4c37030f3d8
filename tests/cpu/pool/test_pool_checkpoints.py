"""Checkpoints that a machine offers: what is listed and opened, and what a lease's process loads of them."""

import os
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from warpbus.errors import CheckpointError, ProtocolError, StateError, StorageError, UsageError
from warpbus.pool.client.checkpoints import _Described, _groups
from warpbus.pool.daemon.checkpoint_files import CheckpointFiles, send_files
from warpbus.pool.protocol import process_messages
from warpbus.pool.tenant import checkpoints
from warpbus.pool.tenant.checkpoints import OfferedCheckpoints
from warpbus.pool.tenant.storages import Storages

MB = 1 << 20
TENSORS = {
    "big": torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)),  # 2 MiB, mapped
    "small": torch.arange(12.0).view(3, 4).bfloat16(),
    "flags": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with a checkpoint `toy` of two files."""
    (tmp_path / "toy").mkdir()
    save_file({"big": TENSORS["big"], "flags": TENSORS["flags"]}, tmp_path / "toy" / "model-1.safetensors")
    save_file({"small": TENSORS["small"], "empty": TENSORS["empty"]}, tmp_path / "toy" / "model-2.safetensors")
    return tmp_path


def files_of(root: Path) -> CheckpointFiles:
    return CheckpointFiles("mill", [root])


def received(root: Path, memory: int = 10 * MB, name: str = "toy") -> tuple[OfferedCheckpoints, Storages]:
    """The checkpoint as the process of a lease has it."""
    storages = Storages(torch.device("cpu"), memory)
    offered = OfferedCheckpoints(storages)
    receive(offered, root, name)
    return offered, storages


def receive(offered: OfferedCheckpoints, root: Path, name: str = "toy") -> tuple[int, int]:
    mine, other = process_messages.pair()
    with closing(mine), closing(other), files_of(root).opened(name) as files:
        send_files(mine, files)
        return offered.receive(name, len(files), other)


def bytes_of(storages: Storages, handle: int) -> bytes:
    return bytes(storages.read(handle, 0, storages.live[handle].nbytes))


def test_what_is_listed(root: Path) -> None:
    (root / "notes").mkdir()
    (root / "notes" / "readme.txt").write_text("no weights")
    (root / ".hidden").mkdir()
    save_file({"x": torch.ones(1)}, root / ".hidden" / "x.safetensors")
    (listed,) = files_of(root).listed()
    sizes = sum(each.stat().st_size for each in (root / "toy").iterdir())
    assert listed == {"host": "mill", "name": "toy", "files": 2, "nbytes": sizes}
    assert [each["name"] for each in files_of(root / "toy").listed()] == ["toy"]  # a checkpoint itself


@pytest.mark.parametrize("name", ["../toy", "toy/..", "toy/", "/etc", ".", "..", "", "toy\0", "Toy"])
def test_a_name_is_one_of_those_and_no_path(root: Path, name: str) -> None:
    with pytest.raises(UsageError, match="it offers toy"), files_of(root).opened(name):
        pass


def test_a_pipe_is_no_file(root: Path) -> None:
    os.mkfifo(root / "toy" / "pipe.safetensors")
    with files_of(root).opened("toy") as files:
        assert [name for name, _ in files] == ["model-1.safetensors", "model-2.safetensors"]


def test_an_unreadable_file(root: Path, monkeypatch) -> None:
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match="toy: cannot be read"), files_of(root).opened("toy"):
        pass


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        files_of(tmp_path / "none")


def test_descriptors_are_for_reading_and_are_closed(root: Path) -> None:
    with files_of(root).opened("toy") as files:
        _, descriptor = files[0]
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(descriptor, b"x")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_lease_loads_what_the_files_have(root: Path) -> None:
    offered, storages = received(root)
    described = {each[0]: each[1:] for each in offered.describe("toy", 0)}
    assert described == {n: [t.dtype, list(t.shape), t.nbytes] for n, t in TENSORS.items()}
    assert offered.describe("toy", len(TENSORS)) == []
    offered.load("toy", [[name, handle] for handle, name in enumerate(TENSORS)])
    for handle, tensor in enumerate(TENSORS.values()):
        assert bytes_of(storages, handle) == tensor.view(torch.uint8).numpy().tobytes()
    assert storages.used == sum(tensor.nbytes for tensor in TENSORS.values())
    for handle in range(len(TENSORS)):
        storages.free(handle)
    assert storages.used == 0


def private_bytes(path: Path) -> int | None:
    """Bytes of this process's maps of a file that it has written to; None if it has no map."""
    found, ours = None, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            ours = line.endswith(str(path))
        elif ours and first == "Private_Dirty:":
            found = (found or 0) + 1024 * int(line.split()[1])
    return found


def test_leases_share_the_pages_that_none_writes(root: Path) -> None:
    path = root / "toy" / "model-1.safetensors"
    before = path.read_bytes()
    (first, mine), (second, theirs) = received(root), received(root)
    first.load("toy", [["big", 1]])
    second.load("toy", [["big", 1]])
    assert mine.used == theirs.used == TENSORS["big"].nbytes  # both are charged with all of it
    assert private_bytes(path) == 0
    mine.raw(1)[:4] = 0
    assert 0 < (private_bytes(path) or 0) < TENSORS["big"].nbytes
    assert bytes_of(mine, 1)[:4] == bytes(4)
    assert bytes_of(theirs, 1) == TENSORS["big"].numpy().tobytes()
    assert path.read_bytes() == before


def test_tensors_outlive_the_checkpoint_and_its_file(root: Path) -> None:
    offered, storages = received(root)
    offered.load("toy", [["big", 1]])
    (root / "toy" / "model-1.safetensors").unlink()
    for number in range(checkpoints.MOST_CHECKPOINTS):
        (root / f"c{number}").mkdir()
        save_file({"x": torch.ones(1)}, root / f"c{number}" / "x.safetensors")
        receive(offered, root, f"c{number}")
    with pytest.raises(StateError, match="not open"):
        offered.describe("toy", 0)
    assert bytes_of(storages, 1) == TENSORS["big"].numpy().tobytes()


def test_more_than_the_quota_loads_nothing(root: Path) -> None:
    offered, storages = received(root, memory=TENSORS["big"].nbytes + 10)
    with pytest.raises(torch.OutOfMemoryError):
        offered.load("toy", [["big", 1], ["small", 2]])
    assert (storages.used, storages.live) == (0, {})
    offered.load("toy", [["big", 1]])


def test_a_question_that_is_asked_again_changes_nothing(root: Path) -> None:
    offered, storages = received(root)
    offered.load("toy", [["big", 1], ["small", 2]])
    mine = storages.live[1]
    offered.load("toy", [["big", 1], ["small", 2]])
    assert storages.live[1] is mine
    assert storages.used == TENSORS["big"].nbytes + TENSORS["small"].nbytes
    with pytest.raises(ProtocolError, match="in use"):
        offered.load("toy", [["big", 2]])


@pytest.mark.parametrize("wanted", [[["none", 1]], [["big"]], [["big", "1"]], [[1, "big"]], [None], [["big", -1]]])
def test_questions_that_are_none(root: Path, wanted: list) -> None:
    offered, storages = received(root)
    with pytest.raises(ProtocolError):
        offered.load("toy", wanted)
    assert storages.used == 0


def test_a_file_that_shrinks_ends_no_process(root: Path) -> None:
    offered, storages = received(root)
    os.truncate(root / "toy" / "model-1.safetensors", 5000)
    with pytest.raises(CheckpointError, match="has changed"):
        offered.load("toy", [["small", 1], ["big", 2]])
    assert (storages.used, storages.live) == (0, {})


def test_a_tensor_at_an_odd_place_is_copied(tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    path, data = tmp_path / "odd" / "x.safetensors", os.urandom(2 * MB)
    header = (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[524288],"data_offsets":[1,'
    )
    header += str(1 + len(data)).encode() + b"]}}"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\1" + data)
    offered, storages = received(tmp_path, name="odd")
    offered.load("odd", [["b", 1]])
    assert bytes_of(storages, 1) == data
    assert storages.raw(1).data_ptr() % 4 == 0


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "truncated"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "not a safetensors file"),
        ((100).to_bytes(8, "little") + b"{}", "truncated"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        (
            (61).to_bytes(8, "little") + b'{"x":{"dtype":"F32","shape":[99],"data_offsets":[0,396],"a":1}}'[:61],
            "damaged",
        ),
    ],
)
def test_damaged_files(root: Path, content: bytes, error: str) -> None:
    (root / "toy" / "model-3.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=error):
        received(root)


def test_a_tensor_in_two_files(root: Path) -> None:
    save_file({"big": torch.ones(1)}, root / "toy" / "model-3.safetensors")
    with pytest.raises(CheckpointError, match="'big' is in another file"):
        received(root)


def test_files_that_do_not_come(root: Path) -> None:
    offered = OfferedCheckpoints(Storages(torch.device("cpu"), MB))
    mine, other = process_messages.pair()
    with closing(other):
        mine.send(b"without a descriptor")
        mine.close()
        with pytest.raises(ProtocolError, match="no file"):
            offered.receive("toy", 1, other)
        with pytest.raises(ProtocolError):
            offered.receive("toy", 1, other)


def test_a_failed_offer_leaves_no_descriptors(root: Path) -> None:
    (root / "toy" / "model-3.safetensors").write_bytes(b"")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(CheckpointError):
            received(root)
    assert len(os.listdir("/proc/self/fd")) == before


def test_tensors_are_asked_for_in_groups() -> None:
    sizes = [100 * MB, 100 * MB, 100 * MB, 400 * MB, 1] + [0] * 300
    described = [_Described(str(n), torch.uint8, (size,), size) for n, size in enumerate(sizes)]
    groups = list(_groups(described))
    assert [each for group in groups for each in group] == described
    assert [len(group) for group in groups] == [2, 1, 1, 256, 45]
