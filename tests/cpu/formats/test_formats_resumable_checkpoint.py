"""`ResumableCheckpoint`: parts are kept whatever happens, and the model is there complete or not at all."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from warpbus.errors import CheckpointError, StorageError, TensorError, UsageError
from warpbus.formats import Checkpoint, FinishedParts, ResumableCheckpoint, discard_parts
from warpbus.formats import parts as part_files
from warpbus.formats.identity import differences

PARTS = ("layer-0", "layer-1", "layer-2")
CONFIG = {"model_type": "glm"}


def tensors(part: str) -> dict[str, Tensor]:
    seed = PARTS.index(part)
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{part}.w": torch.randn(20, 30, generator=generator),
        f"{part}.b": torch.full((7,), float(seed), dtype=torch.bfloat16),
    }


def grow(output: Path, *, overwrite: bool = False, files: tuple[tuple[str, Path | bytes], ...] = ()) -> list[str]:
    """What a driver does; gives the parts that it had to compute."""
    computed = []
    with ResumableCheckpoint(output, identity={"seed": 0}, overwrite=overwrite) as checkpoint:
        for part in PARTS:
            if checkpoint.facts(part) is None:
                checkpoint.commit(part, tensors(part), {"error": 0.1, "part": part})
                computed.append(part)
        checkpoint.finish(CONFIG, [("tokenizer.model", b"\0\1"), *files], PARTS)
    return computed


def stopped(output: Path, parts: tuple[str, ...] = PARTS, identity: Any = None) -> FinishedParts:
    """A run that got so far."""
    with ResumableCheckpoint(output, identity=identity or {"seed": 0}) as checkpoint:
        for part in parts:
            checkpoint.commit(part, tensors(part), {"error": 0.1, "part": part})
    return FinishedParts(output)


def contents(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()}


def test_parts_become_shards_in_the_order_that_finish_is_given(tmp_path: Path) -> None:
    licence = tmp_path / "MIT"
    licence.write_text("free")
    with ResumableCheckpoint(tmp_path / "deep" / "out", identity={}) as checkpoint:
        assert (checkpoint.found, checkpoint.found_parts) == ("nothing", 0)
        for part in PARTS:
            checkpoint.commit(part, tensors(part))
        order = ["layer-2", "layer-0", "layer-1"]
        output = checkpoint.finish(CONFIG, [("LICENSE", licence), ("report.json", b"{}")], order)
    assert output == tmp_path / "deep" / "out"
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    others = {"LICENSE": "free", "report.json": "{}"}
    assert {file.name for file in output.iterdir()} == {
        *shards,
        *others,
        "config.json",
        "model.safetensors.index.json",
    }
    assert all((output / name).read_text() == text for name, text in others.items())
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 3 * (20 * 30 * 4 + 7 * 2)}
    assert index["weight_map"]["layer-2.w"] == shards[0]
    model = Checkpoint(output)
    assert model.config == CONFIG
    for part in PARTS:
        for name, tensor in tensors(part).items():
            assert torch.equal(model.tensor(name), tensor)
    assert [path.name for path in output.parent.iterdir()] == ["out"]


def test_another_process_reads_parts_and_facts(tmp_path: Path) -> None:
    finished = stopped(tmp_path / "out", PARTS[:2])
    assert finished.parts() == ["layer-0", "layer-1"]
    assert finished.facts("layer-1") == {"error": 0.1, "part": "layer-1"}
    assert finished.facts("layer-2") is None
    read = finished.read("layer-1")
    assert read.keys() == tensors("layer-1").keys()
    assert all(torch.equal(read[name].read(), tensor) for name, tensor in tensors("layer-1").items())
    with pytest.raises(CheckpointError, match=r"layer-2\.safetensors: missing or damaged"):
        finished.read("layer-2")
    assert [path.name for path in tmp_path.iterdir()] == ["out.quantization"]
    assert json.loads((finished.directory / "run.json").read_text())["identity"] == {"seed": 0}


def test_a_run_goes_on(tmp_path: Path) -> None:
    grow(tmp_path / "whole")
    stopped(tmp_path / "out", PARTS[:2])
    with ResumableCheckpoint(tmp_path / "out", identity={"seed": 0}) as checkpoint:
        assert (checkpoint.found, checkpoint.found_parts) == ("finished parts", 2)
    assert grow(tmp_path / "out") == ["layer-2"]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
@pytest.mark.parametrize("damage", ["truncated", "a bit", "gone"])
def test_a_damaged_part_is_done_again(tmp_path: Path, suffix: str, damage: str) -> None:
    file = stopped(tmp_path / "out").directory / f"layer-1.{suffix}"
    content = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(content[:-7])
    elif suffix == "safetensors":
        content[-5] ^= 1
        file.write_bytes(content)
    else:
        file.write_bytes(content.replace(b"crc32", b"crc33"))
    grow(tmp_path / "whole")
    assert grow(tmp_path / "out") == ["layer-1"]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_what_another_run_kept_is_removed_only_by_a_restart(tmp_path: Path) -> None:
    stopped(tmp_path / "out", identity={"seed": 1})
    kept = FinishedParts(tmp_path / "out").parts()
    with pytest.raises(UsageError, match=r"finished parts of a run that differs: seed was 1 and is 0: .* restart=True"):
        ResumableCheckpoint(tmp_path / "out", identity={"seed": 0})
    assert FinishedParts(tmp_path / "out").parts() == kept
    assert len(kept) == 3
    with ResumableCheckpoint(tmp_path / "out", identity={"seed": 0}, restart=True) as checkpoint:
        assert (checkpoint.found, checkpoint.found_parts) == ("removed parts", 3)
        assert checkpoint.parts() == []
    assert [path.name for path in tmp_path.iterdir()] == ["out.quantization"]


def test_a_restart_removes_parts_of_the_same_identity_too(tmp_path: Path) -> None:
    stopped(tmp_path / "out", identity={"seed": 0})
    with ResumableCheckpoint(tmp_path / "out", identity={"seed": 0}, restart=True) as checkpoint:
        assert (checkpoint.found, checkpoint.parts()) == ("removed parts", [])


def test_a_run_that_finished_no_part_is_in_nobodys_way(tmp_path: Path) -> None:
    ResumableCheckpoint(tmp_path / "out", identity={"seed": 1}).close()
    with ResumableCheckpoint(tmp_path / "out", identity={"seed": 0}) as checkpoint:
        assert checkpoint.found == "nothing"


def test_what_differs_is_said_by_its_path() -> None:
    before = {"config.json": {"rope_theta": 1e4, "layers": 2}, "tokens": "a" * 64, "algorithm": "gptq"}
    after = {"config.json": {"rope_theta": 5e6, "layers": 2}, "tokens": "b" * 64, "algorithm": "rtn", "new": 1}
    assert differences(before, after) == [
        'algorithm was "gptq" and is "rtn"',
        "config.json: rope_theta was 10000.0 and is 5000000.0",
        "new was null and is 1",
        "tokens differ",
    ]
    assert differences(None, after) == ["its run.json is damaged"]
    many = differences({}, {f"key{number}": number for number in range(9)})
    assert (len(many), many[-1]) == (7, "and 3 more")


def test_parts_can_be_discarded_from_outside(tmp_path: Path) -> None:
    stopped(tmp_path / "out", identity={"seed": 0})
    with (
        ResumableCheckpoint(tmp_path / "out", identity={"seed": 0}),
        pytest.raises(StorageError, match="another process"),
    ):
        discard_parts(tmp_path / "out")
    discard_parts(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out.quantization").mkdir()  # no run.json: somebody else's
    discard_parts(tmp_path / "out")
    assert (tmp_path / "out.quantization").is_dir()


def test_a_part_can_be_replaced_and_all_can_be_discarded(tmp_path: Path) -> None:
    with ResumableCheckpoint(tmp_path / "out", identity={}) as checkpoint:
        for value in (1.0, 2.0):
            checkpoint.commit("a", {"x": torch.tensor([value])}, value)
            checkpoint.drain()
            assert checkpoint.facts("a") == value
            assert checkpoint.read("a")["x"].read().item() == value
        checkpoint.discard()
    assert list(tmp_path.iterdir()) == []


def test_what_is_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out.quantization").mkdir()
    (tmp_path / "out.quantization" / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"out\.quantization: is in the way of the finished parts"):
        ResumableCheckpoint(tmp_path / "out", identity={})
    assert [path.name for path in tmp_path.iterdir()] == ["out.quantization"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("mine")
    with pytest.raises(StorageError, match="thesis: exists and is not empty"):
        ResumableCheckpoint(tmp_path / "thesis", identity={})
    with pytest.raises(StorageError, match=r"holds no model \(no config.json\), so it is not overwritten"):
        ResumableCheckpoint(tmp_path / "thesis", identity={}, overwrite=True)


def test_a_model_that_appears_meanwhile_is_not_overwritten_and_nothing_is_lost(tmp_path: Path) -> None:
    with ResumableCheckpoint(tmp_path / "out", identity={"seed": 0}) as checkpoint:
        for part in PARTS:
            checkpoint.commit(part, tensors(part))
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "config.json").write_text("{}")
        with pytest.raises(StorageError, match="out: exists and is not empty"):
            checkpoint.finish(CONFIG, [], PARTS)
    assert FinishedParts(tmp_path / "out").parts() == list(PARTS)
    assert (tmp_path / "out" / "config.json").read_text() == "{}"


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        ResumableCheckpoint(tmp_path / "out", identity={}),
        pytest.raises(StorageError, match="out: another process is writing it: wait for it to end, or name another"),
    ):
        ResumableCheckpoint(tmp_path / "out", identity={})
    ResumableCheckpoint(tmp_path / "out", identity={}).close()


def test_too_little_space_counts_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"out: disk full: needs at least 1000000\.0 GB, .* free"):
        ResumableCheckpoint(tmp_path / "out", identity={}, expected_bytes=10**15)
    there = sum(file.stat().st_size for file in stopped(tmp_path / "out").directory.glob("*.safetensors"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
        ResumableCheckpoint(tmp_path / "out", identity={"seed": 0}, expected_bytes=there + 10).close()
        with pytest.raises(StorageError, match="disk full"):
            ResumableCheckpoint(tmp_path / "out", identity={"seed": 0}, expected_bytes=there + 11)


def test_at_most_two_parts_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, taken = threading.Event(), threading.Semaphore(0)
    write = part_files.write_file

    def slow(*arguments: Any, **options: Any) -> int | None:
        taken.release()
        assert go.wait(60)
        return write(*arguments, **options)

    monkeypatch.setattr(part_files, "write_file", slow)
    with ResumableCheckpoint(tmp_path / "out", identity={}) as checkpoint:
        checkpoint.commit("0", {"0": torch.zeros(1)})
        assert taken.acquire(timeout=60)
        checkpoint.commit("1", {"1": torch.zeros(1)})
        checkpoint.commit("2", {"2": torch.zeros(1)})
        assert checkpoint.facts("0") is None
        last = threading.Thread(target=checkpoint.commit, args=("3", {"3": torch.zeros(1)}))
        last.start()
        last.join(0.2)
        assert last.is_alive()
        go.set()
        last.join()
        checkpoint.drain()
        assert checkpoint.parts() == ["0", "1", "2", "3"]


@pytest.mark.parametrize("call", ["commit", "drain", "finish"])
def test_an_error_in_the_background_is_raised_and_parts_before_it_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write = part_files.write_file

    def failing(file: Path, held: dict[str, Tensor], *, checksum: bool) -> int | None:
        if "layer-1.w" in held:
            file.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return write(file, held, checksum=checksum)

    monkeypatch.setattr(part_files, "write_file", failing)
    with ResumableCheckpoint(tmp_path / "out", identity={"seed": 0}) as checkpoint:
        for part in PARTS[:2]:
            checkpoint.commit(part, tensors(part), {})
        checkpoint._queue.join()
        calls: dict[str, Callable[[], object]] = {
            "commit": lambda: checkpoint.commit("layer-2", tensors("layer-2")),
            "drain": checkpoint.drain,
            "finish": lambda: checkpoint.finish(CONFIG, [], PARTS),
        }
        kept = r"layer-1.*No space left on device.*; finished parts kept in .*out\.quantization: 1: run the same"
        with pytest.raises(StorageError, match=kept) as raised:
            calls[call]()
        assert "\n" not in str(raised.value)
    monkeypatch.undo()
    assert sorted(file.name for file in (tmp_path / "out.quantization").iterdir()) == [
        "layer-0.json",
        "layer-0.safetensors",
        "run.json",
    ]
    assert grow(tmp_path / "out") == ["layer-1", "layer-2"]


def test_a_limit_on_file_sizes(tmp_path: Path) -> None:
    code = """
