"""`warpbus train` as a person uses it."""

import json
import os
import sys

import pytest
import torch
from hub_standin import StandIn
from typer.testing import CliRunner

from warpbus.cli import app, main
from warpbus.errors import DeviceError, StorageError, UsageError
from warpbus.evaluation import curve
from warpbus.language import in_language, translated
from warpbus.train.job import devices_of

SHORT = ["--device", "cpu", "--steps", "3", "--length", "32", "--rows", "2", "--rows-at-once", "1"]
SHORT += ["--warmup", "1", "--workers", "1"]


@pytest.fixture
def data(tmp_path, write_lines):
    turns = [{"role": "user", "content": "写诗"}, {"role": "assistant", "content": "床前明月光"}]
    return write_lines(tmp_path / "data.jsonl", *[{"messages": turns}] * 8)


def invoke(*arguments):
    return CliRunner().invoke(app, ["train", *[str(argument) for argument in arguments]], catch_exceptions=False)


def test_a_model_is_trained_and_its_losses_shown(blank_model, tmp_path, data):
    found = invoke(blank_model, tmp_path / "out", "--data", data, "--valid", data, "--valid-every", 2, *SHORT)
    assert found.exit_code == 0
    assert found.stdout == ""
    assert "the model has no weights: training starts from random ones" in " ".join(found.stderr.split())
    assert "step 2: loss" in found.stderr
    assert "training.png" in found.stderr.replace("\n", "")
    assert (tmp_path / "out" / "training.png").read_bytes().startswith(b"\x89PNG")
    assert "192 tokens in" in " ".join(found.stderr.split())
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_how_often_the_data_are_seen_is_told(blank_model, tmp_path, data):
    """Also that a warm-up does not end, and what is missing of the validation data."""
    valid = tmp_path / "valid.jsonl"
    asked = {"messages": [{"role": "user", "content": "写诗"}]}
    lines = [json.dumps({"text": "床前明月光疑是地上霜" * 9}), json.dumps(asked), data.read_text().splitlines()[0]]
    valid.write_text("\n".join(lines))
    found = invoke(blank_model, tmp_path / "out", "--data", data, "--valid", valid, *SHORT, "--warmup", 6)
    assert found.exit_code == 0
    said = " ".join(found.stderr.split())
    summary = json.loads((tmp_path / "out" / "training.json").read_text(encoding="utf-8"))
    assert f"epochs: {summary['epochs']:.3g} of 8 documents, steps: 3 of 2 rows" in said
    assert "--warmup 6: longer than the run of 3 steps, so the learning rate only rises to 0.0005: lower it" in said
    assert "validation data: 3 documents, 1 of them cut to --length 32, 1 left out because no answer begins" in said
    assert (summary["valid_documents"], summary["valid_truncated"], summary["valid_dropped"]) == (2, 1, 1)
    assert "--warmup" not in invoke(blank_model, tmp_path / "two", "--data", data, *SHORT).stderr


def test_json_is_all_of_stdout(blank_model, tmp_path, data):
    found = invoke(blank_model, tmp_path / "out", "--data", data, "--clip", 0.5, "--seed", 7, *SHORT, "--json")
    assert found.exit_code == 0
    summary = json.loads(found.stdout)
    assert summary == json.loads((tmp_path / "out" / "training.json").read_text(encoding="utf-8"))
    expected = {"steps": 3, "length": 32, "rows_per_step": 2, "rows_at_once": 1, "clip": 0.5, "seed": 7}
    assert {name: summary["settings"][name] for name in expected} == expected
    assert summary["settings"]["dtype"] == "float32"
    assert summary["valid_loss"] is None


