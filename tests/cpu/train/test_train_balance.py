"""Mixtures of experts trained from random weights: the load of the experts, checkpoints and several processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from warpbus.demo import recipe
from warpbus.dist import Group
from warpbus.evaluation.curve import draw_training
from warpbus.formats import Checkpoint
from warpbus.models import Decoder, load_model
from warpbus.models.families import family_of
from warpbus.models.layers import CausalAttention, MoE
from warpbus.train import TrainingProgress, TrainingSettings, train
from warpbus.train.balance import ExpertBalance, correction_biases
from warpbus.train.methods import FullMethod
from warpbus.train.recompute import recompute_layers

WriteLines = Callable[..., Path]
EXPERTS, TOP_K = 16, 2
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": EXPERTS,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
FULL = TrainingSettings(
    steps=7,
    length=24,
    rows_per_step=2,
    rows_at_once=2,
    learning_rate=5e-3,
    warmup=2,
    save_every=2,
    valid_every=3,
    balance_speed=0.01,
)
ALONE = Group(0, 1, torch.device("cpu"))
SECONDS = 180.0


@pytest.fixture(scope="module")
def blank(blank_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a mixture of experts without weights."""
    directory = tmp_path_factory.mktemp("experts")
    for file in blank_model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    size = json.loads((blank_model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    config = recipe.config(size, "poet-moe-small") | SHAPE
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def method(seed: int = 0) -> FullMethod:
    values = recipe.config(64, "poet-moe-small") | SHAPE
    family = family_of(values)
    assert family is not None
    model = Decoder(family.config(values))
    model.initialize(torch.Generator().manual_seed(seed), std=0.2)
    made = FullMethod(model)
    made.train()
    return made


def step(made: FullMethod, documents: Tensor | None = None, seed: int = 1) -> None:
    """The gradients of a batch of 4 rows of 12 tokens."""
    rows = torch.randint(4, 64, (4, 13), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(12).expand(4, -1)
    made.zero_grad()
    made(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), positions, documents).backward()


def routed(made: FullMethod, documents: Tensor | None = None, seed: int = 1) -> list[Tensor]:
    """The experts that the tokens of `step` are routed to, layer by layer."""
    found: list[Tensor] = []
    routers = [layer.mlp.router for layer in made.model.layers if isinstance(layer.mlp, MoE)]
    hooks = [router.register_forward_hook(lambda _, __, routing: found.append(routing.experts)) for router in routers]
    with torch.no_grad():
        rows = torch.randint(4, 64, (4, 13), generator=torch.Generator().manual_seed(seed))
        made.model.hidden(rows[:, :-1].contiguous(), None, CausalAttention(documents))
    for hook in hooks:
        hook.remove()
    return found


def biases(made: FullMethod) -> list[Tensor]:
    return [each.detach().clone() for each in correction_biases(made.model).values()]


@pytest.mark.parametrize("padded", [False, True])
def test_biases_rise_for_experts_with_few_tokens_and_fall_for_others(padded: bool) -> None:
    made = method()
    documents = torch.tensor([0] * 8 + [-1] * 4).expand(4, -1) if padded else None
    real = torch.ones(48, dtype=torch.bool) if documents is None else documents.flatten() >= 0
    expected = [torch.bincount(each[real].flatten(), minlength=EXPERTS) for each in routed(made, documents)]
    balance = ExpertBalance(made.model, 0.01, ALONE)
    step(made, documents)
    load = balance.update()
    mean = float(real.sum()) * TOP_K / EXPERTS
    assert load == pytest.approx(max(float(counts.max()) for counts in expected) / mean)
    for bias, counts in zip(biases(made), expected, strict=True):
        assert bias.dtype == torch.float32
        signs = [float(count < mean) - float(count > mean) for count in counts.tolist()]
        torch.testing.assert_close(bias, 0.01 * torch.tensor(signs))
    assert all(bias.any() for bias in biases(made))


def test_every_forward_pass_of_training_counts_once() -> None:
    """Neither recomputation nor validation counts, and each update begins anew."""
    plain, recomputed = method(), method()
    recompute_layers(recomputed.model)
    balances = [ExpertBalance(made.model, 0.01, ALONE) for made in (plain, recomputed)]
    for made in (plain, recomputed):
        step(made)
        step(made, seed=2)
        made.eval()
        step(made, seed=3)
        made.train()
    counted = [sum(load.counts.sum() for load in balance._loads) for balance in balances]
    assert counted == [2 * 2 * 48 * TOP_K] * 2  # two MoE layers, two batches
    assert balances[0].update() == balances[1].update()
    for one, other in zip(biases(plain), biases(recomputed), strict=True):
        assert torch.equal(one, other)
    assert sum(int(load.counts.sum()) for load in balances[0]._loads) == 0


def test_experts_without_tokens_have_gradients_of_zero() -> None:
    """So every parameter has a gradient in every process, and moments in the optimizer."""
    made = method()
    for bias in correction_biases(made.model).values():
        bias.data[5] = -10.0
    assert all((experts != 5).all() for experts in routed(made))
    step(made)
    for name, parameter in made.trained().items():
        assert parameter.grad is not None, name
        if ".experts.5." in name:
            assert not parameter.grad.any()
    assert not any("router.bias" in name for name in made.trained())


def run(
    model: Path, output: Path, data: Path, settings: TrainingSettings = FULL, stop: int = 0, **options: Any
) -> tuple[dict[str, Any], list[TrainingProgress]]:
    steps: list[TrainingProgress] = []

    def report(progress: TrainingProgress) -> None:
        steps.append(progress)
        if progress.step == stop:
            raise KeyboardInterrupt

    summary = train(model, output, data=data, valid=data, settings=settings, device="cpu", report=report, **options)
    return summary, steps


def weights(output: Path) -> dict[str, Tensor]:
    return load_file(output / "model.safetensors")


def written_biases(output: Path) -> list[Tensor]:
    return [tensor for name, tensor in sorted(weights(output).items()) if "correction_bias" in name]


def test_training_from_random_weights_balances_the_experts(blank: Path, tmp_path: Path, data: Path) -> None:
    """The router's initial scores are nearly equal, and what all tokens have in common skews the choice."""
    settings = replace(FULL, steps=60, rows_per_step=4, rows_at_once=4, save_every=100, valid_every=60)
    balanced, steps = run(blank, tmp_path / "balanced", data, settings)
    run(blank, tmp_path / "skewed", data, replace(settings, balance_speed=0.0))
    loads = [progress.expert_load or 0.0 for progress in steps]
    assert sum(loads[-10:]) < 0.6 * sum(loads[:10])
    log = json.loads((tmp_path / "skewed" / "training-log.json").read_text(encoding="utf-8"))
    assert sum(loads[-10:]) < 0.6 * sum(entry["expert_load"] for entry in log[-10:])
    assert balanced["expert_load"] == pytest.approx(sum(loads[-50:]) / 50)
    assert steps[-1].loss < 0.7 * steps[0].loss
    assert all(not bias.any() for bias in written_biases(tmp_path / "skewed"))
    for bias in written_biases(tmp_path / "balanced"):
        assert bias.dtype == torch.float32
        assert bias.any()
    model = load_model(Checkpoint(tmp_path / "balanced"), device="cpu", dtype=torch.bfloat16)
    assert all(each.dtype == torch.float32 for each in correction_biases(model).values())
    assert draw_training(tmp_path / "balanced").stat().st_size > 10_000


def test_an_interrupted_run_ends_with_the_same_bits(blank: Path, tmp_path: Path, data: Path) -> None:
    whole, steps = run(blank, tmp_path / "whole", data)
    with pytest.raises(KeyboardInterrupt):
        run(blank, tmp_path / "out", data, stop=5)
    state = torch.load(tmp_path / "out.training" / "state.pt", weights_only=True)
    assert state["step"] == 4
    kept = {name: each for name, each in state["model"].items() if name.endswith("router.bias")}
    assert len(kept) == 2
    assert all(each.any() for each in kept.values())
    assert not kept.keys() & state["optimizer"].keys()
    resumed, rest = run(blank, tmp_path / "out", data)
    assert [(each.step, each.loss, each.expert_load) for each in rest] == [
        (each.step, each.loss, each.expert_load) for each in steps[4:]
    ]
    assert resumed["expert_load"] == whole["expert_load"]
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "out")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_killed_and_resumed_by_the_command(blank: Path, tmp_path: Path, data: Path) -> None:
    arguments = [
        "--data", data, "--device", "cpu", "--workers", 1, "--steps", 40, "--length", 24, "--rows", 2,
        "--rows-at-once", 2, "--save-every", 1, "--balance-speed", 0.01,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def started(output: Path) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "warpbus", "train", *map(str, (blank, output, *arguments))]
        return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE)

    killed, state = started(tmp_path / "out"), tmp_path / "out.training" / "state.pt"
    end = time.monotonic() + SECONDS
    while not state.exists() and killed.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL, "the run was over before it could be killed"
    resumed, whole = started(tmp_path / "out"), started(tmp_path / "whole")
    said = resumed.communicate(timeout=SECONDS)[1] + whole.communicate(timeout=SECONDS)[1]
    assert (resumed.returncode, whole.returncode) == (0, 0), said
    assert "resuming after" in said
    assert said.count("busiest expert") >= 2
    one, other = weights(tmp_path / "out"), weights(tmp_path / "whole")
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(
    "changes",
    [{}, {"rows_at_once": 1}, {"sharding": "fsdp"}, {"sharding": "fsdp", "recompute": 1}],
    ids=["ddp", "accumulated", "fsdp", "recomputed"],
)
def test_two_processes_have_the_biases_of_one(blank: Path, tmp_path: Path, data: Path, changes: dict[str, Any]) -> None:
    """Some experts get tokens in one process only."""
    settings = replace(FULL, rows_per_step=4)
    one, first = run(blank, tmp_path / "one", data, settings)
    two, steps = run(blank, tmp_path / "two", data, replace(settings, **changes), processes=2)
    assert (one["processes"], two["processes"]) == (1, 2)
    assert [each.loss for each in steps] == pytest.approx([each.loss for each in first], abs=1e-5)
    assert [each.expert_load for each in steps] == [each.expert_load for each in first]
    for bias, other in zip(written_biases(tmp_path / "one"), written_biases(tmp_path / "two"), strict=True):
        assert bias.any()
        assert torch.equal(bias, other)


def test_the_best_step_has_its_own_biases(blank: Path, tmp_path: Path, data: Path) -> None:
    """The learning rate spoils the model after the first validation."""
    settings = replace(FULL, keep="best", valid_every=1, learning_rate=1.0, warmup=0)
    summary, _ = run(blank, tmp_path / "best", data, settings)
    best = summary["best_step"]
    assert best < settings.steps
    with pytest.raises(KeyboardInterrupt):
        run(blank, tmp_path / "other", data, replace(settings, save_every=best), stop=best + 1)
    state = torch.load(tmp_path / "other.training" / "state.pt", weights_only=True)
    kept = [each for name, each in sorted(state["model"].items()) if name.endswith("router.bias")]
    for bias, other in zip(written_biases(tmp_path / "best"), kept, strict=True):
        assert torch.equal(bias, other)
