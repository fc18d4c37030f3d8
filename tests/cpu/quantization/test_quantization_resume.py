"""A run that was cut off goes on where it stopped, and gives what an uninterrupted one gives."""

import json

import pytest
import torch
from quantization_models import write_model, write_texts

from warpbus.errors import NumericError, StorageError
from warpbus.formats import Checkpoint
from warpbus.quantization import driver, quantize


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source") / "tiny", num_hidden_layers=3)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl")


def interrupted(model, output, texts, after, **options):
    """Quantize, and be cut off after so many matrices."""

    def progress(done, total, what):
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(model, output, calibration=texts, scheme="w3a16-g64-asym", progress=progress, **options)


def solved(monkeypatch):
    """The names of the matrices that are quantized from now on."""
    names = []
    original = driver.gptq
    monkeypatch.setattr(driver, "gptq", lambda *rest, name, **options: names.append(name) or original(*rest, **options))
    return names


def tensors(directory):
    checkpoint = Checkpoint(directory)
    return {name: checkpoint.tensor(name) for name in checkpoint.names()}


def test_goes_on_and_ends_the_same(tmp_path, model, texts, monkeypatch):
    quantize(model, tmp_path / "whole", calibration=texts, scheme="w3a16-g64-asym")
    interrupted(model, tmp_path / "out", texts, after=10)  # in the third layer
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out.quantization", "whole"]
    names, calls = solved(monkeypatch), []
    report = quantize(
        model,
        tmp_path / "out",
        calibration=texts,
        scheme="w3a16-g64-asym",
        progress=lambda *arguments: calls.append(arguments),
    )
    assert names == [f"layers.2.{linear}" for linear in ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")]
    assert [call[0] for call in calls] == list(range(1, 13))
    assert report.resumed_layers == 2
    whole, resumed = tensors(tmp_path / "whole"), tensors(tmp_path / "out")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    kept = json.loads((tmp_path / "whole" / "warpbus-report.json").read_text())["layers"]
    assert [row["error"] for row in kept] == [row.error for row in report.layers]
    assert report.bytes_after == sum(tensor.nbytes for tensor in resumed.values())
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out", "whole"]


@pytest.mark.parametrize("change", [{"seed": 3, "samples": 5}, {"damping": 0.02}])
def test_other_settings_begin_again(tmp_path, model, texts, monkeypatch, change):
    interrupted(model, tmp_path / "out", texts, after=6)
    names = solved(monkeypatch)
    report = quantize(model, tmp_path / "out", calibration=texts, scheme="w3a16-g64-asym", **change)
    assert report.resumed_layers == 0
    assert len(names) == 12


def test_a_damaged_layer_is_done_again(tmp_path, model, texts, monkeypatch):
    interrupted(model, tmp_path / "out", texts, after=10)
    file = tmp_path / "out.quantization" / "layer-00001" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    names = solved(monkeypatch)
    assert quantize(model, tmp_path / "out", calibration=texts, scheme="w3a16-g64-asym").resumed_layers == 1
    assert len(names) == 8


def test_an_error_leaves_nothing(tmp_path, model, texts, monkeypatch):
    def fail(*rest, name, **options):
        if name == "layers.1.mlp.down":
            raise NumericError(name)
        return original(*rest, **options)

    original = driver.gptq
    monkeypatch.setattr(driver, "gptq", fail)
    with pytest.raises(NumericError):
        quantize(model, tmp_path / "out", calibration=texts, scheme="w3a16-g64-asym")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_somebody_else_is_left_alone(tmp_path, model, texts):
    other = tmp_path / "out.quantization"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"out\.quantization: is in the way"):
        quantize(model, tmp_path / "out", calibration=texts, scheme="w3a16-g64-asym")
    assert (other / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "out").exists()
