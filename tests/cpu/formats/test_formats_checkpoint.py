"""`Checkpoint`: what a model directory may look like, what it must not, and how much memory reading takes."""

import json
import os
import pickle
import random
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from warpbus.errors import CheckpointError, TensorError
from warpbus.formats import Checkpoint

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "a.bias": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    "b": torch.tensor([[1], [2]]),
}
SHARDS = (("a.weight", "b"), ("a.bias",))


def write_index(directory: Path, stem: str, weight_map: Any) -> None:
    (directory / f"{stem}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_model(directory: Path, layout: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "glm"}')
    if layout == "model.safetensors":
        save_file(TENSORS, directory / layout)
    elif layout == "pytorch_model.bin":
        torch.save(TENSORS, directory / layout)
    else:
        save, stem, suffix = {
            "safetensors shards": (save_file, "model.safetensors", "safetensors"),
            "bin shards": (torch.save, "pytorch_model.bin", "bin"),
        }[layout]
        weight_map = {}
        for number, names in enumerate(SHARDS, start=1):
            shard = f"part-{number:05}-of-00002.{suffix}"
            save({name: TENSORS[name] for name in names}, directory / shard)
            weight_map.update(dict.fromkeys(names, shard))
        write_index(directory, stem, weight_map)
    return directory


LAYOUTS = ("model.safetensors", "safetensors shards", "pytorch_model.bin", "bin shards")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_the_same(layout: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_model(tmp_path, layout))
    assert checkpoint.config == {"model_type": "glm"}
    assert checkpoint.directory == tmp_path
    assert checkpoint.names() == sorted(TENSORS)
    assert checkpoint.total_bytes == 3 * 4 * 4 + 2 * 2 + 2 * 8
    for name, tensor in TENSORS.items():
        assert name in checkpoint
        assert checkpoint.shape(name) == tensor.shape
        assert checkpoint.dtype(name) == tensor.dtype
        assert checkpoint.nbytes(name) == tensor.nbytes
        found = checkpoint.tensor(name, expected=tuple(tensor.shape))
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    assert "c" not in checkpoint


def test_safetensors_come_before_pickles(tmp_path: Path) -> None:
    write_model(tmp_path, "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"never looked at")
    assert "b" in Checkpoint(tmp_path)


def test_links_into_a_download_cache_are_followed(tmp_path: Path) -> None:
    cache = write_model(tmp_path / "blobs", "model.safetensors")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in cache.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert "b" in Checkpoint(snapshot)


def test_missing_and_misshapen_tensors(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_model(tmp_path, "model.safetensors"))
    for ask in (checkpoint.tensor, checkpoint.shape, checkpoint.dtype, checkpoint.nbytes):
        with pytest.raises(TensorError, match=r"tensor c\.weight is missing: check that the checkpoint is complete"):
            ask("c.weight")
    with pytest.raises(TensorError, match=r"tensor a\.weight has shape \[3, 4\], expected \[4, 3\]: check"):
        checkpoint.tensor("a.weight", expected=(4, 3))


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"glm-4: there is no such directory: expected .* or a name on a hub"):
        Checkpoint(tmp_path / "glm-4")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file: expected a directory"):
        Checkpoint(tmp_path / "file")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"config\.json is missing: expected a model directory"),
        (b"{'a': 1}", r"config\.json: is not JSON"),
        (b"\xff", r"config\.json: is not JSON"),
        (b"[" * 100_000, r"config\.json: is not JSON"),
        (b"[1]", r"config\.json: expected a JSON object, found list"),
    ],
)
def test_a_configuration_that_is_none(content: bytes | None, message: str, tmp_path: Path) -> None:
    write_model(tmp_path, "model.safetensors")
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


def test_load_json(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_model(tmp_path, "model.safetensors"))
    assert checkpoint.load_json("tokenizer_config.json") is None
    (tmp_path / "tokenizer_config.json").write_text('{"模板": "{{ x }}"}', encoding="utf-8")
    assert checkpoint.load_json("tokenizer_config.json") == {"模板": "{{ x }}"}


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no weights: expected model\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("layout", ["safetensors shards", "bin shards"])
def test_a_missing_shard_is_named(layout: str, tmp_path: Path) -> None:
    write_model(tmp_path, layout)
    shard = next(tmp_path.glob("part-00002*"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name}, named by .*index\.json, is missing: download it"):
        Checkpoint(tmp_path)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, "safetensors shards")
    shard = tmp_path / "part-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(shard))}: truncated"):
        Checkpoint(tmp_path)


