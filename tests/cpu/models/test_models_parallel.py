"""Parts of a decoder on several processes compute what the whole one does, from the same weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_configs import with_traits
from quantized_files import CHATGLM, CHATGLM6B, plain_tensors, write_files, write_quantized, write_thudm
from thread_groups import (
    CHATGLM1,
    CHATGLM2,
    CPU,
    GLM,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    LLAMA,
    QWEN3,
    QWEN3_MOE,
    TOKENS,
    load,
    same_logits,
    together,
)
from torch import Tensor

from warpbus.dist import Group, Send, launch
from warpbus.errors import UsageError
from warpbus.models import SHAPES, Decoder, random_model
from warpbus.models.layers import QuantizedEmbedding, QuantizedLinear
from warpbus.models.layers.parallel import Parallel
from warpbus.models.parallel import Part, Spans
from warpbus.qtensor import Scheme


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    ("values", "form", "scheme"),
    [
        (GLM, "compressed-tensors", "w4a16-g128"),
        (GLM4, "gptq", "w3a16-g64"),
        (CHATGLM1, "compressed-tensors", "w4a16-g32"),
        (CHATGLM2, "compressed-tensors", "w8a16-asym"),
        (LLAMA, "awq", "w4a16-g64-asym"),
        (QWEN3, "compressed-tensors", "w2a16-g32-asym"),
        (GLM4_MOE, "compressed-tensors", "w4a16-g32"),
        (QWEN3_MOE, "gptq", "w4a16-g32"),
        (GLM4_MOE_LITE, "compressed-tensors", "w4a16-g32"),
    ],
)
def test_logits_of_quantized_models(tmp_path: Path, values: dict[str, Any], form: str, scheme: str, world: int) -> None:
    directory, _ = write_quantized(tmp_path / "model", values, form, scheme)
    for model in same_logits(directory, world):
        assert isinstance(model.layers[0].mlp.down.part, QuantizedLinear)


@pytest.mark.parametrize("values", [GLM, GLM4, LLAMA, QWEN3, CHATGLM1, CHATGLM2, GLM4_MOE, QWEN3_MOE, GLM4_MOE_LITE])
def test_logits_of_plain_models(tmp_path: Path, values: dict[str, Any]) -> None:
    directory = write_files(tmp_path / "model", values, plain_tensors(values, torch.float32))
    for model in same_logits(directory, 3):
        assert model.config.vocab_size == 45


@pytest.mark.parametrize("values", [GLM4_MOE, GLM4_MOE_LITE], ids=["glm4_moe", "glm4_moe_lite"])
@pytest.mark.parametrize("world", [2, 3])
@torch.no_grad()
def test_multi_token_prediction(tmp_path: Path, values: dict[str, Any], world: int) -> None:
    values = values | {"num_nextn_predict_layers": 1}
    directory = write_files(tmp_path / "model", values, plain_tensors(values, torch.float32))
    whole = load(directory, mtp=True)
    hidden = whole.hidden(TOKENS)[:, :-1]
    expected = whole.logits(whole.predict(TOKENS[:, 1:], hidden))

    def predicted(group: Group) -> Tensor:
        part = load(directory, group, mtp=True)
        return part.logits(part.predict(TOKENS[:, 1:], part.hidden(TOKENS)[:, :-1]))

    for found in together(world, predicted):
        assert torch.allclose(found, expected, rtol=0, atol=1e-5)


def test_logits_with_eight_bits_of_everything(tmp_path: Path) -> None:
    """Inputs of o and down are rounded with another scale, so that results differ as by a rounding."""
    for scheme, tolerance in (("w8a8-int8", 0.05), ("w8a8-fp8", 0.2)):
        directory, _ = write_quantized(tmp_path / scheme, GLM4, "compressed-tensors", scheme)
        same_logits(directory, 4, tolerance)


def test_logits_of_published_checkpoints_and_rounded_heads(tmp_path: Path) -> None:
    for name, values in (("thudm", CHATGLM), ("first", CHATGLM6B)):
        directory, _ = write_thudm(tmp_path / name, 4, values)
        same_logits(directory, 2, head=Scheme.parse("w8a16"))
    tied = write_files(tmp_path / "tied", LLAMA, plain_tensors(LLAMA, torch.float32))
    for model in same_logits(tied, 2, head=Scheme.parse("w8a16-g32")):
        assert isinstance(model.head.part, QuantizedLinear)


@pytest.mark.parametrize("values", [LLAMA, GLM4], ids=["tied", "untied"])
def test_logits_of_rounded_embeddings(tmp_path: Path, values: dict[str, Any]) -> None:
    """Each process has the whole embedding, and its rows of a head that is tied to it."""
    directory = write_files(tmp_path / "model", values, plain_tensors(values, torch.float32))
    for model in same_logits(directory, 3, embedding=Scheme.parse("w8a16-g32")):
        assert isinstance(model.embedding, QuantizedEmbedding)
        assert model.embedding.num_embeddings == model.config.vocab_size
        assert isinstance(model.head.part, QuantizedLinear) == (values is LLAMA)


def put_back(whole: Tensor, part: Tensor, spans: Spans) -> None:
    """Compare rows of a part with those of the whole, and leave NaN where they were."""
    done = 0
    for span in spans:
        width = span.stop - span.start
        kept = whole[span.start : span.stop]
        assert torch.equal(part[done : done + width], kept)
        assert not part[done + width : done + span.size].any()
        done += span.size
    assert done == len(part)


@pytest.mark.parametrize("scheme", ["w4a16-g128", "w3a16-asym", "w8a16-g64-asym", "w2a16-g32", "w8a8-int8", "w8a8-fp8"])
def test_no_weight_changes(tmp_path: Path, scheme: str) -> None:
    directory, _ = write_quantized(tmp_path / "model", GLM, "compressed-tensors", scheme)
    whole = load(directory)

    def weight(model: Decoder, path: str) -> Tensor:
        linear = model.get_submodule(f"layers.1.{path}")
        linear = linear.part if isinstance(linear, Parallel) else linear
        assert isinstance(linear, QuantizedLinear)
        return linear.weight.dequantize(torch.float32)

    for world in (2, 3, 4):
        seen: dict[str, set[int]] = {"attention.o": set(), "mlp.down": set()}
        for rank, model in enumerate(together(world, lambda group: load(directory, group))):
            part = Part(whole.config, rank, world)
            for path in ("attention.qkv", "mlp.gate_up"):
                own, start, done = weight(model, path), 0, 0
                for rows, spans in part.rows(f"layers.1.{path}.weight", len(own)):
                    size = sum(span.size for span in spans)
                    put_back(weight(whole, path)[start : start + rows], own[done : done + size], spans)
                    start, done = start + rows, done + size
                assert done == len(own)
            for path, columns in seen.items():
                _, spans = part.columns(f"layers.1.{path}.weight", 0)
                put_back(weight(whole, path).T, weight(model, path).T, spans)
                columns |= {column for span in spans for column in range(span.start, span.stop)}
        assert seen == {"attention.o": set(range(256)), "mlp.down": set(range(256))}


def test_how_known_models_are_cut() -> None:
    def cut(shape: str, world: int) -> list[tuple[int, int, int]]:
        parts = (Part(SHAPES[shape], rank, world).config for rank in range(world))
        return [(part.attention.num_heads, part.attention.num_kv_heads, part.layers[0].mlp.ffn_size) for part in parts]

    assert cut("chatglm2-6b", 1) == [(32, 2, 13696)]
    assert cut("chatglm2-6b", 2) == [(16, 1, 53 * 128), (16, 1, 54 * 128)]
    assert cut("chatglm2-6b", 3) == [(10, 1, 35 * 128), (12, 2, 36 * 128), (11, 1, 36 * 128)]
    assert cut("chatglm2-6b", 4) == [(8, 1, 26 * 128), *[(8, 1, 27 * 128)] * 3]
    assert cut("llama-3-8b", 3) == [(8, 2, 37 * 128), (12, 3, 37 * 128), (12, 3, 38 * 128)]
    assert {heads for heads, _, _ in cut("glm-4-9b", 8)} == {4}
    assert cut("chatglm-6b", 4) == [(8, 8, 32 * 128)] * 4
    parts = [Part(SHAPES["chatglm2-6b"], rank, 3) for rank in range(3)]
    assert [len(tokens) for tokens in parts[0].vocabulary] == [21672, 21672, 21680]
    assert sum(part.config.layers[0].mlp.ffn_size for part in parts) == 13696


def test_too_many_processes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^33 GPUs: the model has 32 heads .* use at most 32 GPUs$"):
        Part(SHAPES["glm-4-9b"], 0, 33)
    small = GLM | {"head_dim": 16, "partial_rotary_factor": 0.5}
    directory, _ = write_quantized(tmp_path / "model", small, "compressed-tensors", "w4a16-g32")
    with pytest.raises(UsageError, match=r"o_proj.weight: groups of 32 .* a GPU has columns 32 to 79, expected"):
        load(directory, Group(1, 3, CPU))


def test_random_models_of_the_first_chatglm() -> None:
    config = with_traits(
        SHAPES["chatglm-6b"], vocab_size=301, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4
    )
    config = with_traits(config, head_dim=32, ffn_size=224, rope=replace(config.rope, rotary_dim=16), prompt_end=40)

    def work(group: Group) -> tuple[Decoder, Tensor]:
        model = random_model(config, Scheme.parse("w4a16-g32"), "cpu", torch.float32, group=group)
        return model, model(TOKENS)

    (first, logits), (second, others) = together(2, work)
    assert torch.equal(logits, others)
    assert first.layers[1].mlp.down.part.bias is not None
    assert second.layers[1].mlp.down.part.bias is None
    assert not any(tensor.is_meta for model in (first, second) for tensor in model.state_dict().values())


def test_random_models() -> None:
    config = with_traits(SHAPES["chatglm2-6b"], vocab_size=301, hidden_size=128, num_layers=2, num_heads=8, head_dim=32)
    config = with_traits(config, ffn_size=224, rope=replace(config.rope, rotary_dim=16), tie_embeddings=True)

    def work(group: Group) -> tuple[Decoder, Tensor]:
        model = random_model(config, Scheme.parse("w4a16-g32"), "cpu", torch.float32, group=group)
        return model, model(TOKENS)

    (first, logits), (second, others) = together(2, work)
    assert torch.equal(logits, others)
    assert logits.shape == (2, 9, 301)
    assert 0.01 < logits.std() < 5
    assert torch.equal(first.embedding.weight, second.embedding.weight)
    assert not torch.equal(first.layers[0].attention.qkv.bias, second.layers[0].attention.qkv.bias)


def job(group: Group, send: Send, directory: Path) -> None:
    model = load(directory, group)
    with torch.no_grad():
        send((group.rank, model(TOKENS)))
    assert group.smallest(10 - group.rank) == 11 - group.world
    chosen = torch.tensor([group.rank + 7, 1])
    send((group.rank, group.broadcast(chosen)))
    halves = torch.full((3,), 0.1 + group.rank, dtype=torch.bfloat16)
    send((group.rank, group.all_reduce(halves, torch.ones(3, dtype=torch.bfloat16))))


def test_processes(tmp_path: Path) -> None:
    directory, _ = write_quantized(tmp_path / "model", CHATGLM2, "compressed-tensors", "w4a16-g32")
    with torch.no_grad():
        expected = load(directory)(TOKENS)
    said: list[tuple[int, Tensor]] = []
    launch(job, (directory,), devices=[CPU, CPU], receive=lambda message: said.append(message))
    for rank in range(2):
        logits, chosen, total = (tensor for sender, tensor in said if sender == rank)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        assert chosen.tolist() == [7, 1]
        halves = torch.tensor([0.1, 1.1], dtype=torch.bfloat16).double().sum() + 1
        assert torch.equal(total, halves.to(torch.bfloat16).expand(3))
    first, second = (next(tensor for sender, tensor in said if sender == rank) for rank in range(2))
    assert torch.equal(first, second)
