"""`CheckpointWriter`: a model directory is there complete or not at all."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from warpbus.errors import CheckpointError, StorageError, TensorError, UsageError
from warpbus.formats import Checkpoint, CheckpointWriter


def write_model(directory: Path, value: float = 1.0, *, overwrite: bool = False) -> Path:
    with CheckpointWriter(directory, overwrite=overwrite) as writer:
        writer.add("x", torch.full((100,), value))
        writer.write_json("config.json", {"value": value})
        return writer.finish()


def value_of(directory: Path) -> float:
    checkpoint = Checkpoint(directory)
    assert checkpoint.config == {"value": float(checkpoint.tensor("x")[0])}
    return float(checkpoint.tensor("x")[0])


def partial(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.partial-{os.getpid()}")


def test_one_shard(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(b"\x00\x01")
    tensors = {"a": torch.arange(6).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor(True)}
    with CheckpointWriter(tmp_path / "deep" / "model") as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.copy_file(tokenizer)
        writer.copy_file(tokenizer, "folder/other.model")
        writer.write_json("config.json", {"模型": "glm"})
        directory = writer.finish()
    assert directory == tmp_path / "deep" / "model"
    names = {"config.json", "model.safetensors", "tokenizer.model", "folder"}
    assert {file.name for file in directory.iterdir()} == names
    assert (directory / "folder" / "other.model").read_bytes() == b"\x00\x01"
    assert list(directory.parent.iterdir()) == [directory]
    assert (directory / "tokenizer.model").read_bytes() == b"\x00\x01"
    assert "模型" in (directory / "config.json").read_text(encoding="utf-8")
    read = load_file(directory / "model.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_shards_and_their_index(tmp_path: Path) -> None:
    tensors = {f"t{index}": torch.full((250,), float(index)) for index in range(5)}  # 1000 bytes each
    tensors["large"] = torch.zeros(1000)  # larger than a shard may be: it gets one of its own
    with CheckpointWriter(tmp_path / "model", shard_bytes=2500) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.write_json("config.json", {})
        directory = writer.finish()
    shards = {
        "model-00001-of-00004.safetensors": {"t0", "t1"},
        "model-00002-of-00004.safetensors": {"t2", "t3"},
        "model-00003-of-00004.safetensors": {"t4"},
        "model-00004-of-00004.safetensors": {"large"},
    }
    assert {name: set(load_file(directory / name)) for name in shards} == shards
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 9000}
    assert index["weight_map"] == {name: shard for shard, names in shards.items() for name in names}
    assert {file.name for file in directory.iterdir()} == {*shards, "config.json", "model.safetensors.index.json"}
    checkpoint = Checkpoint(directory)
    assert checkpoint.total_bytes == 9000
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in tensors.items())


def test_a_shard_is_on_disk_as_soon_as_it_is_full(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "model", shard_bytes=1000) as writer:
        for index in range(4):
            writer.add(f"t{index}", torch.zeros(250))
            assert len(list(partial(tmp_path / "model").iterdir())) == index


def slices() -> dict[str, Tensor]:
    base = torch.arange(10_000.0).reshape(100, 100)
    return {
        "row": base[3],
        "column": base[:, 3],
        "transposed": base.T,
        "again": base,
        "expanded": base[:1].expand(4, 100),
    }


def test_views_and_shared_memory(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "model") as writer:
        for name, tensor in slices().items():
            writer.add(name, tensor)
        writer.add("parameter", torch.nn.Parameter(torch.ones(3)))
        writer.finish()
    read = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(read.pop("parameter"), torch.ones(3))
    assert all(torch.equal(read[name], tensor) for name, tensor in slices().items())


def test_tensors_of_another_checkpoint_are_passed_on(tmp_path: Path) -> None:
    source = Checkpoint(write_model(tmp_path / "source", 7.0))
    with CheckpointWriter(tmp_path / "target") as writer:
        writer.add("x", source.tensor("x"))
        writer.write_json("config.json", source.config)
        writer.finish()
    assert value_of(tmp_path / "target") == 7.0


def test_a_model_can_be_overwritten_while_it_is_read(tmp_path: Path) -> None:
    source = Checkpoint(write_model(tmp_path / "model", 7.0))
    with CheckpointWriter(tmp_path / "model", overwrite=True) as writer:
        writer.add("x", source.tensor("x") + 1)
        writer.write_json("config.json", {"value": 8.0})
        writer.finish()
    assert value_of(tmp_path / "model") == 8.0


def test_what_is_there_is_not_overwritten_unasked(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    with pytest.raises(
        StorageError, match="model: exists and is not empty: name another directory, or pass --overwrite"
    ):
        CheckpointWriter(directory)
    assert value_of(directory) == 1.0


def test_overwriting_replaces_the_whole_directory(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    (directory / "stale.txt").write_text("")
    write_model(directory, 2.0, overwrite=True)
    assert value_of(directory) == 2.0
    assert {file.name for file in directory.iterdir()} == {"config.json", "model.safetensors"}
    assert list(tmp_path.iterdir()) == [directory]


def test_only_a_model_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("")
    with pytest.raises(StorageError, match=r"holds no model \(no config.json\), so it is not overwritten"):
        CheckpointWriter(tmp_path / "home", overwrite=True)
    with pytest.raises(StorageError, match="is a file"):
        CheckpointWriter(tmp_path / "home" / "thesis.txt", overwrite=True)
    with pytest.raises(StorageError, match=r"thesis\.txt/model: cannot be created below .*, which is a file"):
        CheckpointWriter(tmp_path / "home" / "thesis.txt" / "model")
    assert (tmp_path / "home" / "thesis.txt").exists()


def test_an_empty_directory_and_a_link_are_targets(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "disk")
    write_model(tmp_path / "model", 3.0)
    assert (tmp_path / "model").is_symlink()
    assert value_of(tmp_path / "disk") == 3.0


def interrupted(directory: Path, overwrite: bool) -> NoReturn:
    with CheckpointWriter(directory, shard_bytes=100, overwrite=overwrite) as writer:
        writer.add("x", torch.zeros(100))
        writer.add("y", torch.zeros(100))
        assert list(partial(directory).iterdir())
        raise KeyboardInterrupt


def test_leaving_by_an_exception_removes_everything(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "model", False)
    assert list(tmp_path.iterdir()) == []
    directory = write_model(tmp_path / "model")
    with pytest.raises(KeyboardInterrupt):
        interrupted(directory, True)
    assert value_of(directory) == 1.0
    assert list(tmp_path.iterdir()) == [directory]


def test_leaving_without_finish_removes_everything(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "model") as writer:
        writer.add("x", torch.zeros(3))
    assert list(tmp_path.iterdir()) == []


def run(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, str(directory)], capture_output=True, text=True, check=False)


def test_a_killed_process_leaves_the_old_model(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    code = """
import os, signal, sys, torch
from warpbus.formats import CheckpointWriter
with CheckpointWriter(sys.argv[1], shard_bytes=100, overwrite=True) as writer:
    writer.add("x", torch.zeros(100))
    writer.add("y", torch.zeros(100))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run(code, directory).returncode == -signal.SIGKILL
    assert value_of(directory) == 1.0