import resource, sys, torch
from warpbus.errors import StorageError
from warpbus.formats import ResumableCheckpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with ResumableCheckpoint(sys.argv[1], identity={}) as checkpoint:
        checkpoint.commit("small", {"x": torch.zeros(10)})
        checkpoint.commit("large", {"y": torch.zeros(100_000)})
        checkpoint.finish({}, [], ["small", "large"])
except StorageError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    kept = tmp_path / "out.quantization"
    assert result.stdout == (
        f"{kept}/large.safetensors: cannot be written (File too large): free some space or choose another path; "
        f"finished parts kept in {kept}: 1: run the same command to resume\n"
    )
    assert FinishedParts(tmp_path / "out").parts() == ["small"]


def test_wrong_calls_are_reported(tmp_path: Path) -> None:
    with ResumableCheckpoint(tmp_path / "out", identity={}) as checkpoint:
        for name in ("", "a/b", "..", "run", ".hidden"):
            with pytest.raises(UsageError, match="expected letters, digits"):
                checkpoint.commit(name, {})
        with pytest.raises(TensorError, match=r"tensor z: safetensors has no type for torch\.complex64"):
            checkpoint.commit("a", {"z": torch.zeros(3, dtype=torch.complex64)})
        checkpoint.commit("a", {"x": torch.zeros(1)})
        with pytest.raises(UsageError, match=r"order names \['b'\], committed were \['a'\]"):
            checkpoint.finish({}, [], ["b"])
        for name in ("config.json", "../x", "/x", "a/b/c", ""):
            with pytest.raises(UsageError, match="expected names, or names in one folder, each once"):
                checkpoint.finish({}, [(name, b"")], ["a"])
        with pytest.raises(CheckpointError, match="there is no such file to copy"):
            checkpoint.finish({}, [("x", tmp_path / "x")], ["a"])
        checkpoint.commit("b", {"x": torch.zeros(1)})
        with pytest.raises(TensorError, match="tensor x is in two parts"):
            checkpoint.finish({}, [], ["a", "b"])
        checkpoint.commit("b", {"y": torch.zeros(1)})
        checkpoint.finish({}, [], ["a", "b"])
        with pytest.raises(UsageError, match="finished or closed"):
            checkpoint.commit("c", {})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill loses nothing that is in the system's buffers, so that need not reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


