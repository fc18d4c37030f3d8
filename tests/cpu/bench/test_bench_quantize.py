"""`quantize` on the CPU with a tiny model: what the records say of stages, limits and agreement."""

import json
import sys
import types
from dataclasses import replace

import pytest
import torch
from dense_configs import with_traits
from typer.testing import CliRunner

from warpbus.bench import compressor, quantization_process, quantize
from warpbus.bench.cases import WHOLE, Run, run
from warpbus.bench.options import QuantizeBenchOptions
from warpbus.bench.plots import figure
from warpbus.bench.quantize import equal_share, quantize_benchmark
from warpbus.bench.records import read
from warpbus.cli import app
from warpbus.errors import DeviceError, StorageError, UsageError
from warpbus.models import SHAPES
from warpbus.models.random_checkpoint import write_random_checkpoint
from warpbus.qtensor import Scheme
from warpbus.quantization import quantize as quantize_model
from warpbus.quantization.preflight import prepare

SIZES = {"vocab_size": 96, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "head_dim": 16, "ffn_size": 96}
WORK = QuantizeBenchOptions(layers=1, samples=2, seqlen=64, scheme="w4a16-g32")
LITTLE = '{"where": {"device": "cpu", "gpus": "all", "processes": 1}}'


@pytest.fixture
def tiny(monkeypatch):
    shape = SHAPES["chatglm2-6b"]
    config = with_traits(shape, **SIZES, num_kv_heads=2, rope=replace(shape.rope, rotary_dim=8), max_context=512)
    monkeypatch.setitem(SHAPES, "chatglm2-6b", config)
    return config


def settings():
    return Run(device=torch.device("cpu"), command="warpbus bench quantize")


def test_a_table_the_records_and_a_picture(tiny, tmp_path):
    words = "bench quantize --layers 1 --gpus 2,1 --samples 2 --seqlen 64 --scheme w4a16-g32 --device cpu"
    places = ("--directory", str(tmp_path), "--output", str(tmp_path / "out"))
    found = CliRunner().invoke(app, [*words.split(), *places], catch_exceptions=False, env={"COLUMNS": "140"})
    assert found.exit_code == 0
    for text in (
        "Quantizing chatglm2-6b with random weights, cpu",
        "factorization",
        "llm-compressor",
        "was written in",
    ):
        assert text in found.stdout
    # The models are gone.
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["out", "quantize-cpu.json", "quantize-cpu.png"]
    records = read(tmp_path / "out" / "quantize-cpu.json")
    assert {record.command for record in records} == {f"warpbus {words}"}
    assert {record.peer.name for record in records} == {"warpbus, 1 process"}
    for count in (1, 2):
        of_run = [record for record in records if record.case["processes"] == count]
        stages = {record.case["stage"]: record for record in of_run if "stage" in record.case}
        whole = stages.pop(WHOLE)
        # There is one batch: the first of two processes has none, and no statistics to take.
        expected = {"start", "reading", "forward", "factorization", "solve", "writing", "end"}
        assert expected | ({"statistics"} if count == 1 else set()) <= set(stages)
        assert sum(record.ours for record in stages.values()) == pytest.approx(whole.ours, rel=0.02)
        assert stages["start"].ours > 0.2  # Python and torch
        assert {name for name, record in stages.items() if record.floor is not None} == set(stages) - {
            "start",
            "communication",
            "end",
        }
        assert 0 < whole.floor < whole.ours
        memory = [record for record in of_run if record.metric == "memory"]
        assert [(record.case["of"], record.unit) for record in memory] == [("the first process", "GB")]
        assert 0.1 < memory[0].ours < 10
    (agreement,) = [record for record in records if record.metric == "agreement"]
    assert (agreement.case["processes"], agreement.ours, agreement.ratio, agreement.unit) == (2, 100, 1, "%")
    drawn = figure(records, "title", quantize_benchmark(WORK).plot)
    (axis,) = drawn.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["1 process", "2 processes"]
    ends = [
        max(bar.get_x() + bar.get_width() for bar in axis.patches if round(bar.get_y() + 0.35) == row) for row in (0, 1)
    ]
    wholes = [record.ours for record in records if record.case.get("stage") == WHOLE]
    assert ends == pytest.approx(wholes, rel=0.02)


def test_the_share_of_equal_integers(tiny, tmp_path):
    write_random_checkpoint(tmp_path / "model", tiny, device="cpu")
    scheme = Scheme.parse("w4a16-g32")
    plan = prepare(tmp_path / "model", tmp_path / "a", scheme)
    data = quantization_process.random_calibration(tiny.vocab_size, 2, 64)
    other = quantization_process.random_calibration(tiny.vocab_size, 3, 64)
    assert data.sequences == other.sequences[:2]
    for name, calibration in (("a", data), ("b", data), ("c", other)):
        quantize_model(tmp_path / "model", tmp_path / name, scheme=scheme, calibration=calibration, device="cpu")
    assert equal_share(plan, tmp_path / "a", tmp_path / "b") == 1
    assert 0.5 < equal_share(plan, tmp_path / "a", tmp_path / "c") < 1


