"""What a person sees who gives something wrong: one line that says what and where, a shell's exit code, no traceback,
and nothing half-written."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from warpbus.cli import main
from warpbus.demo import calibration_path, data_path, model_path


@pytest.fixture
def copy(tmp_path):
    """A copy of glm-poet to spoil; the weights are a link until they are replaced."""
    directory = tmp_path / "model"
    directory.mkdir()
    for file in model_path().iterdir():
        (directory / file.name).symlink_to(file)
    return directory


def run(capsys, monkeypatch, *arguments):
    """The exit code and what stood on stderr besides progress bars."""
    monkeypatch.setattr(sys, "argv", ["warpbus", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, captured.err
    return ended.value.code, lines[0]


def replace(path, content):
    path.unlink()
    path.write_bytes(content)


def edit_weights(directory, change):
    tensors = load_file(model_path() / "model.safetensors")
    change(tensors)
    (directory / "model.safetensors").unlink()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def quantize(directory, output, *more):
    return ("quantize", directory, output, "--algorithm", "rtn", "--device", "cpu", *more)


def test_missing_model(capsys, monkeypatch, tmp_path):
    code, line = run(capsys, monkeypatch, *quantize(tmp_path / "nowhere", tmp_path / "out"))
    assert code == 1
    assert "nowhere" in line
    assert "no such directory" in line


def test_truncated_weights(capsys, monkeypatch, copy, tmp_path):
    whole = (model_path() / "model.safetensors").read_bytes()
    replace(copy / "model.safetensors", whole[: len(whole) // 2])
    code, line = run(capsys, monkeypatch, *quantize(copy, tmp_path / "out"))
    assert code == 1
    assert "model.safetensors" in line
    assert "truncated" in line


def test_a_tensor_is_missing(capsys, monkeypatch, copy, tmp_path):
    edit_weights(copy, lambda tensors: tensors.pop("model.layers.3.mlp.down_proj.weight"))
    _, line = run(capsys, monkeypatch, *quantize(copy, tmp_path / "out"))
    assert "model.layers.3.mlp.down_proj.weight" in line
    assert "missing" in line


def test_a_tensor_has_the_wrong_shape(capsys, monkeypatch, copy, tmp_path):
    def shrink(tensors):
        tensors["model.layers.3.mlp.down_proj.weight"] = torch.zeros(384, 512, dtype=torch.bfloat16)

    edit_weights(copy, shrink)
    _, line = run(capsys, monkeypatch, *quantize(copy, tmp_path / "out"))
    assert "model.layers.3.mlp.down_proj.weight" in line
    assert "1024 columns" in line
    assert "[384, 512]" in line


def test_unknown_architecture(capsys, monkeypatch, copy, tmp_path):
    config = json.loads((copy / "config.json").read_text())
    replace(copy / "config.json", json.dumps(config | {"model_type": "mamba"}).encode())
    _, line = run(capsys, monkeypatch, *quantize(copy, tmp_path / "out"))
    assert "mamba" in line
    assert "glm4" in line


def test_unknown_scheme(capsys, monkeypatch, tmp_path):
    code, line = run(capsys, monkeypatch, *quantize("demo", tmp_path / "out", "--scheme", "int3"))
    assert code == 2
    assert "'int3'" in line
    assert "w4a16-g128" in line


def test_a_group_that_does_not_divide(capsys, monkeypatch, copy, tmp_path):
    """1072 columns are 33.5 groups of 32, the smallest."""
    config = json.loads((copy / "config.json").read_text())
    replace(copy / "config.json", json.dumps(config | {"intermediate_size": 1072}).encode())

    def widen(tensors):
        for name in [name for name in tensors if ".mlp." in name]:
            out, columns = tensors[name].shape
            shape = (2144, columns) if "gate_up" in name else (out, 1072)
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)

    edit_weights(copy, widen)
    code, line = run(capsys, monkeypatch, *quantize(copy, tmp_path / "out"))
    assert code == 2
    assert "1072 columns" in line
    assert "leave -g out" in line


def test_empty_calibration(capsys, monkeypatch, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    _, line = run(capsys, monkeypatch, "quantize", "demo", tmp_path / "out", "--calibration", tmp_path / "empty.jsonl")
    assert "empty.jsonl" in line
    assert not (tmp_path / "out").exists()


def test_a_malformed_line_is_named(capsys, monkeypatch, tmp_path):
    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "春眠不觉晓"}\n{"text": \n', encoding="utf-8")
    _, line = run(capsys, monkeypatch, "eval", "demo", "--data", data, "--no-speed")
    assert "texts.jsonl:2" in line


def test_a_prompt_longer_than_the_context(capsys, monkeypatch):
    code, line = run(capsys, monkeypatch, "chat", "demo", "--device", "cpu", "--prompt", "春" * 600)
    assert code == 1
    assert "512" in line
    assert "shorten" in line


def test_the_output_is_not_overwritten(capsys, monkeypatch, tmp_path):
    kept = tmp_path / "out" / "thesis.txt"
    kept.parent.mkdir()
    kept.write_text("three years of work")
    _, line = run(capsys, monkeypatch, *quantize("demo", tmp_path / "out"))
    assert "out" in line
    assert kept.read_text() == "three years of work"


def test_a_full_disk_leaves_no_half_model_behind(tmp_path):
    """A limit on the size of files stands for the disk: the write fails midway, as on a full one."""
    command = [sys.executable, "-m", "warpbus", *map(str, quantize("demo", tmp_path / "out"))]

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, 4_000_000))

    ran = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, env=os.environ, check=False)
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    assert "error: " in ran.stderr
    assert not (tmp_path / "out").exists()
    assert "out.quantization" in ran.stderr.replace("\n", "")  # what is finished is kept there
    assert subprocess.run(command, capture_output=True, env=os.environ, check=False).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_files_that_the_tests_use_are_the_packages_own():
    for path in (calibration_path(), data_path("validation.jsonl")):
        assert Path(path).is_relative_to(model_path().parent)