def test_a_shard_without_a_tensor_of_the_index(tmp_path: Path) -> None:
    write_model(tmp_path, "safetensors shards")
    write_index(tmp_path, "model.safetensors", {"b": "part-00002-of-00002.safetensors"})
    shard = re.escape(str(tmp_path / "part-00002-of-00002.safetensors"))
    with pytest.raises(CheckpointError, match=rf"^{shard}: tensor b, which model\.safetensors\.index\.json puts there"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("escape", ["../model.safetensors", "/etc/passwd", "sub/x", "..\\x", "..", ".", "", "x\0y"])
def test_an_index_cannot_point_elsewhere(escape: str, tmp_path: Path) -> None:
    write_model(tmp_path, "model.safetensors")  # beside the directory: what the first escape points to
    inner = tmp_path / "model"
    inner.mkdir()
    (inner / "config.json").write_text("{}")
    write_index(inner, "model.safetensors", {"b": escape})
    with pytest.raises(CheckpointError, match="which is not a plain file name"):
        Checkpoint(inner)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 5}])
def test_an_index_without_a_map(weight_map: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_index(tmp_path, "model.safetensors", weight_map)
    with pytest.raises(CheckpointError, match=r"index\.json: expected an object weight_map of tensor names"):
        Checkpoint(tmp_path)


class Malicious:
    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.victim), "w")


@pytest.mark.parametrize("container", ["zip", "bare"])
def test_a_malicious_pickle_is_not_executed(container: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    victim = tmp_path / "executed"
    if container == "zip":
        torch.save({"a": torch.ones(2), "b": Malicious(victim)}, tmp_path / "pytorch_model.bin")
    else:
        (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Malicious(victim)}))
    with pytest.raises(CheckpointError, match=r"nothing in it was executed.*convert it to safetensors") as caught:
        Checkpoint(tmp_path)
    assert not victim.exists()
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(2)], "expected tensors by name, found list"),
        ({"epoch": 3}, "expected a dense tensor under 'epoch'"),
        ({"a": torch.ones(2).to_sparse()}, "expected a dense tensor under 'a'"),
        ({"a": torch.ones(2, device="meta")}, "expected a dense tensor under 'a'"),
    ],
)
def test_a_pickle_of_something_else(content: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


def test_a_pickle_from_before_pytorch_1_6(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"written by PyTorch before 1\.6.*convert it to safetensors"):
        Checkpoint(tmp_path)


def test_a_pickle_that_would_be_larger_in_memory_than_on_disk(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "pytorch_model.bin"
    torch.save({"wide": torch.zeros(1).expand(2**40)}, file)
    with pytest.raises(CheckpointError, match=r"tensor wide would have 4,398,046,511,104 bytes, the file has"):
        Checkpoint(tmp_path)
    torch.save(TENSORS, file)
    with zipfile.ZipFile(file) as plain, zipfile.ZipFile(tmp_path / "packed", "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in plain.namelist():
            packed.writestr(entry, plain.read(entry))
    (tmp_path / "packed").rename(file)
    with pytest.raises(CheckpointError, match=r"compressed entries"):
        Checkpoint(tmp_path)


def test_mutated_pickles_end_in_a_good_read_or_a_sentence(tmp_path: Path) -> None:
    write_model(tmp_path, "pytorch_model.bin")
    file = tmp_path / "pytorch_model.bin"
    raw = file.read_bytes()
    generator = random.Random(0)
    refused = 0
    for _ in range(100):
        damaged = bytearray(raw)
        for _ in range(generator.randint(1, 6)):
            damaged[generator.randrange(len(raw))] = generator.randrange(256)
        file.write_bytes(damaged[: generator.choice((len(raw), generator.randrange(len(raw))))])
        try:
            checkpoint = Checkpoint(tmp_path)
            assert all(checkpoint.tensor(name).shape == checkpoint.shape(name) for name in checkpoint.names())
        except CheckpointError:
            refused += 1
    assert refused > 40  # nearly all that were cut short


READ_ALL = """
import resource, sys
from warpbus.formats import Checkpoint
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
checkpoint = Checkpoint(sys.argv[1])
before, total = peak(), 0
for name in checkpoint.names():
    total += int(checkpoint.tensor(name).max())
print(peak() - before, total)
"""


@pytest.mark.parametrize(("layout", "count"), [("model.safetensors", 10), ("pytorch_model.bin", 5)])
def test_reading_takes_the_memory_of_one_tensor(layout: str, count: int, tmp_path: Path) -> None:
    largest = 60 * 2**20
    values = torch.randint(0, 2**31 - 1, (largest // 4,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    tensors: dict[str, Tensor] = {f"layers.{index}": values for index in range(count)}
    (tmp_path / "config.json").write_text("{}")
    if layout == "model.safetensors":
        with (tmp_path / layout).open("wb") as stream:
            described = {
                name: {"dtype": "I32", "shape": [largest // 4], "data_offsets": [i * largest, (i + 1) * largest]}
                for i, name in enumerate(tensors)
            }
            header = json.dumps(described).encode()
            stream.write(len(header).to_bytes(8, "little") + header)
            for tensor in tensors.values():
                stream.write(tensor.numpy().data)
    else:  # clones, because tensors of one storage would be saved once
        torch.save({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / layout)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", READ_ALL, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    (tmp_path / layout).unlink()  # pytest keeps the directories of its last runs
    grown, total = map(int, result.stdout.split())
    assert total == count * int(values.max())
    assert grown < 1.3 * largest + 30 * 2**20