def test_a_limit_on_file_sizes_makes_writes_fail_and_leaves_nothing(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    code = """
import resource, sys, torch
from warpbus.errors import StorageError
from warpbus.formats import CheckpointWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with CheckpointWriter(sys.argv[1], overwrite=True) as writer:
        writer.add("x", torch.zeros(100_000))
        writer.finish()
except StorageError as error:
    print(error)
"""
    result = run(code, directory)
    assert result.stdout == f"{directory}/model.safetensors: cannot be written: File too large\n"
    assert value_of(directory) == 1.0
    assert list(tmp_path.iterdir()) == [directory]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
@pytest.mark.parametrize("filename", ["shard-00000.safetensors", "config.json", "tokenizer.model"])
def test_a_full_disk_is_reported_and_leaves_nothing(filename: str, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(bytes(10_000))
    writer = CheckpointWriter(tmp_path / "model", shard_bytes=100)
    writer.add("x", torch.zeros(100_000))
    (partial(tmp_path / "model") / filename).symlink_to("/dev/full")
    calls = {
        "config.json": lambda: writer.write_json(filename, {}),
        "tokenizer.model": lambda: writer.copy_file(tokenizer),
    }
    with pytest.raises(
        StorageError, match=r"model/.*: disk full: needs at least \d\.\d MB, \d+\.\d [GM]B free: make room or"
    ):
        calls.get(filename, writer.finish)()
    assert list(tmp_path.iterdir()) == [tokenizer]
    with pytest.raises(UsageError, match="this writer has finished or failed"):
        writer.add("y", torch.zeros(1))


def test_too_little_space_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"disk full: needs at least 1000000\.0 GB, .* free"):
        CheckpointWriter(tmp_path / "model", expected_bytes=10**15)
    assert list(tmp_path.iterdir()) == []
    with CheckpointWriter(tmp_path / "model", expected_bytes=400) as writer:
        writer.add("x", torch.zeros(100))
        assert writer.finish().is_dir()


def test_the_old_model_comes_back_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_model(tmp_path / "model")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self == partial(directory):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(StorageError, match="model: cannot be written: Input/output error"):
        write_model(directory, 2.0, overwrite=True)
    assert value_of(directory) == 1.0
    assert list(tmp_path.iterdir()) == [directory]


def test_a_directory_left_by_a_killed_run_is_named(tmp_path: Path) -> None:
    partial(tmp_path / "model").mkdir()
    with pytest.raises(StorageError, match=r"\.model\.partial-\d+: left over by a run that was killed, .* remove it"):
        CheckpointWriter(tmp_path / "model")


def test_wrong_calls_are_reported(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "model") as writer:
        with pytest.raises(UsageError, match="no tensor was added"):
            writer.finish()
        writer.add("x", torch.zeros(3))
        with pytest.raises(TensorError, match="tensor x is added twice"):
            writer.add("x", torch.zeros(3))
        with pytest.raises(TensorError, match=r"tensor z: safetensors has no type for torch\.complex64"):
            writer.add("z", torch.zeros(3, dtype=torch.complex64))
        with pytest.raises(CheckpointError, match=r"tokenizer\.model: there is no such file to copy"):
            writer.copy_file(tmp_path / "tokenizer.model")
        writer.finish()
        with pytest.raises(UsageError, match="this writer has finished or failed"):
            writer.add("y", torch.zeros(3))
    assert Path(tmp_path / "model").is_dir()
