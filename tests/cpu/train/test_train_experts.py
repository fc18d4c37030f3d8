"""Adapters and gradients of mixtures of experts; the oracle is transformers."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

from warpbus.cli import app
from warpbus.engine import Engine, request
from warpbus.errors import UsageError
from warpbus.formats import Checkpoint, CheckpointWriter
from warpbus.models import Decoder, load_model, read_config
from warpbus.models.adapters import Lora, load_adapter
from warpbus.models.layers import MoE, QuantizedLinear
from warpbus.models.saving import named_tensors
from warpbus.quantization import quantize
from warpbus.train import TrainingProgress, TrainingSettings, train
from warpbus.train.lora import LoraLinear, attach_lora
from warpbus.train.recompute import recompute_layers

transformers = pytest.importorskip("transformers")

WriteLines = MakeModel = Callable[..., Path]
SIZES = {"num_hidden_layers": 3, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
GLM: dict[str, Any] = SIZES | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": True,
}
QWEN: dict[str, Any] = SIZES | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "partial_rotary_factor": 1.0,
    "attention_bias": False,
}
CLASSES = {"glm4_moe": "Glm4MoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
LORA = TrainingSettings.of(
    "lora",
    rank=4,
    alpha=8.0,
    steps=8,
    length=32,
    rows_per_step=4,
    rows_at_once=2,
    warmup=2,
    learning_rate=1e-2,
    save_every=3,
)
TOKENS = torch.randint(10, 250, (3, 20), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def glm(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("experts") / "glm", **GLM)


@pytest.fixture(scope="module")
def qwen(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("experts") / "qwen", **QWEN)


def loaded(directory: Path) -> Decoder:
    return load_model(Checkpoint(directory), device="cpu", dtype=torch.float32)


def oracle_of(directory: Path) -> Any:
    kind = CLASSES[json.loads((directory / "config.json").read_text())["model_type"]]
    return getattr(transformers, kind).from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="sum")


def oracle_gradients(directory: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients by the names in the checkpoint, in which experts are not stacked."""
    oracle = oracle_of(directory)
    loss = loss_of(oracle(TOKENS[:, :-1]).logits)
    loss.backward()
    found: dict[str, Tensor] = {}
    for name, parameter in oracle.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        head, experts, leaf = name.partition(".experts.")
        if not experts:
            found[name] = gradient
            continue
        for expert, own in enumerate(gradient):
            parts = (
                zip(("gate_proj", "up_proj"), own.chunk(2), strict=True) if "gate_up" in leaf else [("down_proj", own)]
            )
            found |= {f"{head}.experts.{expert}.{part}.weight": each for part, each in parts}
    return loss.detach(), found


def check_close(found: Tensor, expected: Tensor, name: str) -> None:
    """Within 1e-5 of the largest element."""
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max()), name


@pytest.mark.parametrize("family", ["glm", "qwen"])
def test_all_gradients_are_those_of_transformers(family: str, request: pytest.FixtureRequest) -> None:
    """Router and experts too; the correction biases have no gradient."""
    directory: Path = request.getfixturevalue(family)
    expected_loss, expected = oracle_gradients(directory)
    model = loaded(directory).requires_grad_(True)
    loss = loss_of(model(TOKENS[:, :-1]))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected_loss), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.endswith("router.bias")
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    found = {name: each for name, each in named_tensors(model, torch.float32) if "correction_bias" not in name}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        check_close(gradient, expected[name], name)


def plain_copy(model: Decoder, source: Path, directory: Path) -> Path:
    """The model without quantization and with its LoRA merged, as a checkpoint with the config of `source`."""
    plain = loaded(source)
    with torch.no_grad():
        for index, matrix in model.config.matrices:
            path = f"layers.{index}.{matrix.name}"
            module = model.get_submodule(path)
            base = module.base if isinstance(module, LoraLinear) else module
            weight = base.weight.dequantize(torch.float32) if isinstance(base, QuantizedLinear) else base.weight
            if isinstance(module, LoraLinear):
                weight = weight + module.scaling * module.b @ module.a
            plain.get_parameter(f"{path}.weight").copy_(weight)
    with CheckpointWriter(directory) as writer:
        for name, tensor in named_tensors(plain, torch.float32):
            writer.add(name, tensor)
        writer.copy_file(source / "config.json")
        writer.finish()
    return directory


