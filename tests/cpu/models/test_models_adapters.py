"""Adapters of every family: what is loaded computes what the file means, and what is saved is loaded again."""

import json
import math
from pathlib import Path

import pytest
import torch
from adapter_files import (
    VALUES,
    distance,
    loaded,
    logits,
    lora_tensors,
    modules_of,
    targets_of,
    with_lora,
    write_lora,
    write_model,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from warpbus.errors import CheckpointError, StorageError, TensorError, UsageError
from warpbus.models import Decoder
from warpbus.models.adapters import Lora, LowRank, Prefix, load_adapter, save_lora, save_prefix
from warpbus.models.families import family_of

START = "base_model.model."


def config_of(family: str):
    return family_of(VALUES[family]).config(VALUES[family])


def adapt(model: Decoder, lora: Lora) -> Decoder:
    """Beside each linear, `(x a^T) b^T` is computed and added to what it gives."""

    def add(part: LowRank):
        def hook(linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return output + (inputs[0] @ part.a.T) @ part.b.T

        return hook

    for name, part in lora.parts.items():
        model.get_submodule(name).register_forward_hook(add(part))
    return model


@pytest.mark.parametrize("family", VALUES)
def test_a_lora_computes_what_its_file_means(family: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", family)
    tensors = lora_tensors(modules_of(family))
    write_lora(tmp_path / "lora", tensors, target_modules=targets_of(family))
    reference = logits(loaded(with_lora(model, tmp_path / "by-hand", tensors, 6 / 4, START)), family)
    plain = logits(loaded(model), family)
    lora = load_adapter(tmp_path / "lora", config_of(family), name="poet")
    assert isinstance(lora, Lora)
    assert lora.name == "poet"
    assert set(lora.parts) == {f"layers.{index}.{matrix.name}" for index, matrix in config_of(family).matrices}
    assert distance(plain, reference) > 0.1
    assert distance(logits(adapt(loaded(model), lora), family), reference) < 1e-5


@pytest.mark.parametrize("family", ["chatglm", "chatglm2", "glm", "qwen3"])
@pytest.mark.parametrize("alpha", [6.0, 3.0])
def test_a_saved_lora_is_loaded_again(family: str, alpha: float, tmp_path: Path) -> None:
    config = config_of(family)
    first = load_adapter(write_lora(tmp_path / "lora", lora_tensors(modules_of(family))), config)
    assert isinstance(first, Lora)
    save_lora(tmp_path / "again", first, config, base="some/model", rank=4, alpha=alpha)
    second = load_adapter(tmp_path / "again", config)
    assert isinstance(second, Lora)
    assert second.name == "again"
    assert second.rank == first.rank
    for linear, part in first.parts.items():
        torch.testing.assert_close(second.parts[linear].a, part.a, rtol=0, atol=0)
        torch.testing.assert_close(second.parts[linear].b, part.b)
    described = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert described["peft_type"] == "LORA"
    assert (described["r"], described["lora_alpha"]) == (4, alpha)
    assert described["base_model_name_or_path"] == "some/model"
    assert described["target_modules"] == sorted(targets_of(family))
    stored = load_file(tmp_path / "again" / "adapter_model.safetensors")
    expected = lora_tensors(modules_of(family))
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = 6 / alpha if name.endswith("lora_B.weight") else 1.0
        torch.testing.assert_close(stored[name], tensor * scale)


@pytest.mark.parametrize("family", ["chatglm", "llama"])
def test_what_was_trained_on_fused_linears_is_split_and_joined(family: str, tmp_path: Path) -> None:
    """One A for the whole linear: each part gets it, and loading joins them to the same rank again."""
    config, generator = config_of(family), torch.Generator().manual_seed(1)
    shapes = {"layers.0.attention.qkv": (sum(config.attention.qkv_rows), 64), "layers.1.mlp.down": (64, 96)}
    parts = {
        name: LowRank(torch.randn(3, width, generator=generator), torch.randn(out, 3, generator=generator))
        for name, (out, width) in shapes.items()
    }
    save_lora(tmp_path / "lora", Lora("x", parts), config, base="model", rank=3, alpha=6.0)
    described = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert described["rank_pattern"] == {}
    stored = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    # Not in every layer: the names are whole ones.
    assert {f"{START}{name}.lora_A.weight" for name in described["target_modules"]} == {
        name for name in stored if "lora_A" in name
    }
    if family == "llama":
        q, k, v = (stored[f"{START}model.layers.0.self_attn.{part}_proj.lora_B.weight"] for part in "qkv")
        torch.testing.assert_close(torch.cat([q, k, v]) * 2, parts["layers.0.attention.qkv"].b)
    else:
        b = stored[f"{START}transformer.layers.0.attention.query_key_value.lora_B.weight"] * 2
        by_head = b.view(4, 3, 16, 3).transpose(0, 1).reshape(192, 3)
        torch.testing.assert_close(by_head, parts["layers.0.attention.qkv"].b)
    again = load_adapter(tmp_path / "lora", config)
    assert isinstance(again, Lora)
    assert again.rank == 3
    for name, part in parts.items():
        torch.testing.assert_close(again.parts[name].a, part.a)
        torch.testing.assert_close(again.parts[name].b, part.b)


def test_a_lora_that_has_learned_nothing_is_saved(tmp_path: Path) -> None:
    part = LowRank(torch.ones(2, 64), torch.zeros(256, 2))
    save_lora(
        tmp_path / "lora", Lora("x", {"layers.0.attention.qkv": part}), config_of("glm"), base="", rank=2, alpha=2
    )
    again = load_adapter(tmp_path / "lora", config_of("glm"))
    assert isinstance(again, Lora)
    assert torch.equal(again.parts["layers.0.attention.qkv"].a, part.a)
    assert torch.equal(again.parts["layers.0.attention.qkv"].b, part.b)


def test_some_parts_of_a_linear(tmp_path: Path) -> None:
    """Only q and v, and v alone in the second layer: the rows of k stay, and nothing of the first meets the second."""
    shapes = {
        name: shape for name, shape in modules_of("llama").items() if name.endswith(("0.self_attn.q_proj", "v_proj"))
    }
    model, tensors = write_model(tmp_path / "model", "llama"), lora_tensors(shapes)
    lora = load_adapter(write_lora(tmp_path / "lora", tensors), config_of("llama"))
    assert isinstance(lora, Lora)
    assert {name: part.rank for name, part in lora.parts.items()} == {
        "layers.0.attention.qkv": 8,
        "layers.1.attention.qkv": 4,
    }
    assert lora.rank == 8
    assert lora.nbytes == 4 * (8 * (64 + 256) + 4 * (64 + 256))
    assert not lora.parts["layers.0.attention.qkv"].b[128:192].any()
    reference = logits(loaded(with_lora(model, tmp_path / "by-hand", tensors, 6 / 4, START)), "llama")
    assert distance(logits(adapt(loaded(model), lora), "llama"), reference) < 1e-5
    save_lora(tmp_path / "again", lora, config_of("llama"), base="", rank=4, alpha=4.0)
    assert load_file(tmp_path / "again" / "adapter_model.safetensors").keys() == tensors.keys()


def test_ranks_and_scalings_of_single_modules(tmp_path: Path) -> None:
    """`rank_pattern` and `alpha_pattern` name the ends of modules; the first that matches counts."""
    shapes = modules_of("llama")
    ranks = {name: 2 if "q_proj" in name else 6 if "layers.1.self_attn.k" in name else 4 for name in shapes}
    alphas = {name: 3.0 if "down_proj" in name else 5.0 if "layers.0.self_attn.o" in name else 6.0 for name in shapes}
    tensors = lora_tensors(shapes, ranks)
    write_lora(
        tmp_path / "lora",
        tensors,
        use_rslora=True,
        rank_pattern={"q_proj": 2, r"layers\.1\.self_attn\.k_proj": 6, ".*q_proj": 9},
        alpha_pattern={"(down|no)_proj": 3, "model.layers.0.self_attn.o_proj": 5.0},
        target_modules=r".*\.(self_attn|mlp)\.[a-z_]*proj",
    )
    model = write_model(tmp_path / "model", "llama")
    scaling = {name: alphas[name] / math.sqrt(ranks[name]) for name in shapes}
    reference = logits(loaded(with_lora(model, tmp_path / "by-hand", tensors, scaling, START)), "llama")
    lora = load_adapter(tmp_path / "lora", config_of("llama"))
    assert isinstance(lora, Lora)
    assert lora.parts["layers.1.attention.qkv"].rank == 2 + 6 + 4
    assert distance(logits(adapt(loaded(model), lora), "llama"), reference) < 1e-5
    # PEFT's own form has a rank and an alpha for each module whose rank is another; the function is the same.
    save_lora(tmp_path / "again", lora, config_of("llama"), base="", rank=4, alpha=8.0)
    described = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert described["rank_pattern"]["model.layers.0.self_attn.q_proj"] == 2
    assert described["alpha_pattern"]["model.layers.0.self_attn.q_proj"] == 4.0
    again = load_adapter(tmp_path / "again", config_of("llama"))
    assert isinstance(again, Lora)
    assert distance(logits(adapt(loaded(model), again), "llama"), reference) < 1e-5


@pytest.mark.parametrize("kind", ["without the model's name", "another model. in front", "no prefix of PEFT", "bin"])
def test_other_spellings_of_the_same(kind: str, tmp_path: Path) -> None:
    shapes = modules_of("glm")
    expected = load_adapter(write_lora(tmp_path / "plain", lora_tensors(shapes)), config_of("glm"))
    start = START
    if kind == "without the model's name":
        shapes = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    elif kind == "another model. in front":
        shapes = {f"model.{name}": shape for name, shape in shapes.items()}
    elif kind == "no prefix of PEFT":
        start = ""
    write_lora(tmp_path / "lora", lora_tensors(shapes, start=start), target_modules=targets_of("glm"))
    if kind == "bin":
        torch.save(load_file(tmp_path / "lora" / "adapter_model.safetensors"), tmp_path / "lora" / "adapter_model.bin")
        (tmp_path / "lora" / "adapter_model.safetensors").unlink()
    found = load_adapter(tmp_path / "lora", config_of("glm"))
    assert isinstance(expected, Lora)
    assert isinstance(found, Lora)
    assert found.parts.keys() == expected.parts.keys()
    assert all(torch.equal(found.parts[name].b, part.b) for name, part in expected.parts.items())


def test_dtype(tmp_path: Path) -> None:
    tensors = lora_tensors(modules_of("glm"))
    write_lora(tmp_path / "lora", {name: tensor.bfloat16() for name, tensor in tensors.items()})
    lora = load_adapter(tmp_path / "lora", config_of("glm"), dtype=torch.float16)
    assert isinstance(lora, Lora)
    assert {part.a.dtype for part in lora.parts.values()} | {part.b.dtype for part in lora.parts.values()} == {
        torch.float16
    }
    name = f"{START}model.layers.1.mlp.down_proj.lora_B.weight"
    write_lora(tmp_path / "large", tensors | {name: tensors[name] * 1e6})
    with pytest.raises(TensorError, match=r"layers\.1\.mlp\.down: has values that torch\.float16 cannot hold"):
        load_adapter(tmp_path / "large", config_of("glm"), dtype=torch.float16)


@pytest.mark.parametrize("family", ["chatglm", "chatglm2", "glm", "llama"])
def test_a_prefix_is_read_as_the_file_means_it(family: str, tmp_path: Path) -> None:
    config, tokens = config_of(family), 5
    heads, dim = config.attention.num_kv_heads, config.attention.head_dim
    rows = torch.randn(tokens, 2 * 2 * heads * dim, generator=torch.Generator().manual_seed(2))
    tmp_path.joinpath("config.json").write_text(json.dumps(VALUES[family] | {"pre_seq_len": tokens}))
    save_file({"transformer.prefix_encoder.embedding.weight": rows}, tmp_path / "model.safetensors")
    prefix = load_adapter(tmp_path, config, name="p")
    assert isinstance(prefix, Prefix)
    assert (prefix.name, prefix.tokens, prefix.keys_lthd.shape) == ("p", tokens, (2, tokens, heads, dim))
    assert prefix.nbytes == rows.nbytes
    for layer in range(2):
        for head in range(heads):
            for found, slot in ((prefix.keys_lthd, 2 * layer), (prefix.values_lthd, 2 * layer + 1)):
                start = (slot * heads + head) * dim
                assert torch.equal(found[layer, :, head], rows[:, start : start + dim])
    save_prefix(tmp_path / "again", prefix, config, base="some/model")
    stored = load_file(tmp_path / "again" / "model.safetensors")
    assert torch.equal(stored["transformer.prefix_encoder.embedding.weight"], rows)
    described = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (described["pre_seq_len"], described["prefix_projection"]) == (tokens, False)
    again = load_adapter(tmp_path / "again", config)
    assert isinstance(again, Prefix)
    assert torch.equal(again.keys_lthd, prefix.keys_lthd)
    assert torch.equal(again.values_lthd, prefix.values_lthd)


def test_saving_refuses(tmp_path: Path) -> None:
    config = config_of("glm")
    fits = Lora("x", {"layers.0.attention.o": LowRank(torch.ones(2, 128), torch.ones(64, 2))})
    for lora, message in (
        (
            Lora("x", {"layers.9.attention.o": fits.parts["layers.0.attention.o"]}),
            r"x: layers\.9\.attention\.o: expected",
        ),
        (Lora("x", {"layers.0.mlp.down": fits.parts["layers.0.attention.o"]}), r"\[64, 96\], found \[64, 128\]"),
    ):
        with pytest.raises(TensorError, match=message):
            save_lora(tmp_path / "out", lora, config, base="", rank=2, alpha=2.0)
    for rank, alpha in ((0, 1.0), (5000, 1.0), (2, 0.0), (2, math.nan)):
        with pytest.raises(UsageError, match="expected a rank from 1 to 4096"):
            save_lora(tmp_path / "out", fits, config, base="", rank=rank, alpha=alpha)
    narrow = torch.ones(2, 3, 2, 16)
    with pytest.raises(TensorError, match=r"expected keys and values \[2, 1 to 8192, 2, 32\]"):
        save_prefix(tmp_path / "out", Prefix("p", narrow, narrow), config, base="")
    assert list(tmp_path.iterdir()) == []
    save_lora(tmp_path / "out", fits, config, base="", rank=2, alpha=2.0)
    with pytest.raises(StorageError, match="exists and is not empty"):
        save_lora(tmp_path / "out", fits, config, base="", rank=2, alpha=2.0)
    save_lora(tmp_path / "out", fits, config, base="", rank=2, alpha=4.0, overwrite=True)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_alpha"] == 4.0


def refused(directory: Path, family: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load_adapter(directory, config_of(family))
    assert len(str(caught.value).splitlines()) == 1


def test_what_is_no_adapter(tmp_path: Path) -> None:
    refused(tmp_path / "none", "glm", "none: there is no such directory")
    refused(
        tmp_path, "glm", r"holds no adapter: expected adapter_config\.json \(LoRA\), or a config\.json with pre_seq_len"
    )
    refused(write_model(tmp_path / "model", "glm"), "glm", "holds no adapter")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "glm", "file: is a file")


def test_adapters_of_another_model(tmp_path: Path) -> None:
    tensors = lora_tensors(modules_of("glm"))
    refused(
        write_lora(tmp_path / "names", tensors),
        "chatglm2",
        r"adapter_model\.safetensors: model\.layers\.0\.mlp\.down_proj: .* chatglm2 model has no linear layer",
    )
    name = f"{START}model.layers.1.mlp.down_proj.lora_B.weight"
    refused(
        write_lora(tmp_path / "shape", tensors | {name: torch.ones(63, 4)}),
        "glm",
        r"model\.layers\.1\.mlp\.down_proj: expected matrices \[4, 96\] and \[64, 4\].*found \[4, 96\] and \[63, 4\]",
    )
    refused(
        write_lora(tmp_path / "head", tensors | lora_tensors({"lm_head": (48, 64)})),
        "glm",
        r"lm_head: a decoder layer of this glm model has no linear layer of that name",
    )


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    tensors = lora_tensors(modules_of("glm"))
    refused(
        write_lora(tmp_path / "more", tensors, target_modules=["q_proj", "down_proj"]),
        "glm",
        r"gate_up_proj: it has matrices, but adapter_config\.json does not have it among its target_modules",
    )
    fewer = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.down" not in name}
    refused(
        write_lora(tmp_path / "fewer", fewer, target_modules=targets_of("glm")),
        "glm",
        r"model\.layers\.1\.mlp\.down_proj: .* the matrices are missing",
    )
    assert load_adapter(write_lora(tmp_path / "unsaid", fewer), config_of("glm"))
    chosen = {name: tensor for name, tensor in tensors.items() if "layers.0.mlp" in name}
    assert load_adapter(
        write_lora(
            tmp_path / "chosen",
            chosen,
            target_modules=targets_of("glm"),
            layers_to_transform=[0],
            exclude_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        ),
        config_of("glm"),
    )