CHANGES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Do the work in a process that is killed before its `step`-th change of the file system; whether it was."""
    child = os.fork()
    if child == 0:
        try:
            left = step

            def count(event: str, arguments: tuple[Any, ...]) -> None:
                nonlocal left
                if event in CHANGES and not (event == "open" and arguments[1] in ("r", "rb")):
                    left -= 1
                    if left == 0:
                        os._exit(9)

            sys.addaudithook(count)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_before_any_change_of_the_disk(tmp_path: Path, overwrite: bool) -> None:
    """Exhaustive: each change is once the last one; then the same call goes on to the same model."""
    grow(tmp_path / "whole")
    expected, step = contents(tmp_path / "whole"), 0
    output = tmp_path / "run" / "out"
    while True:
        step += 1
        if overwrite:
            grow(output, files=(("old", b""),))
        if not killed_at(step, lambda: grow(output, overwrite=overwrite)):
            break
        if overwrite:
            old = contents(output) if output.exists() else contents(output.with_name(".out.quantization.replaced"))
            assert {**expected, "old": hashlib.sha256(b"").hexdigest()} == old or old == expected
        if overwrite or output.with_name("out.quantization").exists() or not output.exists():
            grow(output, overwrite=overwrite)
        assert contents(output) == expected
        # The process that was killed last had no time to tidy up.
        left = {path.name for path in output.parent.iterdir()}
        assert left <= {"out", ".out.quantization.lock", ".out.quantization.removed"}
        shutil.rmtree(output.parent)
    assert step > 50


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_kills_one_after_the_other(tmp_path: Path) -> None:
    """What one process has done is not undone by the next; each comes a little further."""
    grow(tmp_path / "whole")
    for step in (5, 9, 14, 20):
        output, kills = tmp_path / f"out-{step}", 0
        while not output.exists() and killed_at(step + kills, lambda output=output: grow(output)):
            kills += 1
        assert kills > 3
        assert contents(output) == contents(tmp_path / "whole")
