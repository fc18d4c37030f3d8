"""What each method trains: that the loss falls, that nothing else changes, and that what is written gives that loss."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from dense_configs import dense_config, with_traits
from torch import Tensor
from torch.nn import functional as F

from warpbus.errors import StorageError, UsageError
from warpbus.formats import Checkpoint
from warpbus.models import Decoder, DecoderLayer, ModelConfig, load_model, read_config
from warpbus.models.adapters import Lora, Prefix, load_adapter
from warpbus.models.config import RopeConfig
from warpbus.models.layers import QuantizedLinear
from warpbus.models.layers.prefixed import PrefixedAttention
from warpbus.qtensor import Scheme
from warpbus.quantization import quantize
from warpbus.train import TrainingProgress, TrainingSettings, TrainingStarted, train
from warpbus.train.dataset import Documents, assemble, tokenize
from warpbus.train.methods import FullMethod, PrefixMethod, TrainingMethod
from warpbus.train.ptuning import TrainedPrefix

WriteLines = MakeModel = Callable[..., Path]
ADAPTER = TrainingSettings.of(
    "lora", steps=12, length=32, rows_per_step=4, rows_at_once=2, warmup=2, learning_rate=1e-2, save_every=100
)
LORA = replace(ADAPTER, rank=4, alpha=8.0)
PTUNING = replace(ADAPTER, method="ptuning", prefix_tokens=5, learning_rate=5e-2)

# ChatGLM-6B's shape: prompts see each other in both directions up to token 3, positions have two dimensions.
V1 = dense_config(
    family="chatglm",
    vocab_size=48,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=48,
    norm_eps=1e-5,
    rope=RopeConfig(theta=1e4, rotary_dim=8, interleaved=False, two_dimensional=True),
    max_context=64,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    layer_norm=True,
    gated=False,
    normed_residual=2.0,
    prompt_end=3,
)


def run(
    model: Path, output: Path, data: Path, settings: TrainingSettings
) -> tuple[dict[str, Any], list[TrainingProgress]]:
    steps: list[TrainingProgress] = []
    begun: list[TrainingStarted] = []
    summary = train(
        model, output, data=data, valid=data, settings=settings, device="cpu", begun=begun.append, report=steps.append
    )
    counts = settings.steps, summary["trained"], summary["parameters"], summary["documents"], summary["epochs"]
    assert begun == [TrainingStarted(0, *counts, settings)]
    return summary, steps


def files(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def loss_one_by_one(hidden: Callable[[Tensor], Tensor], model: Decoder, documents: Documents) -> float:
    """The mean loss of the answers, each document by itself."""
    total = count = 0.0
    with torch.no_grad():
        for start, end in zip(documents.offsets[:-1], documents.offsets[1:], strict=True):
            tokens = torch.from_numpy(documents.tokens[start:end].astype(np.int64))
            learnt = torch.from_numpy(documents.answers[start + 1 : end])
            logits = model.logits(hidden(tokens[None]))[0, :-1]
            total += float(F.cross_entropy(logits[learnt], tokens[1:][learnt], reduction="sum"))
            count += int(learnt.sum())
    return total / count


def read(data: Path, model: Path) -> Documents:
    return tokenize(data, model, Checkpoint(model).config, length=32)


def test_lora_learns_and_is_written_for_peft(tiny_model: Path, tmp_path: Path, data: Path) -> None:
    before, output = files(tiny_model), tmp_path / "out"
    summary, steps = run(tiny_model, output, data, LORA)
    assert steps[-1].loss < 0.8 * steps[0].loss
    assert files(tiny_model) == before
    assert sorted(path.name for path in output.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "training-log.json",
        "training.json",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "out"]
    config = read_config(Checkpoint(tiny_model))
    adapter = load_adapter(output, config)
    assert isinstance(adapter, Lora)
    assert summary["trained"] == sum(part.a.numel() + part.b.numel() for part in adapter.parts.values())
    assert summary["settings"]["rank"] == json.loads((output / "adapter_config.json").read_text())["r"] == 4
    # What is written, added to the weights, has the loss that the last validation found.
    model = load_model(Checkpoint(tiny_model), device="cpu", dtype=torch.float32)
    start = loss_one_by_one(model.hidden, model, read(data, tiny_model))
    assert start == pytest.approx(steps[0].loss, abs=0.3)
    for path, part in adapter.parts.items():
        weight = model.get_submodule(path).weight
        assert isinstance(weight, Tensor)
        weight.data += part.b @ part.a
    assert loss_one_by_one(model.hidden, model, read(data, tiny_model)) == pytest.approx(
        summary["valid_loss"], abs=1e-5
    )


@pytest.mark.parametrize(
    ("method", "file", "key"),
    [("lora", "adapter_config.json", "base_model_name_or_path"), ("ptuning", "config.json", "_name_or_path")],
)
def test_an_adapter_names_its_model_as_the_hub_does(
    method: str, file: str, key: str, tiny_model: Path, tmp_path: Path, data: Path
) -> None:
    cached = tmp_path / "hub" / "models--THUDM--small-glm" / "snapshots" / "1a2b"
    shutil.copytree(tiny_model, cached)
    settings = TrainingSettings.of(method, steps=1, length=32, rows_per_step=4)
    for model, name in ((cached, "THUDM/small-glm"), (tiny_model, str(tiny_model))):
        output = tmp_path / model.name
        train(model, output, data=data, settings=settings, device="cpu")
        assert json.loads((output / file).read_text(encoding="utf-8"))[key] == name


@pytest.mark.parametrize("method", ["lora", "full"])
def test_other_weights_of_the_same_shape_are_another_model(
    method: str, make_model: MakeModel, tiny_model: Path, tmp_path: Path, data: Path
) -> None:
    """The frozen weights are not in the state: the rest of the steps would belong to another model."""
    settings = TrainingSettings.of(method, steps=4, length=32, rows_per_step=4, warmup=2, save_every=1)

    def stop(progress: TrainingProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny_model, tmp_path / "out", data=data, settings=settings, device="cpu", report=stop)
    other = make_model(tmp_path / "other", seed=1)
    with pytest.raises(UsageError, match=r"\(the weights of the model changed\): use the same to resume it"):
        run(other, tmp_path / "out", data, settings)
    moved = tmp_path / "moved"
    shutil.copytree(tiny_model, moved)
    train(moved, tmp_path / "out", data=data, settings=settings, device="cpu")


@pytest.mark.parametrize("method", ["lora", "ptuning", "full"])
def test_an_output_that_appeared_during_the_run_is_not_replaced(
    method: str, tiny_model: Path, tmp_path: Path, data: Path
) -> None:
    settings = TrainingSettings.of(method, steps=2, length=32, rows_per_step=4, warmup=1)
    output = tmp_path / "out"

    def write(progress: TrainingProgress) -> None:
        output.mkdir(exist_ok=True)
        (output / "config.json").write_text("{}", encoding="utf-8")

    with pytest.raises(StorageError, match="exists and is not empty"):
        train(tiny_model, output, data=data, settings=settings, device="cpu", report=write)
    assert [path.name for path in output.iterdir()] == ["config.json"]
    assert (tmp_path / "out.training" / "state.pt").exists()
    shutil.rmtree(output)
    steps: list[TrainingProgress] = []
    train(tiny_model, output, data=data, settings=settings, device="cpu", report=steps.append)
    assert steps == []
    assert (output / "training.json").exists()


def test_lora_of_some_linears_with_dropout(tiny_model: Path, tmp_path: Path, data: Path) -> None:
    settings = replace(LORA, targets=("attention.qkv",), dropout=0.3, steps=4)
    run(tiny_model, tmp_path / "out", data, settings)
    adapter = load_adapter(tmp_path / "out", read_config(Checkpoint(tiny_model)))
    assert isinstance(adapter, Lora)
    assert set(adapter.parts) == {"layers.0.attention.qkv", "layers.1.attention.qkv"}
    # The same numbers are left out again; the caller's own random numbers are not touched.
    torch.manual_seed(3)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    _, steps = run(tiny_model, tmp_path / "again", data, settings)
    assert torch.equal(torch.rand(2), drawn)
    assert steps[-1].loss == json.loads((tmp_path / "out" / "training-log.json").read_text())[-1]["loss"]
    with pytest.raises(UsageError, match=r"LoRA target 'q_proj': the layers have no such matrix"):
        run(tiny_model, tmp_path / "other", data, replace(LORA, targets=("q_proj",)))


def test_lora_on_a_base_with_a_quantized_embedding(tiny_model: Path, tmp_path: Path, data: Path) -> None:
    quantize(tiny_model, tmp_path / "base", scheme="w4a16-g32", algorithm="rtn", device="cpu", embedding="w8a16-g32")
    _, steps = run(tmp_path / "base", tmp_path / "out", data, LORA)
    assert steps[-1].loss < 0.8 * steps[0].loss


def test_lora_on_a_base_that_is_rounded_while_it_is_loaded(tiny_model: Path, tmp_path: Path, data: Path) -> None:
    _, steps = run(tiny_model, tmp_path / "out", data, replace(LORA, quantize="w4a16-g32"))
    assert steps[-1].loss < 0.8 * steps[0].loss
    rounded = load_model(
        Checkpoint(tiny_model), device="cpu", dtype=torch.float32, layer_scheme=Scheme.parse("w4a16-g32"), head=None
    )
    assert all(
        isinstance(rounded.get_submodule(f"layers.1.{matrix.name}"), QuantizedLinear)
        for matrix in rounded.config.layers[1].matrices
    )
    assert not isinstance(rounded.head, QuantizedLinear)
    _, first = run(
        tiny_model,
        tmp_path / "one",
        data,
        replace(LORA, quantize="w4a16-g32", steps=1, rows_per_step=16, learning_rate=0.0),
    )
    expected = loss_one_by_one(rounded.hidden, rounded, read(data, tiny_model))
    assert first[0].valid_loss == pytest.approx(expected, abs=1e-5)
    plain = load_model(Checkpoint(tiny_model), device="cpu", dtype=torch.float32)
    assert abs(loss_one_by_one(plain.hidden, plain, read(data, tiny_model)) - expected) > 1e-3
    with pytest.raises(UsageError, match=r"--quantize: attention.o: 32 columns cannot be cut into groups of 64"):
        run(tiny_model, tmp_path / "other", data, replace(LORA, quantize="w4a16-g64"))


@pytest.mark.parametrize("settings", [LORA, PTUNING], ids=["lora", "ptuning"])
def test_adapters_of_a_quantized_model(
    settings: TrainingSettings, tiny_model: Path, tmp_path: Path, data: Path
) -> None:
    quantize(tiny_model, tmp_path / "w4", scheme="w4a16-g32", algorithm="rtn", device="cpu")
    _, steps = run(tmp_path / "w4", tmp_path / "out", data, settings)
    assert steps[-1].loss < 0.95 * steps[0].loss
    with pytest.raises(UsageError, match=r"--quantize w4a16-g32: .* is quantized already: drop --quantize"):
        run(tmp_path / "w4", tmp_path / "other", data, replace(settings, quantize="w4a16-g32"))


def test_a_prefix_learns_and_is_written_as_chatglm_has_it(tiny_model: Path, tmp_path: Path, data: Path) -> None:
    before, output = files(tiny_model), tmp_path / "out"
    summary, steps = run(tiny_model, output, data, PTUNING)
    assert steps[-1].loss < 0.95 * steps[0].loss
    assert files(tiny_model) == before
    assert json.loads((output / "config.json").read_text())["pre_seq_len"] == 5
    config = read_config(Checkpoint(tiny_model))
    prefix = load_adapter(output, config)
    assert isinstance(prefix, Prefix)
    assert prefix.tokens == 5
    assert summary["trained"] == prefix.keys_lthd.numel() * 2
    model = load_model(Checkpoint(tiny_model), device="cpu", dtype=torch.float32)

    def hidden(tokens: Tensor) -> Tensor:
        return model.hidden(tokens, context=PrefixedAttention(prefix.keys_lthd, prefix.values_lthd))

    found = loss_one_by_one(hidden, model, read(data, tiny_model))
    assert found == pytest.approx(summary["valid_loss"], abs=1e-5)


def test_a_prefix_that_two_processes_share_is_written_in_float32(tiny_model: Path, tmp_path: Path, data: Path) -> None:
    """Whole, it is in bfloat16, as the products take it; a validation leaves it whole."""
    settings = replace(PTUNING, steps=2, dtype="bfloat16", sharding="fsdp")
    train(tiny_model, tmp_path / "out", data=data, valid=data, settings=settings, device="cpu", processes=2)
    prefix = load_adapter(tmp_path / "out", read_config(Checkpoint(tiny_model)))
    assert isinstance(prefix, Prefix)
    assert not torch.equal(prefix.keys_lthd, prefix.keys_lthd.bfloat16().float())


def test_chatglm_6b_learns(tiny_chatglm: Path, tmp_path: Path, data: Path) -> None:
    """Its prompts see each other in both directions, and end in tokens of their own."""
    full = replace(LORA, method="full", learning_rate=1e-2)
    _, steps = run(tiny_chatglm, tmp_path / "full", data, full)
    assert steps[-1].loss < 0.9 * steps[0].loss
    written = load_model(Checkpoint(tmp_path / "full"), device="cpu", dtype=torch.float32)
    found = loss_one_by_one(written.hidden, written, read(data, tiny_chatglm))
    assert found == pytest.approx(steps[-1].valid_loss, rel=0.02)  # it is written in bfloat16
    model = load_model(Checkpoint(tiny_chatglm), device="cpu", dtype=torch.float32)
    for settings in (LORA, PTUNING):
        output = tmp_path / settings.method
        summary, steps = run(tiny_chatglm, output, data, settings)
        assert steps[-1].loss < steps[0].loss
        adapter = load_adapter(output, model.config)
        context = None
        if isinstance(adapter, Prefix):
            model = load_model(Checkpoint(tiny_chatglm), device="cpu", dtype=torch.float32)
            context = PrefixedAttention(adapter.keys_lthd, adapter.values_lthd)
        else:
            for path, part in adapter.parts.items():
                weight = model.get_submodule(path).weight
                assert isinstance(weight, Tensor)
                weight.data += part.b @ part.a
        hidden = partial(model.hidden, context=context)
        found = loss_one_by_one(hidden, model, read(data, tiny_chatglm))
        assert found == pytest.approx(summary["valid_loss"], abs=1e-5)


def test_recomputed_layers_and_fp8_learn_too(tiny_model: Path, tmp_path: Path, data: Path) -> None:
    _, plain = run(tiny_model, tmp_path / "plain", data, replace(LORA, steps=3))
    _, again = run(tiny_model, tmp_path / "again", data, replace(LORA, steps=3, recompute=1))
    assert [step.loss for step in again] == [step.loss for step in plain]
    _, rounded = run(tiny_model, tmp_path / "fp8", data, replace(LORA, steps=3, fp8=True))
    assert [step.loss for step in rounded] != [step.loss for step in plain]
    assert rounded[-1].loss == pytest.approx(plain[-1].loss, abs=0.3)


def test_an_adapter_needs_weights(blank_model: Path, tmp_path: Path, data: Path) -> None:
    with pytest.raises(UsageError, match="has no weights to train ptuning for: add them, or use method full"):
        run(blank_model, tmp_path / "out", data, PTUNING)


def packed() -> Documents:
    """Three documents with prompts that end in token 3, and one of plain text."""
    drawn = np.random.default_rng(0)
    texts, answers = [], []
    for prompt, answer in ((3, 4), (5, 2), (0, 6), (2, 5)):
        ids = drawn.integers(4, 48, prompt + answer)
        if prompt:
            ids[prompt] = 3
        texts.append(ids)
        answers.append(np.arange(len(ids)) > prompt)
    lengths = [len(ids) for ids in texts]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Documents(np.concatenate(texts).astype(np.int32), np.concatenate(answers), offsets)


@pytest.mark.parametrize(
    "config",
    [V1, with_traits(V1, num_kv_heads=1, prompt_end=None, rope=replace(V1.rope, two_dimensional=False))],
    ids=["chatglm-6b", "causal"],
)
def test_packed_rows_have_the_loss_of_their_documents(config: ModelConfig) -> None:
    model = Decoder(config)
    model.initialize(torch.Generator().manual_seed(2), std=0.3)
    documents = packed()
    rows = assemble(documents, [np.arange(3), np.array([3])], 24)
    drawn = torch.Generator().manual_seed(4)
    shape = config.num_layers, 3, config.attention.num_kv_heads, config.attention.head_dim
    keys, values = (torch.randn(shape, generator=drawn) for _ in range(2))
    learnt = TrainedPrefix(keys, values)

    def prefixed(tokens: Tensor) -> Tensor:
        return model.hidden(tokens, context=PrefixedAttention(keys, values))

    methods: list[tuple[TrainingMethod, Callable[[Tensor], Tensor]]] = [
        (FullMethod(model), model.hidden),
        (PrefixMethod(model, learnt), prefixed),
    ]
    targets = int((rows.targets != -100).sum())
    for method, hidden in methods:
        loss = method(rows.tokens, rows.targets, rows.positions, rows.documents)
        assert float(loss.detach()) / targets == pytest.approx(loss_one_by_one(hidden, model, documents), abs=1e-5)
        loss.backward()
    assert learnt.keys.grad is not None
    assert all(layer.abs().sum() > 0 for layer in learnt.keys.grad)


@pytest.mark.parametrize(
    "config",
    [V1, replace(V1, prompt_end=None, rope=replace(V1.rope, two_dimensional=False))],
    ids=["chatglm-6b", "causal"],
)
def test_a_prefix_begins_as_keys_that_are_not_rotated(config: ModelConfig) -> None:
    model = Decoder(config)
    model.initialize(torch.Generator().manual_seed(2), std=0.3)
    prefix = TrainedPrefix.beginning(model, np.array([7, 9], np.int32), 3)
    assert prefix.keys.shape == (2, 3, 2, 16)
    # In the first layer they are what the projection gives, of the tokens in turn.
    with torch.no_grad():
        layer = cast(DecoderLayer, model.layers[0])
        normed = layer.attention_norm(model.embedding(torch.tensor([7, 9, 7])))
        _, keys, values = layer.attention.qkv(normed).split(config.attention.qkv_rows, dim=-1)
    assert torch.allclose(prefix.keys[0].flatten(1), keys, atol=1e-6)
    assert torch.allclose(prefix.values[0].flatten(1), values, atol=1e-6)
    assert prefix.keys.requires_grad