def test_a_run_that_fails_says_why_and_leaves_nothing(tiny, tmp_path, monkeypatch):
    work = replace(WORK, directory=tmp_path)
    reported = []
    monkeypatch.setattr(
        quantization_process, "json", types.SimpleNamespace(dumps=lambda asked: LITTLE, loads=json.loads)
    )
    with pytest.raises(DeviceError, match="bench quantize: 1 at work: KeyError: 'model'"):
        run(quantize_benchmark(work, lambda *said: reported.append(said)), settings())
    assert reported == [("writing the model", 0, 1), ("writing the model", 1, 1)]
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_is_refused_before_anything_is_written(tiny, tmp_path, monkeypatch):
    def refused(**changes):
        return run(quantize_benchmark(replace(WORK, **{"directory": tmp_path, **changes})), settings())

    for changes, message in (
        ({"shape": "gpt-2"}, "--shape gpt-2: there is no such shape: choose among chatglm-6b"),
        ({"algorithm": "rtn"}, "--algorithm rtn: choose one that is calibrated: gptq"),
        ({"algorithm": "smoothquant"}, "--algorithm smoothquant: it cannot quantize to w4a16-g32"),
        ({"samples": 0}, "--samples 0: it has to be at least 1"),
        ({"layers": 0}, "--layers 0: it has to be at least 1"),
        ({"counts": (1, 9)}, "--gpus 9: give numbers from 1 to 8"),
        ({"directory": tmp_path / "none"}, "there is no such directory"),
    ):
        with pytest.raises(UsageError, match=message):
            refused(**changes)
    second = Run(device=torch.device("cuda", 1), command="warpbus bench quantize")
    with pytest.raises(UsageError, match="--device cuda:1: GPUs are taken from the first one on"):
        quantize_benchmark(WORK).cases(second)
    monkeypatch.setattr("warpbus.formats.files.free_space", lambda path: 10)
    with pytest.raises(StorageError, match="disk full"):
        refused()
    assert list(tmp_path.iterdir()) == []


def test_the_disk_that_is_asked_for_holds_what_is_written(tiny, tmp_path):
    write_random_checkpoint(tmp_path / "model", tiny, device="cpu", layers=1)
    plan = prepare(tmp_path / "model", tmp_path / "a", Scheme.parse(WORK.scheme))
    needed = plan.checkpoint.total_bytes + 2 * plan.bytes_after
    assert quantize._disk_bytes(WORK) == pytest.approx(needed, rel=0.1)


def test_a_peer_that_is_installed_is_measured_and_one_that_fails_is_named(tiny, monkeypatch):
    asked = settings()
    monkeypatch.setattr(quantize, "distribution", lambda name: "1.0")
    asked_for = []
    monkeypatch.setattr(compressor, "timed", lambda *given: asked_for.append(given) or 7.0)
    assert quantize._peers(asked, WORK) == [("llm-compressor", "1.0", 7.0)]
    assert asked_for == [("chatglm2-6b", 1, "w4a16-g32", 2, 64)]
    assert asked.notes == []
    monkeypatch.undo()
    monkeypatch.setattr(quantize, "distribution", lambda name: "1.0")
    assert quantize._peers(asked, WORK) == []
    assert asked.notes == ["llm-compressor was not measured: scheme w4a16-g32: of ours it knows w4a16-g128, w8a16-g128"]


def test_what_the_peer_is_given(tiny, monkeypatch, capsys):
    """A stand-in with the three names of llm-compressor and datasets that are called."""
    given = {}
    names = {
        "llmcompressor": types.SimpleNamespace(oneshot=lambda **settings: given.update(settings)),
        "llmcompressor.modifiers.quantization": types.SimpleNamespace(GPTQModifier=dict),
        "datasets": types.SimpleNamespace(Dataset=types.SimpleNamespace(from_dict=dict)),
    }
    for name, module in names.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(compressor, "transformers_model", lambda config, device: config)
    monkeypatch.setattr(sys, "argv", ["-c", json.dumps(["chatglm2-6b", 1, "W4A16", 2, 5])])
    compressor.main()
    assert float(capsys.readouterr().out) >= 0
    assert given["model"] == with_traits(tiny, num_layers=1)
    assert given["recipe"] == {"targets": "Linear", "scheme": "W4A16", "ignore": ["lm_head"]}
    assert [len(row) for row in given["dataset"]["input_ids"]] == [5, 5]
    assert given["dataset"]["attention_mask"] == [[1] * 5] * 2
