"""Nothing is lost when a run is killed, interrupted, or meets a full disk or numbers that it cannot use."""

import json
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from quantization_runs import FOUR_LAYERS, Outcome, Runs, Undisturbed, command, fingerprint
from typer.testing import CliRunner

from warpbus.cli import app
from warpbus.errors import NumericError
from warpbus.formats import Checkpoint, CheckpointWriter, FinishedParts, ResumableCheckpoint
from warpbus.quantization import quantize

KILLS = 20


def shown(run: Outcome) -> str:
    """The last line of stderr."""
    return " ".join(run.said.strip().splitlines()[-1].split())


def test_twenty_kills_end_in_the_same_model(
    runs: Runs, four_layers: Path, texts: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Each at a random moment of the next stage or the one after; when the model is there, it begins again."""
    expected, seconds = undisturbed
    chance, kills, kept = random.Random(5), 0, set()
    output, parts = tmp_path / "out", tmp_path / "out.quantization"
    stages = ["run", *(f"layer-{index:05}" for index in range(FOUR_LAYERS)), "order"]
    while kills < KILLS or not output.exists() or parts.exists():
        ahead = [path for name in stages if not (path := parts / f"{name}.json").exists()]
        # Killed in the last stage, the next run is killed so long after its start.
        moment = {"when": chance.choice(ahead[:2] or [parts]), "after": chance.uniform(0, seconds / len(stages))}
        moment = moment if kills < KILLS else {}
        run = runs.start(*command(four_layers, output, texts), **moment)
        assert run.code in (0, -signal.SIGKILL), run.said
        kills += run.code != 0
        kept.add(len(FinishedParts(output).parts()))
        if output.exists():
            assert fingerprint(output) == expected
            if kills < KILLS and not parts.exists():
                shutil.rmtree(output)
    assert len(kept) > 2  # they were killed at different layers
    assert {path.name for path in tmp_path.iterdir()} <= {
        "out",
        ".out.quantization.lock",
        ".out.quantization.removed",
    }


def test_a_run_that_was_killed_with_its_model_in_place_goes_on(
    runs: Runs, four_layers: Path, texts: Path, tmp_path: Path, undisturbed: Undisturbed, monkeypatch
) -> None:
    """Its parts are not removed yet: the same command ends with the same model, and without them."""
    output = tmp_path / "out"

    def killed(_: ResumableCheckpoint) -> None:
        raise SystemExit

    with monkeypatch.context() as interrupted:
        interrupted.setattr(ResumableCheckpoint, "_forget", killed)
        interrupted.setattr(ResumableCheckpoint, "_undo", lambda _: None)
        words = [str(word) for word in command(four_layers, output, texts)]
        CliRunner().invoke(app, words)
    assert FinishedParts(output).begun
    assert fingerprint(output) == undisturbed.fingerprint
    run = runs.start(*command(four_layers, output, texts))
    assert run.code == 0, run.said
    assert fingerprint(output) == undisturbed.fingerprint
    assert not FinishedParts(output).directory.exists()
    refused = runs.start(*command(four_layers, output, texts))
    assert (refused.code, "exists and is not empty" in refused.said) == (1, True)


def test_a_run_that_goes_on_says_so_in_its_report(
    runs: Runs, four_layers: Path, texts: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    second = tmp_path / "out.quantization" / "layer-00001.json"
    assert runs.start(*command(four_layers, tmp_path / "out", texts), when=second).code == -signal.SIGKILL
    kept = [part for part in FinishedParts(tmp_path / "out").parts() if part.startswith("layer")]
    assert kept[:2] == ["layer-00000", "layer-00001"]
    run = runs.start(*command(four_layers, tmp_path / "out", texts))
    assert run.code == 0, run.said
    report = json.loads((tmp_path / "out" / "warpbus-report.json").read_text())
    assert report["resumed_layers"] == len(kept)
    assert len(report["layers"]) == 4 * FOUR_LAYERS
    assert fingerprint(tmp_path / "out") == undisturbed.fingerprint


def test_other_settings_need_a_restart_and_a_damaged_layer_is_done_again(
    runs: Runs, four_layers: Path, texts: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    output, kept = tmp_path / "out", tmp_path / "out.quantization"
    assert runs.start(*command(four_layers, output, texts, "--seed", 3), when=kept / "layer-00000.json").code != 0
    before = FinishedParts(output).parts()
    run = runs.start(*command(four_layers, output, texts))
    assert run.code == 2
    assert "holds finished parts of a run that differs: calibration tokens differ: use the same to go on" in shown(run)
    assert FinishedParts(output).parts() == before
    run = runs.start(*command(four_layers, output, texts, "--restart"), when=kept / "layer-00002.json")
    assert run.code == -signal.SIGKILL
    assert "the finished layers of an earlier run were removed" in " ".join(run.said.split())
    file = kept / "layer-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    layers = sum(part.startswith("layer") for part in FinishedParts(output).parts())
    run = runs.start(*command(four_layers, output, texts))
    finished = "1 finished layer" if layers == 1 else f"{layers} finished layers"
    assert f"resuming after {finished} " in " ".join(run.said.split())
    assert json.loads((output / "warpbus-report.json").read_text())["resumed_layers"] == layers
    assert fingerprint(output) == undisturbed.fingerprint


def cut_off(
    runs: Runs, four_layers: Path, texts: Path, folder: Path, part: str, number: signal.Signals
) -> tuple[Path, Outcome]:
    """Stop a run once a part is there; one that was over before the signal came is tried again. Gives its output."""
    for attempt in range(30):
        output = folder / str(attempt) / "out"
        output.parent.mkdir()
        when = output.parent / "out.quantization" / f"{part}.json"
        run = runs.start(*command(four_layers, output, texts), number=number, when=when)
        if run.code != 0:
            return output, run
    raise AssertionError("every run was over before the signal came")


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGINT, 130, "Interrupted. "), (signal.SIGTERM, 143, "Terminated. ")]
)
def test_a_signal_keeps_what_is_finished_and_says_how_to_go_on(
    *,
    runs: Runs,
    four_layers: Path,
    texts: Path,
    tmp_path: Path,
    undisturbed: Undisturbed,
    number: signal.Signals,
    code: int,
    said: str,
) -> None:
    output, run = cut_off(runs, four_layers, texts, tmp_path, "layer-00000", number)
    assert run.code == code, run.said
    assert "Traceback" not in run.said
    assert said in shown(run)
    assert f"{output}.quantization" in shown(run)
    assert "run the same command to resume" in shown(run)
    assert not output.exists()
    assert "layer-00000" in FinishedParts(output).parts()
    assert [path.name for path in output.parent.iterdir()] == ["out.quantization"]  # nobody is kept out
    assert runs.start(*command(four_layers, output, texts)).code == 0
    assert fingerprint(output) == undisturbed.fingerprint


def test_a_full_disk_keeps_what_was_finished(
    runs: Runs, four_layers: Path, texts: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    output, run = cut_off(runs, four_layers, texts, tmp_path, "layer-00001", signal.SIGKILL)
    assert run.code == -signal.SIGKILL
    kept = FinishedParts(output).parts()
    run = runs.start(*command(four_layers, output, texts), largest_file=8_000)
    assert run.code == 1
    assert "cannot be written (File too large): free some space or choose another path" in shown(run)
    assert f"finished parts kept in {output}.quantization: {len(kept)}: run the same command to resume" in shown(run)
    assert FinishedParts(output).parts() == kept
    assert not output.exists()
    assert runs.start(*command(four_layers, output, texts)).code == 0
    assert fingerprint(output) == undisturbed.fingerprint


def changed_model(model: Path, output: Path, name: str, value: float) -> Path:
    """A copy of a model with one tensor that begins with `value`."""
    source = Checkpoint(model)
    with CheckpointWriter(output) as writer:
        for file in model.iterdir():
            if file.suffix != ".safetensors":
                writer.copy_file(file)
        for each in source.names():
            tensor = source.tensor(each).clone()
            if each == name:
                tensor.view(-1)[0] = value
            writer.add(each, tensor)
        writer.finish()
    return output


@pytest.mark.parametrize(
    ("tensor", "value", "said"),
    [
        ("model.layers.2.mlp.down_proj.weight", float("nan"), r"layers\.2\.mlp\.down: .*NaN"),
        ("model.layers.2.post_attention_layernorm.weight", 1e38, r"layers\.2\.mlp\.gate_up: NaN or infinity entered"),
        ("model.layers.2.self_attn.q_proj.bias", float("nan"), r"model\.layers\.2\.self_attn\.q_proj\.bias: NaN"),
    ],
)
def test_numbers_that_cannot_be_used(
    four_layers: Path, texts: Path, tmp_path: Path, tensor: str, value: float, said: str
) -> None:
    """In the weights and in the calibration's states: the matrix is named, and layers before it are kept."""
    broken = changed_model(four_layers, tmp_path / "broken", tensor, value)
    with pytest.raises(NumericError, match=said) as raised:
        quantize(broken, tmp_path / "out", calibration=texts, scheme="w3a16-g32-asym", device="cpu")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()
    kept = [part for part in FinishedParts(tmp_path / "out").parts() if part.startswith("layer")]
    assert kept == ["layer-00000", "layer-00001"]
    assert f". The finished layers (2) are kept in {tmp_path / 'out.quantization'}: once this" in str(raised.value)
    assert "--device cpu" not in str(raised.value)


def test_a_hessian_that_is_not_positive_definite(runs: Runs, four_layers: Path, texts: Path, tmp_path: Path) -> None:
    """Fewer tokens than columns and no damping: refused with the matrix's name, and not rounded to nearest instead."""
    output = tmp_path / "out"
    few = command(four_layers, output, texts, "--samples", 1, "--seqlen", 16)
    run = runs.start(*few, "--damping", 0)
    assert run.code == 1
    assert "layers.0.attention.qkv: its Hessian is not positive definite: raise --damping" in shown(run)
    assert list(tmp_path.iterdir()) == []  # no layer was finished, so nothing is kept
    assert runs.start(*few, "--damping", 0.1).code == 0
    assert all(torch.isfinite(tensor).all() for tensor in scales(output))


def scales(directory: Path) -> list[torch.Tensor]:
    checkpoint = Checkpoint(directory)
    found = [checkpoint.tensor(name) for name in checkpoint.names() if name.endswith("weight_scale")]
    assert len(found) == 6 * FOUR_LAYERS  # gate and up are one tensor in this family
    return found
