"""Training runs: that they learn, stop and go on, and leave nothing half-written."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from warpbus.errors import CheckpointError, DataError, NumericError, StorageError, UsageError
from warpbus.formats import Checkpoint
from warpbus.formats.hub import find_model
from warpbus.models import Decoder, load_model, read_config
from warpbus.models.convert import convert
from warpbus.train import TrainingProgress, TrainingSettings, train
from warpbus.train.dataset import Batches, PackedBatch, pack, tokenize
from warpbus.train.run import _TrainingRun

WriteLines = MakeModel = Callable[..., Path]
VERSES = ("床前明月光", "疑是地上霜", "举头望明月", "低头思故乡", "春夜", "明月", "故乡霜", "光")
SETTINGS = TrainingSettings(
    steps=6, length=32, rows_per_step=4, rows_at_once=4, learning_rate=5e-3, warmup=2, save_every=2, valid_every=3
)


@pytest.fixture
def data(tmp_path: Path, write_lines: WriteLines) -> Path:
    def conversation(index: int) -> dict[str, object]:
        asked, answer = f"写诗{index}", VERSES[index % len(VERSES)]
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}

    return write_lines(tmp_path / "data.jsonl", *map(conversation, range(24)))


def run(model: Path, output: Path, data: Path, **changes: Any) -> tuple[dict[str, Any], list[TrainingProgress]]:
    steps: list[TrainingProgress] = []
    options = {name: changes.pop(name) for name in ("valid", "overwrite") if name in changes}
    settings = replace(SETTINGS, **changes)
    summary = train(model, output, data=data, settings=settings, device="cpu", report=steps.append, **options)
    return summary, steps


def weights(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def stop_after(step: int) -> Callable[[TrainingProgress], None]:
    def report(progress: TrainingProgress) -> None:
        if progress.step == step:
            raise KeyboardInterrupt

    return report


def test_the_learning_rate_rises_and_falls() -> None:
    settings = TrainingSettings(steps=100, warmup=10, learning_rate=1.0, final_rate=0.1)
    rates = [settings.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55, abs=0.001)
    assert rates[99] == pytest.approx(0.1, abs=0.001)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert TrainingSettings(steps=2, warmup=0, learning_rate=1.0).rate(0) == 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", float("nan")),
        ("learning_rate", 2.0),
        ("weight_decay", float("nan")),
        ("clip", 0.0),
        ("length", 1),
        ("steps", -1),
        ("epochs", 0.0),
        ("rows_at_once", 0),
        ("seed", -1),
        ("seed", 2**64),
        ("dtype", "float16"),
    ],
)
def test_settings_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{name} is {value}|{name} is '{value}'"):
        TrainingSettings(**{name: value})


def test_training_learns_and_says_what_it_did(blank_model: Path, tmp_path: Path, data: Path) -> None:
    output = tmp_path / "out"
    summary, steps = run(blank_model, output, data, steps=40, valid=data, valid_every=15, save_every=10)
    assert [progress.step for progress in steps] == list(range(1, 41))
    assert steps[0].loss == pytest.approx(5.7, abs=0.5)
    assert steps[-1].loss < 2.0
    assert [progress.step for progress in steps if progress.valid_loss is not None] == [15, 30, 40]
    assert summary["valid_loss"] == steps[-1].valid_loss < 2.0
    assert summary["tokens"] == 40 * 4 * 32
    assert summary["device"] == "cpu"
    assert summary == json.loads((output / "training.json").read_text(encoding="utf-8"))
    log = json.loads((output / "training-log.json").read_text(encoding="utf-8"))
    assert [entry["loss"] for entry in log] == [progress.loss for progress in steps]
    assert json.loads((output / "config.json").read_text(encoding="utf-8"))["dtype"] == "bfloat16"
    # Nothing is left beside the model.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "out"]


def test_the_first_loss_is_that_of_the_documents_one_by_one(blank_model: Path, tmp_path: Path, data: Path) -> None:
    """With a learning rate of 0 the written model is the initial one, and all of the data are in the first step."""
    _, steps = run(blank_model, tmp_path / "out", data, steps=1, rows_per_step=16, rows_at_once=16, learning_rate=0.0)
    # Written in bfloat16, but fresh weights are drawn from the seed.
    documents = tokenize(data, blank_model, Checkpoint(blank_model, weights=False).config, length=32)
    rows = pack(documents, range(len(documents)), 32)
    assert len(rows) <= 16
    model = Decoder(read_config(Checkpoint(blank_model, weights=False)))
    model.initialize(torch.Generator().manual_seed(0))
    total = count = 0.0
    batch = next(Batches(documents, 32, 16, 0).steps(0, 1))
    for tokens, targets, numbers in zip(batch.tokens, batch.targets, batch.documents, strict=True):
        for number in range(int(numbers.max()) + 1):
            own = numbers == number
            logits = model(tokens[own][None])[0]
            total += float(F.cross_entropy(logits, targets[own], reduction="sum").detach())
            count += int((targets[own] != -100).sum())
    assert steps[0].loss == pytest.approx(total / count, abs=1e-5)


def test_an_interrupted_run_ends_as_if_it_had_not_been(blank_model: Path, tmp_path: Path, data: Path) -> None:
    whole, steps = run(blank_model, tmp_path / "whole", data, valid=data)
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        train(blank_model, output, data=data, valid=data, settings=SETTINGS, device="cpu", report=stop_after(5))
    assert not output.exists()
    assert [path.name for path in (tmp_path / "out.training").iterdir()] == ["state.pt"]
    resumed, rest = run(blank_model, output, data, valid=data)
    assert [progress.step for progress in rest] == [5, 6]
    assert [progress.loss for progress in rest] == [progress.loss for progress in steps[4:]]
    expected, found = weights(tmp_path / "whole"), weights(output)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert resumed["valid_loss"] == whole["valid_loss"]
    assert resumed["loss"] == whole["loss"]
    assert not (tmp_path / "out.training").exists()


def test_a_run_goes_on_only_as_it_began(blank_model: Path, tmp_path: Path, data: Path, write_lines: WriteLines) -> None:
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        train(blank_model, output, data=data, settings=SETTINGS, device="cpu", report=stop_after(2))
    with pytest.raises(UsageError, match=r"learning_rate was 0\.005, clip was 1\.0") as raised:
        run(blank_model, output, data, learning_rate=1e-3, clip=2.0)
    assert str(tmp_path / "out.training") in str(raised.value)
    with pytest.raises(UsageError, match=r"\(the data changed\)"):
        run(blank_model, output, write_lines(tmp_path / "b.jsonl", {"text": "明月光"}))
    with pytest.raises(UsageError, match=r"\(the model changed\)"):
        run(edited(blank_model, tmp_path / "narrow", intermediate_size=64), output, data)
    (tmp_path / "out.training" / "state.pt").write_bytes(b"PK damaged")
    with pytest.raises(CheckpointError, match=r"state\.pt: damaged .* delete .*\.training to start over"):
        run(blank_model, output, data)
    assert not output.exists()


def edited(source: Path, directory: Path, **changes: Any) -> Path:
    """A copy of a model directory with another configuration."""
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return directory


def test_accumulated_gradients_are_those_of_the_whole(blank_model: Path, tmp_path: Path, data: Path) -> None:
    # A key's bias hardly changes the attention: AdamW would make large steps out of its gradient's rounding.
    unbiased = edited(blank_model, tmp_path / "unbiased", attention_bias=False)
    kept: list[dict[str, Tensor]] = []
    for rows_at_once in (4, 3, 1):
        settings = replace(SETTINGS, rows_at_once=rows_at_once)
        output = tmp_path / f"out{rows_at_once}"
        with pytest.raises(KeyboardInterrupt):
            train(unbiased, output, data=data, settings=settings, device="cpu", report=stop_after(4))
        # The state, since the model itself is written in bfloat16.
        kept.append(torch.load(f"{output}.training/state.pt", weights_only=True)["model"])
    for other in kept[1:]:
        for name, tensor in kept[0].items():
            assert torch.allclose(other[name], tensor, atol=1e-5, rtol=1e-4), name


def test_a_loss_that_is_not_finite_is_an_error(make_model: MakeModel, tmp_path: Path, data: Path) -> None:
    damaged = make_model(tmp_path / "damaged", std=1e25)
    with pytest.raises(NumericError, match=r"^step 1: the loss is .*, the gradient norm nan: .* --learning-rate$"):
        run(damaged, tmp_path / "out", data)
    assert not (tmp_path / "out").exists()


def test_an_explosion_names_the_state_that_was_kept(
    blank_model: Path, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate = _TrainingRun._validate

    def explode(run: _TrainingRun, rows: PackedBatch) -> float:
        with torch.no_grad():
            run.method.model.final_norm.weight.fill_(float("inf"))
        return validate(run, rows)

    monkeypatch.setattr(_TrainingRun, "_validate", explode)
    with pytest.raises(
        NumericError, match=r"step 3: the validation loss is nan.*the last checkpoint is .*state\.pt"
    ) as raised:
        run(blank_model, tmp_path / "out", data, valid=data)
    assert "\n" not in str(raised.value)
    assert torch.load(tmp_path / "out.training" / "state.pt", weights_only=True)["step"] == 2


def test_a_full_disk_at_a_checkpoint(
    blank_model: Path, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, state = tmp_path / "out", tmp_path / "out.training" / "state.pt"
    save = torch.save

    def full(content: dict[str, Any], file: BinaryIO) -> None:
        if content["step"] == 4:
            file.write(b"half")
            try:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534") from None
        save(content, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        StorageError,
        match=r"state\.pt: cannot be written \(No space left on device\): free some .*; the last checkpoint is kept:",
    ):
        run(blank_model, output, data)
    assert [path.name for path in state.parent.iterdir()] == ["state.pt"]
    assert torch.load(state, weights_only=True)["step"] == 2
    monkeypatch.undo()
    _, steps = run(blank_model, output, data)
    assert [progress.step for progress in steps] == [3, 4, 5, 6]


def test_a_full_disk_at_the_end(blank_model: Path, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("warpbus.formats.writer.write_file", full)
    with pytest.raises(StorageError, match="disk full"):
        run(blank_model, output, data, save_every=100)
    assert not output.exists()
    monkeypatch.undo()
    # Nothing is trained again: what was there at the end was kept.
    _, steps = run(blank_model, output, data, save_every=100)
    assert steps == []
    expected = run(blank_model, tmp_path / "whole", data, save_every=100)[1]
    assert [entry["loss"] for entry in json.loads((output / "training-log.json").read_text())] == [
        progress.loss for progress in expected
    ]
    assert all(torch.equal(tensor, weights(output)[name]) for name, tensor in weights(tmp_path / "whole").items())
    assert not (tmp_path / "out.training").exists()


def test_transformers_reads_what_was_trained(blank_model: Path, tmp_path: Path, data: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run(blank_model, tmp_path / "out", data)
    model = load_model(Checkpoint(tmp_path / "out"), device="cpu", dtype=torch.float32)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert type(oracle).__name__ == "GlmForCausalLM"
    tokens = torch.randint(0, model.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = model(tokens), oracle(input_ids=tokens).logits
    assert expected.std() > 0.1
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_training_goes_on_from_weights(blank_model: Path, tmp_path: Path, data: Path) -> None:
    first, output = tmp_path / "first", tmp_path / "second"
    _, before = run(blank_model, first, data, steps=30)
    (first / "README.md").write_text("mine", encoding="utf-8")
    (first / "LICENSE").write_text("mine", encoding="utf-8")
    others = "pytorch_model.bin.index.json", "model.gguf", "optimizer.pt", "consolidated.00.pth", "trainer_state.json"
    for name in others:
        (first / name).write_text("{}", encoding="utf-8")
    _, after = run(first, output, data, steps=3, learning_rate=1e-4)
    assert after[0].loss < before[0].loss / 2
    assert after[0].loss == pytest.approx(before[-1].loss, abs=0.3)
    assert (output / "LICENSE").read_text(encoding="utf-8") == "mine"
    assert not (output / "README.md").exists()  # it describes the model that was trained further
    assert not {path.name for path in output.iterdir()} & {*others}
    assert len(json.loads((output / "training-log.json").read_text(encoding="utf-8"))) == 3
    changed = weights(output)
    assert any(not torch.equal(tensor, changed[name]) for name, tensor in weights(first).items())


@pytest.mark.usefixtures("home")
def test_weights_in_a_gguf_are_not_taken_for_none(make_model: MakeModel, tmp_path: Path, data: Path) -> None:
    """Training would start from random ones."""
    plain = make_model(tmp_path / "plain", num_attention_heads=4)
    convert(plain, tmp_path / "plain.gguf", to="gguf-f32")
    _, expected = run(plain, tmp_path / "expected", data)
    _, steps = run(find_model(str(tmp_path / "plain.gguf")), tmp_path / "out", data)
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in expected], rel=1e-5)
    assert not (tmp_path / "out" / "model.gguf").exists()
    found, trained = (weights(tmp_path / name) for name in ("out", "expected"))
    assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in trained.items()}


def test_an_output_that_leaves_no_place_for_checkpoints(
    blank_model: Path, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.training").write_text("mine", encoding="utf-8")
    with pytest.raises(StorageError, match=r"out\.training: is a file, but checkpoints are kept there"):
        run(blank_model, tmp_path / "out", data)
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for output in (".", "..", "/"):
        with pytest.raises(UsageError, match=r"checkpoints are kept beside OUTPUT, by its name"):
            run(blank_model, Path(output), data)


@pytest.mark.parametrize("name", ["consolidated.00.pth", "flax_model.msgpack", "llama-q4.gguf", "model-1.bin"])
def test_weights_that_cannot_be_read_are_not_taken_for_none(
    name: str, blank_model: Path, tmp_path: Path, data: Path
) -> None:
    shutil.copytree(blank_model, tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(b"weights")
    with pytest.raises(CheckpointError, match="no weights: expected model"):
        run(tmp_path / "model", tmp_path / "out", data)


def test_an_output_that_exists(blank_model: Path, tmp_path: Path, data: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(StorageError, match="exists and is not empty"):
        run(blank_model, output, data)
    with pytest.raises(StorageError, match=r"holds no model \(no config.json or adapter_config.json\), so it is not"):
        run(blank_model, output, data, overwrite=True)
    assert (output / "notes.txt").exists()
    with pytest.raises(StorageError, match=r"data\.jsonl: is a file"):
        run(blank_model, data, data)
    (output / "config.json").write_text("{}", encoding="utf-8")
    within = Path(shutil.copy(data, output))
    with pytest.raises(UsageError, match=r"replacing it would delete .*jsonl, which is read"):
        run(blank_model, output, within, overwrite=True)
    assert within.exists()
    run(blank_model, output, data, steps=1, overwrite=True)
    assert (output / "model.safetensors").exists()
    assert not (output / "notes.txt").exists()


def test_what_does_not_fit_together(blank_model: Path, tmp_path: Path, data: Path, write_lines: WriteLines) -> None:
    output = tmp_path / "out"
    with pytest.raises(UsageError, match=r"--length 1000: the context of .* is 512 tokens"):
        run(blank_model, output, data, length=1000)
    with pytest.raises(CheckpointError, match="there is no such directory"):
        run(tmp_path / "none", output, data)
    with pytest.raises(DataError, match="no such file"):
        run(blank_model, output, tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="nothing to learn in it"):
        run(blank_model, output, data, valid=write_lines(tmp_path / "empty.jsonl", ""))
    with pytest.raises(CheckpointError, match=r"its tokenizer has more tokens than the vocab_size .*\(270\)"):
        run(edited(blank_model, tmp_path / "small", vocab_size=270), output, data)
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": scheme}
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": group}}
    with pytest.raises(UsageError, match="the weights of a quantized model cannot be trained"):
        run(edited(blank_model, tmp_path / "quantized", quantization_config=quantization), output, data)
    assert not output.exists()


def test_epochs_make_steps(blank_model: Path, tmp_path: Path, data: Path) -> None:
    summary, steps = run(blank_model, tmp_path / "out", data, steps=0, epochs=2.0, rows_per_step=2)
    assert len(steps) == summary["settings"]["steps"]
    assert summary["epochs"] == pytest.approx(2.0, abs=0.1)
    assert summary["documents"] == 24


@pytest.mark.parametrize(
    ("epochs", "all_rows", "rows", "steps"),
    [(1.0, 12, 4, 3), (1.0, 11, 5, 3), (2.0, 12, 5, 5), (0.5, 11, 5, 2), (0.001, 12, 4, 1), (0.1, 30, 1, 3)],
)
def test_an_epoch_is_never_shorter_than_the_data(epochs: float, all_rows: int, rows: int, steps: int) -> None:
    """Rounded to the nearest, an epoch of 11 rows in steps of 5 left out one row."""
    assert TrainingSettings(epochs=epochs, rows_per_step=rows).resolved(all_rows / rows).steps == steps


def test_a_short_run_reaches_its_learning_rate(tiny_model: Path, tmp_path: Path, data: Path) -> None:
    """Without --warmup; with it, the run is what was asked for."""
    for method, most in (("lora", 20), ("ptuning", 20), ("full", 200)):
        for steps in (1, 9, 10, 57, 5000):
            settings = TrainingSettings.of(method, steps=steps).resolved(1.0)
            assert settings.warmup == min(most, steps // 10)
            assert max(map(settings.rate, range(steps))) == settings.learning_rate
    assert TrainingSettings.of("lora", steps=5, warmup=20).resolved(1.0).warmup == 20
    _, steps_of = run(tiny_model, tmp_path / "out", data, steps=3, warmup=None)
    assert steps_of[0].learning_rate == SETTINGS.learning_rate


def test_bfloat16_is_mixed_precision(blank_model: Path, tmp_path: Path, data: Path) -> None:
    _, steps = run(blank_model, tmp_path / "out", data, steps=4, dtype="bfloat16")
    _, expected = run(blank_model, tmp_path / "whole", data, steps=4)
    assert steps[-1].loss == pytest.approx(expected[-1].loss, abs=0.1)
    assert steps[-1].loss != expected[-1].loss


def test_two_processes_train_as_one(blank_model: Path, tmp_path: Path, data: Path) -> None:
    expected, steps = run(blank_model, tmp_path / "one", data, valid=data)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "warpbus"]
    command += ["train", str(blank_model), str(tmp_path / "two"), "--data", str(data), "--valid", str(data), "--json"]
    command += ["--device", "cpu", "--steps", "6", "--length", "32", "--rows", "4", "--rows-at-once", "1"]
    command += ["--learning-rate", "5e-3", "--warmup", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)  # one process speaks for both
    assert (expected["processes"], found["processes"]) == (1, 2)
    log = json.loads((tmp_path / "two" / "training-log.json").read_text(encoding="utf-8"))
    assert [entry["loss"] for entry in log] == pytest.approx([progress.loss for progress in steps], abs=1e-4)
    assert found["valid_loss"] == pytest.approx(expected["valid_loss"], abs=1e-4)
