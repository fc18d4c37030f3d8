"""Every family against transformers: the same weights, the same tokens, the same logits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from warpbus.formats import Checkpoint
from warpbus.models import Decoder, load_model

transformers = pytest.importorskip("transformers")

TOKENS = 12
COMMON = {
    "vocab_size": 101,
    "hidden_size": 256,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_key_value_heads": 2, "moe_intermediate_size": 48, "num_experts_per_tok": 2}
LATENT = EXPERTS | {
    "num_key_value_heads": 4,
    "head_dim": 16,  # another name of qk_rope_head_dim
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 40,
    "kv_lora_rank": 36,
    "q_lora_rank": 52,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm-2": ("Glm", {"num_key_value_heads": 2}),
    "glm-4": ("Glm", {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}),
    "glm4-2": ("Glm4", {"num_key_value_heads": 2}),
    "glm4-4": ("Glm4", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "glm-without-bias": ("Glm", {"num_key_value_heads": 2, "attention_bias": False}),
    "llama-2": ("Llama", {"num_key_value_heads": 2}),
    "llama-bias": ("Llama", {"num_key_value_heads": 4, "attention_bias": True}),
    "llama-tied": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-llama3": ("Llama", {"num_key_value_heads": 2, "rope_parameters": LLAMA3}),
    "llama-linear": (
        "Llama",
        {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama-without-head_dim": ("Llama", {"num_key_value_heads": 2, "head_dim": None}),
    "qwen2-2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen2-4": ("Qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen3-2": ("Qwen3", {"num_key_value_heads": 2}),
    "qwen3-4": ("Qwen3", {"num_key_value_heads": 4, "attention_bias": True}),
    "glm4_moe": ("Glm4Moe", EXPERTS | {"n_routed_experts": 7, "num_nextn_predict_layers": 0}),
    "glm4_moe-groups": (
        "Glm4Moe",
        EXPERTS
        | {"n_routed_experts": 6, "n_group": 3, "topk_group": 2, "use_qk_norm": True, "attention_bias": True}
        | {"routed_scaling_factor": 2.5, "n_shared_experts": 2, "num_nextn_predict_layers": 0},
    ),
    "glm4_moe-unnormalized": (
        "Glm4Moe",
        EXPERTS
        | {"n_routed_experts": 4, "norm_topk_prob": False, "first_k_dense_replace": 2, "num_nextn_predict_layers": 0},
    ),
    "glm4_moe_lite": ("Glm4MoeLite", LATENT | {"n_routed_experts": 7}),
    "glm4_moe_lite-groups": (
        "Glm4MoeLite",
        LATENT
        | {"n_routed_experts": 6, "n_group": 3, "topk_group": 2, "n_shared_experts": 2, "attention_bias": True}
        | {"num_attention_heads": 3, "num_key_value_heads": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "glm4_moe_lite-without-query-latent": (
        "Glm4MoeLite",
        LATENT
        | {"n_routed_experts": 5, "q_lora_rank": None, "kv_lora_rank": 33, "v_head_dim": 17, "attention_bias": True}
        | {"head_dim": 6, "qk_rope_head_dim": 6, "rope_interleave": False},
    ),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"num_experts": 5, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3_moe-sparse": ("Qwen3Moe", EXPERTS | {"num_experts": 8, "decoder_sparse_step": 2, "attention_bias": True}),
}


class GrowingCache:
    """The simplest cache there is: all keys and values of a layer, joined."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def attend(self, layer: int, q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, positions_bt: Tensor) -> Tensor:
        new = k_bthd, v_bthd, positions_bt
        if layer in self.kept:
            new = tuple(torch.cat(pair, dim=1) for pair in zip(self.kept[layer], new, strict=True))
        self.kept[layer] = new
        k, v, key_positions = new
        mask = key_positions[:, None, None, :] <= positions_bt[:, None, :, None]
        heads = (x.transpose(1, 2) for x in (q_bthd, k, v))
        return F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def oracle(kind: str, **changes: Any) -> Any:
    """A small model of transformers with random weights, those that it would start at 1 or 0 included."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(noise * (0.5 if name.endswith("bias") else 1.5 * parameter.shape[-1] ** -0.5))
        for correction in corrections(model):
            correction.copy_(0.3 * torch.randn(correction.shape, generator=generator))
    return model


def corrections(model: Any) -> list[Tensor]:
    """What routers add to their scores for the choice: buffers in transformers."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def inputs() -> Tensor:
    return torch.randint(0, COMMON["vocab_size"], (2, TOKENS), generator=torch.Generator().manual_seed(3))


def loaded(directory: Path) -> Decoder:
    return load_model(Checkpoint(directory), device="cpu", dtype=torch.float32)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@torch.no_grad()
def assert_same(model: Decoder, expected_model: Any, start: int = 0) -> None:
    """Compare logits of a whole row at once, and token by token after a prefix, from position `start` on."""
    tokens = inputs()
    positions = torch.arange(start, start + TOKENS).expand_as(tokens)
    expected = expected_model(input_ids=tokens, position_ids=positions).logits
    assert expected.std() > 0.1, "logits that hardly differ would hide mistakes"
    assert distance(model(tokens, positions), expected) < 1e-5
    if start == 0:
        assert distance(model(tokens), expected) < 1e-5
    cache = GrowingCache()
    pieces = [(0, 5), *((index, index + 1) for index in range(5, TOKENS))]
    steps = [model(tokens[:, first:last], positions[:, first:last], cache) for first, last in pieces]
    assert distance(torch.cat(steps, dim=1), expected) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    expected = oracle(kind, **changes)
    expected.save_pretrained(tmp_path)
    model = loaded(tmp_path)
    assert_same(model, expected)
    assert_same(model, expected, start=300)
    theirs = [*expected.parameters(), *corrections(expected)]
    assert model.config.num_parameters == sum(parameter.numel() for parameter in theirs)