@pytest.mark.parametrize("scheme", [None, "w4a16-g32", "w8a16"])
@pytest.mark.parametrize("family", ["glm", "qwen"])
def test_gradients_of_a_lora_pass_through_frozen_experts(
    family: str, scheme: str | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With W = base + s B A, the gradients of A and B follow from that of W: s B^T dW and s dW A^T."""
    source: Path = request.getfixturevalue(family)
    base = source
    if scheme is not None:
        quantize(source, tmp_path / "base", scheme=scheme, algorithm="rtn", device="cpu")
        base = tmp_path / "base"
    model = loaded(base)
    torch.manual_seed(0)
    attach_lora(model, rank=4, alpha=8.0)
    for module in model.modules():
        if isinstance(module, LoraLinear):
            nn.init.normal_(module.b, std=0.02)
    loss = loss_of(model.train()(TOKENS[:, :-1]))
    loss.backward()
    assert isinstance(model.layers[1].mlp.get_submodule("experts.0.down"), QuantizedLinear if scheme else nn.Linear)
    expected_loss, gradients = oracle_gradients(plain_copy(model, source, tmp_path / "plain"))
    assert float(loss.detach()) == pytest.approx(float(expected_loss), rel=1e-5)
    prefix, checked = "model.layers.{}.", 0
    parts = {
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.o": ("self_attn.o_proj",),
        "mlp.shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        "mlp.shared.down": ("mlp.shared_experts.down_proj",),
    }
    for index, layer in enumerate(model.layers):
        for name, members in parts.items():
            try:
                lora = layer.get_submodule(name)
            except AttributeError:  # a dense layer, or Qwen, which has no shared expert
                continue
            assert isinstance(lora, LoraLinear)
            dw = torch.cat([gradients[f"{prefix.format(index)}{member}.weight"] for member in members])
            check_close(lora.a.grad, lora.scaling * lora.b.detach().T @ dw, f"{index} {name} a")
            check_close(lora.b.grad, lora.scaling * dw @ lora.a.detach().T, f"{index} {name} b")
            checked += 1
    assert checked == (3 * 2 + 2 * 2 if family == "glm" else 3 * 2)
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert all(name.endswith((".a", ".b")) and ".experts." not in name and "router" not in name for name in trained)


@pytest.mark.parametrize("family", ["glm", "qwen"])
def test_recomputed_activations_give_the_same_gradients(family: str, request: pytest.FixtureRequest) -> None:
    found = []
    for recompute in (False, True):
        model = loaded(request.getfixturevalue(family)).requires_grad_(True).train()
        if recompute:
            recompute_layers(model)
        loss_of(model(TOKENS[:, :-1])).backward()
        found.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("family", ["glm", "qwen"])
def test_autocast_does_not_round_the_router(family: str, request: pytest.FixtureRequest) -> None:
    """Training in bfloat16 runs under autocast; weights and gradients stay in float32."""
    model = loaded(request.getfixturevalue(family)).requires_grad_(True).train()
    moe = next(layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE))
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    expected = moe.router(x)
    with torch.autocast("cpu", torch.bfloat16):
        routing = moe.router(x)
        loss = loss_of(model(TOKENS[:, :-1]).float())
    assert routing.scores.dtype == torch.float32
    assert torch.equal(routing.scores, expected.scores)
    loss.backward()
    assert moe.router.weight.grad is not None
    assert moe.router.weight.grad.dtype == torch.float32


def files(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def run(
    model: Path, output: Path, data: Path, settings: TrainingSettings, stop: int = 0
) -> tuple[dict[str, Any], list[TrainingProgress]]:
    steps: list[TrainingProgress] = []

    def report(progress: TrainingProgress) -> None:
        steps.append(progress)
        if progress.step == stop:
            raise KeyboardInterrupt

    return train(model, output, data=data, valid=data, settings=settings, device="cpu", report=report), steps


@pytest.mark.parametrize("base", ["plain", "quantized", "rounded"])
def test_a_lora_is_trained_resumed_merged_and_served(glm: Path, tmp_path: Path, data: Path, base: str) -> None:
    model, settings = glm, LORA
    if base == "quantized":
        model = tmp_path / "w4"
        quantize(glm, model, scheme="w4a16-g32", algorithm="rtn", device="cpu")
    elif base == "rounded":
        settings = replace(LORA, quantize="w4a16-g32")
    before = files(model)
    summary, steps = run(model, tmp_path / "lora", data, settings)
    assert files(model) == before
    assert steps[-1].loss < 0.9 * steps[0].loss
    assert "expert_load" not in summary
    adapter = load_adapter(tmp_path / "lora", read_config(Checkpoint(model)))
    assert isinstance(adapter, Lora)
    assert {name.split(".", 2)[2] for name in adapter.parts} == {
        "attention.qkv", "attention.o", "mlp.gate_up", "mlp.down", "mlp.shared.gate_up", "mlp.shared.down"
    }  # fmt: skip
    assert summary["trained"] == sum(part.a.numel() + part.b.numel() for part in adapter.parts.values())
    # Interrupted, and resumed.
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "resumed", data, settings, stop=5)
    _, rest = run(model, tmp_path / "resumed", data, settings)
    assert rest[0].step == 4  # after the state of step 3
    assert [step.loss for step in rest] == [step.loss for step in steps[3:]]
    weights = "adapter_model.safetensors"
    assert (tmp_path / "resumed" / weights).read_bytes() == (tmp_path / "lora" / weights).read_bytes()
    if base != "plain":
        return
    # Served beside the plain model, and merged.
    arguments = ["merge", str(model), str(tmp_path / "lora"), str(tmp_path / "merged")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    merged = loaded(tmp_path / "merged")
    engine = Engine(loaded(model), adapters=[adapter], max_model_len=64)
    sequences = [request([20, 21, 22, 23], tokens=10) for _ in range(2)]
    sequences[1].adapter = adapter.name
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    for sequence, own in zip(sequences, (loaded(model), merged), strict=True):
        with torch.no_grad():
            expected = own(torch.tensor([[*sequence.prompt, *sequence.token_ids]]))[0, len(sequence.prompt) - 1 : -1]
        assert list(sequence.token_ids) == expected.argmax(-1).tolist()
    assert sequences[0].token_ids != sequences[1].token_ids


def test_a_prefix_is_trained_for_experts(glm: Path, tmp_path: Path, data: Path) -> None:
    settings = replace(LORA, method="ptuning", prefix_tokens=5, learning_rate=5e-2, quantize="w4a16-g32")
    _, steps = run(glm, tmp_path / "prefix", data, settings)
    assert steps[-1].loss < 0.97 * steps[0].loss


def test_chosen_targets(qwen: Path, tmp_path: Path, data: Path) -> None:
    run(qwen, tmp_path / "out", data, replace(LORA, targets=("attention.o",), steps=2))
    adapter = load_adapter(tmp_path / "out", read_config(Checkpoint(qwen)))
    assert isinstance(adapter, Lora)
    assert set(adapter.parts) == {f"layers.{index}.attention.o" for index in range(3)}
    message = (
        r"LoRA target 'mlp.experts.3.down': routed experts are not adapted: choose among attention.qkv, attention.o$"
    )
    with pytest.raises(UsageError, match=message):
        run(qwen, tmp_path / "other", data, replace(LORA, targets=("mlp.experts.3.down",)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp8": True}, r"--fp8: .* is a mixture of experts, which are not multiplied in FP8: drop --fp8"),
        (
            {"compile": True, "recompute": 1},
            r"--compile and --recompute: .* is a mixture of experts: use only one of the two",
        ),
    ],
)
def test_settings_that_do_not_fit_experts_are_refused(
    glm: Path, tmp_path: Path, data: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        run(glm, tmp_path / "out", data, replace(LORA, **changes))
    assert not (tmp_path / "out").exists()


def test_a_scheme_has_to_fit_the_experts_too(make_model: MakeModel, tmp_path: Path, data: Path) -> None:
    """The dense first layer has other columns."""
    model = make_model(tmp_path / "model", **GLM | {"moe_intermediate_size": 48})
    message = r"--quantize: mlp\.experts\.0\.down: 48 columns cannot be cut into groups of 32"
    with pytest.raises(UsageError, match=message):
        run(model, tmp_path / "out", data, replace(LORA, quantize="w4a16-g32"))


def test_the_correction_bias_is_only_for_full_training() -> None:
    with pytest.raises(UsageError, match="balance_speed: only for method full, not lora"):
        TrainingSettings.of("lora", balance_speed=0.01)
    with pytest.raises(UsageError, match=r"balance_speed is -1\.0: expected a number of at least 0"):
        TrainingSettings.of("full", balance_speed=-1.0)
