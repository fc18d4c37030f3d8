"""Multi-head latent attention: what is read and refused, its two forms, and what is dequantized when it is loaded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import HF, plain_tensors, write_files, write_quantized
from torch import nn

from warpbus.dist import Group, Send, launch
from warpbus.engine import Engine, request
from warpbus.errors import CheckpointError, UsageError
from warpbus.formats import Checkpoint
from warpbus.models import (
    SHAPES,
    Decoder,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelConfig,
    NormSpec,
    RopeConfig,
    load_model,
    quantized_parameters,
    random_model,
)
from warpbus.models.adapters import Lora, LowRank
from warpbus.models.adapters.sites import sites
from warpbus.models.cost import forward_flop, kv_cache_bytes, parameter_bytes
from warpbus.models.families import family_of
from warpbus.models.layers import LatentAttention, MoE, QuantizedLinear
from warpbus.qtensor import Scheme

FLASH: dict[str, Any] = HF | {
    "model_type": "glm4_moe_lite",
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 24,
    "head_dim": 16,  # another name of qk_rope_head_dim
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [20, 21, 22, 23, 24, 25, 26]]
CPU = torch.device("cpu")


def parsed(values: dict[str, Any]) -> ModelConfig:
    family = family_of(values)
    assert family is not None
    return family.config(values)


def loaded(directory: Path, **options: Any) -> Decoder:
    return load_model(Checkpoint(directory), device="cpu", dtype=torch.float32, **options)


def attention_of(model: Decoder, index: int = 0) -> LatentAttention:
    attention = model.layers[index].attention
    assert isinstance(attention, LatentAttention)
    return attention


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_files(tmp_path / "plain", FLASH, plain_tensors(FLASH, torch.float32))


def test_the_published_config_is_read() -> None:
    """GLM-4.7-Flash: 30 billion parameters, 3 billion of them for each token; 576 numbers per token and layer."""
    config = parsed(
        {
            "model_type": "glm4_moe_lite",
            "attention_bias": False,
            "eos_token_id": [154820, 154827, 154829],
            "first_k_dense_replace": 1,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "kv_lora_rank": 512,
            "max_position_embeddings": 202752,
            "moe_intermediate_size": 1536,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 20,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 47,
            "num_key_value_heads": 20,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 1.0,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "routed_scaling_factor": 1.8,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "v_head_dim": 256,
            "vocab_size": 154880,
        }
    )
    assert config == SHAPES["glm-4.7-flash"].with_mtp()
    config = replace(config, mtp=None)
    assert round(config.num_parameters / 1e9) == 30
    assert round(forward_flop(config) / 2e9, 1) == 3.6  # with the head of 0.3
    assert kv_cache_bytes(config, torch.bfloat16, torch.bfloat16) == 47 * 576 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads: 2 is not supported, only 4: every head has keys"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim: expected an even size, but found 15"),
        ({"kv_lora_rank": None}, "kv_lora_rank: expected an integer from 1 to"),
        ({"v_head_dim": 0}, "v_head_dim: expected an integer from 1 to"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported, only 1.0"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types: expected dense or sparse for each of 2 layers"),
        ({"mlp_layer_types": ["dense", "moe"]}, "mlp_layer_types: expected dense or sparse for each of 2 layers"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type: 'yarn' is not supported"),
    ],
)
def test_senseless_configs_are_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parsed(FLASH | changes)
    assert message in str(caught.value)


def test_the_kinds_of_layers_come_from_a_list_or_a_count() -> None:
    kinds = parsed(FLASH | {"mlp_layer_types": ["sparse", "dense"]})
    assert [isinstance(layer.mlp, MLPSpec) for layer in kinds.layers] == [False, True]
    counted = parsed(FLASH | {"first_k_dense_replace": 2})
    assert not counted.has_experts


def small(query_rank: int | None) -> ModelConfig:
    attention = LatentAttentionSpec(3, query_rank, kv_rank=20, nope_dim=10, rope_dim=6, value_dim=7, norm_eps=1e-6)
    layer = LayerSpec(32, attention, MLPSpec(48), NormSpec(1e-5))
    return ModelConfig("glm4_moe_lite", 50, (layer,) * 2, RopeConfig(1e4, 6, interleaved=True), 64)


@pytest.mark.parametrize("query_rank", [None, 12])
@torch.no_grad()
def test_both_forms_of_attention_are_the_same(query_rank: int | None) -> None:
    """Scores and outputs of heads with keys and values of their own, and of one KV head of latents."""
    attention = attention_of(random_model(small(query_rank), None, "cpu", torch.float64))
    q, latent = torch.randn(9, 3, 16).double(), torch.randn(9, 26).double()
    k, v = attention.expand(latent)
    assert (k.shape, v.shape) == ((9, 3, 16), (9, 3, 7))
    torch.testing.assert_close(attention.absorb(q) @ latent.T, torch.einsum("thd,shd->ths", q, k))
    weights = torch.rand(9, 3, 9).double()
    expected = torch.einsum("ths,shv->thv", weights, v)
    torch.testing.assert_close(attention.outputs(weights @ latent[:, :20]), expected)


@torch.no_grad()
def test_a_quantized_projection_of_latents_is_dequantized_when_it_is_loaded(tmp_path: Path) -> None:
    directory, same = write_quantized(tmp_path / "model", FLASH, "compressed-tensors", "w4a16-g32")
    model, attention = loaded(directory), attention_of(loaded(directory))
    assert isinstance(attention.kv_b, nn.Linear)
    assert torch.equal(attention.kv_b.weight, same["model.layers.0.self_attn.kv_b_proj.weight"])
    for name in ("qkv_a", "q_b", "o"):
        assert isinstance(attention.get_submodule(name), QuantizedLinear)
    expected = loaded(write_files(tmp_path / "plain", FLASH, same))
    tokens = torch.tensor([[3, 4, 5, 6, 7]])
    torch.testing.assert_close(model(tokens), expected(tokens), rtol=1e-4, atol=1e-5)
    schemes = quantized_parameters(Checkpoint(directory), model.config)
    sizes = parameter_bytes(model.config, torch.float16, schemes)
    assert sizes["layers.0.attention.kv_b.weight"] == 2 * 4 * (24 + 32) * 96
    assert sizes["layers.0.attention.q_b.weight"] < 4 * (24 + 16) * 64


def test_the_projection_of_latents_is_not_rounded_while_loading(plain: Path) -> None:
    rounded = attention_of(loaded(plain, layer_scheme=Scheme.parse("w4a16-g32")))
    assert isinstance(rounded.o, QuantizedLinear)
    assert torch.equal(rounded.kv_b.weight, attention_of(loaded(plain)).kv_b.weight)


@torch.no_grad()
def test_random_models_route_to_different_experts() -> None:
    """Experts that are chosen alike by all tokens would make a benchmark read too few of them."""
    shape = SHAPES["glm-4.7-flash"]
    attention = replace(shape.attention, num_heads=2, query_rank=32, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16)
    layers = tuple(replace(layer, hidden_size=64, attention=attention) for layer in shape.layers[:2])
    rope = replace(shape.rope, rotary_dim=8)
    model = random_model(replace(shape, vocab_size=90, layers=layers, rope=rope), Scheme(4, 32), "cpu", torch.float32)
    assert isinstance(attention_of(model).kv_b, nn.Linear)
    assert isinstance(attention_of(model).q_b, QuantizedLinear)
    mlp = model.layers[1].mlp
    assert isinstance(mlp, MoE)
    assert mlp.router.bias is not None
    assert mlp.router.bias.dtype == torch.float32
    chosen = mlp.router(torch.randn(200, 64)).experts
    assert len(chosen.unique()) > 40
    assert model(torch.arange(30)[None]).isfinite().all()


def generated(model: Decoder, **options: Any) -> list[list[int]]:
    return [list(answer) for answer in Engine(model, max_model_len=64, **options).decode(PROMPTS, 12)]


def job(group: Group, send: Send, directory: Path) -> None:
    send((group.rank, generated(loaded(directory, group=group))))


def test_two_processes_generate_the_tokens_of_one(plain: Path) -> None:
    """Each has half of the heads, and all latents in its cache."""
    said: dict[int, list[list[int]]] = {}
    launch(job, (plain,), devices=[CPU, CPU], receive=lambda message: said.update([message]))
    assert said == dict.fromkeys((0, 1), generated(loaded(plain)))


def lora(config: ModelConfig, *names: str) -> Lora:
    generator = torch.Generator().manual_seed(2)
    matrices = {f"layers.{index}.{matrix.name}": matrix for index, matrix in config.matrices}

    def drawn(rows: int, columns: int) -> LowRank:
        return LowRank(*(0.4 * torch.randn(shape, generator=generator) for shape in ((2, columns), (rows, 2))))

    return Lora("style", {name: drawn(*matrices[name].shape) for name in names})


@torch.no_grad()
def test_loras_of_the_other_matrices(plain: Path) -> None:
    model = loaded(plain)
    names = [f"layers.1.attention.{name}" for name in ("qkv_a", "q_b", "o")]
    adapter = lora(model.config, *names)
    engine = Engine(model, adapters=[adapter], max_model_len=64)
    merged = loaded(plain)
    for name, low in adapter.parts.items():
        merged.get_parameter(f"{name}.weight").add_(low.b @ low.a)
    expected = generated(merged)
    assert expected != generated(loaded(plain))
    assert [answer_with(engine, prompt) for prompt in PROMPTS] == expected


def answer_with(engine: Engine, prompt: list[int]) -> list[int]:
    sequence = request(prompt, tokens=12)
    sequence.adapter = "style"
    engine.add(sequence)
    while engine.has_work:
        engine.step()
    return list(sequence.token_ids)


def test_loras_of_the_projection_of_latents_are_refused(plain: Path) -> None:
    model = loaded(plain)
    with pytest.raises(CheckpointError, match=r"^style: layers\.1\.attention\.kv_b: LoRAs of this matrix are not supp"):
        Engine(model, adapters=[lora(model.config, "layers.1.attention.kv_b")])


def test_loras_name_the_modules_of_the_file() -> None:
    found = sites(parsed(FLASH))
    keys = found["model.layers.0.self_attn.kv_a_proj_with_mqa"]
    assert (keys.linear, keys.start, keys.rows, keys.columns) == ("layers.0.attention.qkv_a", 64, 112, 64)
    assert found["model.layers.0.self_attn.q_a_proj"].start == 0


def test_static_scales_of_a_cache_of_latents_are_refused(tmp_path: Path) -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    directory, _ = write_quantized(tmp_path / "scaled", FLASH, "compressed-tensors", "w4a16-g32")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"kv_cache_scheme: not supported .* FP8 cache has scales of its own"):
        loaded(directory)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_caches_of_integer_codes_are_refused(plain: Path, kv_dtype: str) -> None:
    with pytest.raises(UsageError, match=rf"^kv_dtype is '{kv_dtype}': the latents .* give auto or fp8$"):
        Engine(loaded(plain), kv_dtype=kv_dtype)
