"""Quantizing mixtures of experts where something goes wrong: killed at any moment, or with a damaged checkpoint."""

import json
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from quantization_models import write_model
from quantization_runs import Runs, command, fingerprint
from safetensors.torch import load_file, save_file

from warpbus.formats import Checkpoint, FinishedParts
from warpbus.models import Decoder
from warpbus.models.families import family_of
from warpbus.models.saving import named_tensors

LAYERS, KILLS = 2, 8
SMALL = {"num_hidden_layers": LAYERS, "hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
EXPERTS = {"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
CONFIG = {
    **SMALL,
    **EXPERTS,
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "num_nextn_predict_layers": 1,
}
ROUTER_BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense layer, one with experts, and the layer of multi-token prediction, which has experts too."""
    directory = write_model(tmp_path_factory.mktemp("experts") / "model", **CONFIG)
    settings = json.loads((directory / "config.json").read_text())
    family = family_of(settings)
    assert family is not None
    decoder = Decoder(family.config(settings))
    decoder.initialize(torch.Generator().manual_seed(3), std=0.08)
    save_file(dict(named_tensors(decoder, torch.float32)), directory / "model.safetensors")
    return directory


def test_kills_at_any_moment_end_in_the_same_model(runs: Runs, model: Path, texts: Path, tmp_path: Path) -> None:
    """Each at a random moment of a random stage; the same command goes on, and the model has the same bits."""
    whole = runs.start(*command(model, tmp_path / "whole", texts))
    assert whole.code == 0, whole.said
    expected = fingerprint(tmp_path / "whole")
    chance, kills, reached = random.Random(7), 0, set()
    output, parts = tmp_path / "out", tmp_path / "out.quantization"
    stages = ["run", *(f"layer-{index:05}" for index in range(LAYERS + 1)), "order"]
    while kills < KILLS or not output.exists() or parts.exists():
        ahead = [path for name in stages if not (path := parts / f"{name}.json").exists()]
        moment = {"when": chance.choice(ahead[:2] or [parts]), "after": chance.uniform(0, whole.seconds / len(stages))}
        run = runs.start(*command(model, output, texts), **(moment if kills < KILLS else {}))
        assert run.code in (0, -signal.SIGKILL), run.said
        kills += run.code != 0
        reached.add(len(FinishedParts(output).parts()))
        if output.exists():
            assert fingerprint(output) == expected
            if kills < KILLS and not parts.exists():
                shutil.rmtree(output)
    assert fingerprint(output) == expected
    assert len(reached) > 2  # they were killed at different layers


@pytest.mark.parametrize(
    ("missing", "changes", "message"),
    [
        ("model.layers.1.mlp.experts.3.up_proj", {}, "tensor model.layers.1.mlp.experts.3.up_proj.weight is missing"),
        ("", {"n_group": 2}, "config.json: n_group: expected a divisor of n_routed_experts (5), but found 2"),
        (ROUTER_BIAS, {}, f"tensor {ROUTER_BIAS} is missing"),
    ],
)
def test_damaged_checkpoints_are_refused_in_one_line(
    runs: Runs, model: Path, texts: Path, tmp_path: Path, missing: str, changes: dict[str, object], message: str
) -> None:
    """Before anything is written."""
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    tensors = load_file(damaged / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not (missing and name.startswith(missing))}
    save_file(kept, damaged / "model.safetensors")
    (damaged / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | changes))
    run = runs.start(*command(damaged, tmp_path / "out", texts))
    assert run.code == 1
    reported = "".join(run.said.split())  # the terminal wraps long lines
    assert "".join(message.split()) in reported
    assert reported.count("error:") == 1
    assert "Traceback" not in run.said
    assert not (tmp_path / "out").exists()


def test_an_announced_layer_of_multi_token_prediction_may_be_absent(
    runs: Runs, model: Path, texts: Path, tmp_path: Path
) -> None:
    """The model is quantized without it, and loads."""
    without = tmp_path / "without"
    shutil.copytree(model, without)
    tensors = load_file(without / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if f".layers.{LAYERS}." not in name}
    assert len(kept) < len(tensors)
    save_file(kept, without / "model.safetensors")
    run = runs.start(*command(without, tmp_path / "out", texts))
    assert run.code == 0, run.said
    assert not any(f".layers.{LAYERS}." in name for name in Checkpoint(tmp_path / "out").names())