def test_old_rotary_keys_mean_the_same(tmp_path: Path) -> None:
    """transformers before 5 wrote rope_theta and rope_scaling beside each other."""
    expected = oracle("Llama", num_key_value_heads=2, rope_parameters=dict(LLAMA3))
    expected.save_pretrained(tmp_path)

    def old(config: dict[str, Any]) -> None:
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope

    edit(tmp_path, old)
    assert_same(loaded(tmp_path), expected, start=300)


def test_old_partial_rotary_factor_means_the_same(tmp_path: Path) -> None:
    expected = oracle("Glm4", num_key_value_heads=2, partial_rotary_factor=0.25)
    expected.save_pretrained(tmp_path)

    def old(config: dict[str, Any]) -> None:
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope["rope_theta"]
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]

    edit(tmp_path, old)
    model = loaded(tmp_path)
    assert model.config.rope.rotary_dim == 32
    assert_same(model, expected)


@pytest.mark.parametrize(("kv_heads", "ratio"), [(2, 1), (4, 500)])
def test_chatglm_format(kv_heads: int, ratio: int, tmp_path: Path) -> None:
    """The published format of GLM-4-9B holds the weights of Hugging Face's Glm under other names, fused."""
    rope = {"rope_type": "default", "rope_theta": 10000.0 * ratio, "partial_rotary_factor": 0.5}
    expected = oracle("Glm", num_key_value_heads=kv_heads, rope_parameters=rope)
    write_chatglm(tmp_path, expected, rope_ratio=ratio)
    assert_same(loaded(tmp_path), expected)
    assert_same(loaded(tmp_path), expected, start=300)


def test_chatglm2_divides_positions(tmp_path: Path) -> None:
    """chatglm2-6b-32k: what transformers calls linear scaling."""
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    expected = oracle("Glm", num_key_value_heads=2, rope_parameters=rope)
    write_chatglm(tmp_path, expected, rope_ratio=4, _name_or_path="THUDM/chatglm2-6b-32k")
    assert_same(loaded(tmp_path), expected, start=300)


def test_chatglm_rotary_halves(tmp_path: Path) -> None:
    """`original_rope: false` pairs dimension i with i + 32; the interleaved model with permuted rows is the same."""
    expected = oracle("Glm", num_key_value_heads=2)
    write_chatglm(tmp_path, expected, original_rope=False)
    weights = load_file(tmp_path / "model.safetensors")
    order = torch.cat((torch.arange(0, 64, 2), torch.arange(1, 64, 2), torch.arange(64, 128)))
    for name in [name for name in weights if ".query_key_value." in name]:
        fused = weights[name].unflatten(0, (-1, 128))
        fused[:-2] = fused[:-2, order]
        weights[name] = fused.flatten(0, 1).contiguous()
    save_file(weights, tmp_path / "model.safetensors")
    assert_same(loaded(tmp_path), expected)


def test_bfloat16_rounds_where_transformers_does(tmp_path: Path) -> None:
    """The norms' casts and the angles' dtype: bfloat16 stays within a few roundings of transformers' bfloat16."""
    expected = oracle("Glm4", num_key_value_heads=2)
    expected.save_pretrained(tmp_path)
    model = load_model(Checkpoint(tmp_path), device="cpu", dtype=torch.bfloat16)
    with torch.no_grad():
        exact = expected(inputs()).logits
        theirs = distance(expected.bfloat16()(inputs()).logits.float(), exact)
        ours = distance(model(inputs()).float(), exact)
    assert ours < 1.2 * theirs


def edit(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a saved config.json."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def write_chatglm(directory: Path, model: Any, **changes: Any) -> None:
    """A transformers Glm in the format of ChatGLM2 and later."""
    source = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = {
        "transformer.embedding.word_embeddings.weight": source["model.embed_tokens.weight"],
        "transformer.encoder.final_layernorm.weight": source["model.norm.weight"],
        "transformer.output_layer.weight": source["lm_head.weight"],
        "transformer.rotary_pos_emb.inv_freq": torch.ones(32),
    }
    renamed = {
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attention.dense.weight": "self_attn.o_proj.weight",
        "post_attention_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.dense_h_to_4h.weight": "mlp.gate_up_proj.weight",
        "mlp.dense_4h_to_h.weight": "mlp.down_proj.weight",
    }
    config = model.config
    for index in range(config.num_hidden_layers):
        new, old = f"transformer.encoder.layers.{index}.", f"model.layers.{index}."
        for new_name, old_name in renamed.items():
            tensors[new + new_name] = source[old + old_name]
        for part in ("weight", "bias"):
            fused = [source[f"{old}self_attn.{letter}_proj.{part}"] for letter in "qkv"]
            tensors[f"{new}self_attention.query_key_value.{part}"] = torch.cat(fused)
    save_file(tensors, directory / "model.safetensors")
    written = {
        "model_type": "chatglm",
        "_name_or_path": "THUDM/chatglm3-6b",
        "num_layers": config.num_hidden_layers,
        "padded_vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "kv_channels": config.head_dim,
        "multi_query_attention": True,
        "multi_query_group_num": config.num_key_value_heads,
        "layernorm_epsilon": config.rms_norm_eps,
        "seq_length": 512,
        "original_rope": True,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "post_layer_norm": True,
        "rmsnorm": True,
        "apply_residual_connection_post_layernorm": False,
        "quantization_bit": 0,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps({**written, **changes}))