@pytest.mark.parametrize("flags", [["--json"], []])
def test_a_picture_that_cannot_be_written_hides_no_result(flags, blank_model, tmp_path, data, monkeypatch, capsys):
    def full(output):
        raise StorageError(f"{output}: no space left")

    monkeypatch.setattr(curve, "draw_training", full)
    arguments = ["train", blank_model, tmp_path / "out", "--data", data, *SHORT, *flags]
    monkeypatch.setattr(sys, "argv", ["warpbus", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    told = capsys.readouterr()
    assert "no space left" in told.err
    if flags:
        assert json.loads(told.out)["tokens"] == 192
    else:
        assert "192 tokens in" in " ".join(told.err.split())


def test_help_names_every_setting():
    found = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"})
    assert found.exit_code == 0
    for flag in ("--data", "--valid", "--steps", "--epochs", "--length", "--rows", "--learning-rate", "--gpus"):
        assert flag in found.stdout
    assert "the same command resumes an interrupted run" in " ".join(found.stdout.split())


def test_what_cannot_be(blank_model, tmp_path, data):
    given = [blank_model, tmp_path / "out", "--data", data, *SHORT]
    with pytest.raises(UsageError, match="dtype is 'float16': expected bfloat16 or float32"):
        invoke(*given, "--dtype", "float16")
    with pytest.raises(UsageError, match="--gpus 2: "):
        invoke(*given, "--gpus", 2)
    with pytest.raises(UsageError, match="give auto, cpu, cuda or cuda:N"):
        invoke(*given, "--device", "tpu")
    with pytest.raises(UsageError, match="method is 'dora': expected full, lora or ptuning"):
        invoke(*given, "--method", "dora")
    with pytest.raises(UsageError, match="sharding is 'zero': expected ddp or fsdp"):
        invoke(*given, "--sharding", "zero")
    with pytest.raises(UsageError, match="quantize: quantized weights cannot be trained"):
        invoke(*given, "--quantize", "w4a16-g32")
    with pytest.raises(UsageError, match="rank: only for method lora, not full: drop it, or use method lora"):
        invoke(*given, "--rank", 4)
    with pytest.raises(UsageError, match="steps and epochs both say how long to train: give one of them"):
        invoke(*given, "--epochs", 1)
    with pytest.raises(UsageError, match="targets: only for method lora, not ptuning"):
        invoke(*given, "--method", "ptuning", "--target", "mlp.down")
    with pytest.raises(UsageError, match="--prefix-tokens: only for method ptuning, not lora"):
        invoke(*given, "--method", "lora", "--prefix-tokens", 16)
    with pytest.raises(UsageError, match="--cluster: set the number of GPUs with --processes"):
        invoke(*given, "--cluster", "auto", "--gpus", 2)
    assert invoke(*given, "--length", 1).exit_code == 2
    assert invoke(*given, "--learning-rate", -1).exit_code == 2
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_trained(tiny_model, tmp_path, data):
    options = ["--method", "lora", "--rank", 2, "--target", "mlp.down", "--quantize", "w4a16-g32", "--json"]
    found = invoke(tiny_model, tmp_path / "out", "--data", data, *options, *SHORT)
    assert found.exit_code == 0
    settings = json.loads(found.stdout)["settings"]
    expected = {"method": "lora", "rank": 2, "targets": ["mlp.down"], "quantize": "w4a16-g32", "weight_decay": 0.0}
    assert {name: settings[name] for name in expected} == expected
    assert (tmp_path / "out" / "adapter_config.json").exists()
    assert "trainable parameters: 640 of " in found.stderr
    assert "random" not in found.stderr


def test_a_dry_run_tells_memory_and_needs_no_weights(blank_model, tmp_path, data):
    given = [blank_model, tmp_path / "out", "--data", data, "--method", "lora", *SHORT, "--rows", 4, "--dry-run"]
    found = invoke(*given)
    assert found.exit_code == 0
    assert "3 steps, 384 tokens" in found.stdout
    assert "time: estimated only with a GPU" in found.stdout
    assert all(name in found.stdout for name in ("weights", "gradients", "moments", "activations"))
    needs = json.loads(invoke(*given, "--json", "--sharding", "fsdp").stdout)
    assert [need["gpus"] for need in needs["needs"]] == [1, 2, 4]  # 8 cannot share 4 rows
    weights = [need["memory"]["parts"]["weights"] for need in needs["needs"]]
    assert weights == sorted(set(weights), reverse=True)
    assert needs["needs"][0]["time"] is None
    assert needs["trained"] < needs["parameters"]
    assert os.listdir(tmp_path) == ["data.jsonl"]


def test_a_process_for_each_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices_of("auto", 2, 1) == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert devices_of("cuda:1", 1, 1) == [torch.device("cuda", 1)]
    assert devices_of("cpu", 1, 3) == [torch.device("cpu")] * 3
    with pytest.raises(DeviceError, match="--gpus 3: this machine has 2: use fewer"):
        devices_of("cuda", 3, 1)
    with pytest.raises(UsageError, match="--device cuda:1 is one GPU"):
        devices_of("cuda:1", 2, 1)
    with pytest.raises(UsageError, match="--processes 2: only for the CPU and for clusters"):
        devices_of("auto", 1, 2)


def test_an_error_is_one_line_and_an_exit_code(blank_model, tmp_path, data, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    for arguments, code, said in (
        ([blank_model, tmp_path / "[red]out", "--data", tmp_path / "none.jsonl"], 1, "none.jsonl: no such file"),
        ([blank_model, blank_model, "--data", data], 1, "exists and is not empty"),
    ):
        words = ["warpbus", "train", *map(str, arguments), *SHORT]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as raised:
            main()
        assert raised.value.code == code
        captured = capsys.readouterr()
        errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert said in errors[0]
        assert "Traceback" not in captured.err
        assert captured.out == ""
    assert os.listdir(tmp_path) == ["data.jsonl"]


def test_arguments_are_checked_before_anything_is_drawn_or_fetched(hub: StandIn, tmp_path, data, monkeypatch, capsys):
    advice = "drop --gpus to train on the CPU, or run warpbus doctor"
    for arguments, said in (
        (["--keep", "best"], "--keep best needs validation data: give --valid FILE"),
        (["--rows", 3, "--processes", 2], "--rows 3: not divisible by the 2 processes: give a multiple of 2"),
        (["--gpus", 2], f"--gpus 2: --device cpu selects the CPU: {advice}"),
    ):
        words = ["warpbus", "train", "someone/tiny", tmp_path / "out", "--data", data, *SHORT, *arguments]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        with pytest.raises(SystemExit):
            main()
        assert capsys.readouterr().err == f"error: {said}\n"
    assert hub.asked == []


def test_the_end_of_a_run_that_keeps_the_best_step_is_chinese(blank_model, tmp_path, data, capsys):
    flags = ["--data", data, "--valid", data, "--valid-every", 2, "--keep", "best", *SHORT]
    with in_language("zh"):
        found = invoke(blank_model, tmp_path / "out", *flags)
    assert found.exit_code == 0
    said = "".join(found.stderr.split())
    assert "已写出该步的权重" in said
    assert "每秒" in said
    assert not any(english in said for english in ("afterstep", "tokens/s", "epochs", "loss"))


@pytest.mark.parametrize(
    "losses",
    [
        "loss 1.0000, busiest expert 1.50 times the mean",
        "loss 1.0000, validation 2.0000, busiest expert 1.50 times the mean",
        "loss 1.0000, validation 2.0000 after step 4, which was written, busiest expert 1.50 times the mean",
    ],
)
def test_the_load_of_experts_is_told_in_chinese(losses):
    with in_language("zh"):
        said = translated(f"out: 1,024 tokens in 9 s, {losses}")
    assert said.endswith("最忙的专家为平均的 1.50 倍")
    assert not {"loss", "after", "validation"} & set(said.split())
