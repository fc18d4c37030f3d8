"""config.json to `ModelConfig`: what published models say, and what is refused."""

import math
from typing import Any

import pytest
import torch

from warpbus.errors import CheckpointError
from warpbus.models import (
    SHAPES,
    AttentionSpec,
    Decoder,
    LayerSpec,
    MLPSpec,
    ModelConfig,
    NormSpec,
    RopeConfig,
    tensor_map,
)
from warpbus.models.families import FAMILIES, MODEL_TYPES, family_of

CHATGLM: dict[str, Any] = {
    "_name_or_path": "THUDM/chatglm-6b",
    "architectures": ["ChatGLMModel"],
    "model_type": "chatglm",
    "num_layers": 28,
    "vocab_size": 130528,
    "hidden_size": 4096,
    "inner_hidden_size": 16384,
    "num_attention_heads": 32,
    "layernorm_epsilon": 1e-05,
    "max_sequence_length": 2048,
    "position_encoding_2d": True,
    "bos_token_id": 130004,
    "eos_token_id": 130005,
    "mask_token_id": 130000,
    "gmask_token_id": 130001,
    "pad_token_id": 3,
    "quantization_bit": 0,
    "pre_seq_len": None,
    "prefix_projection": False,
}
CHATGLM2: dict[str, Any] = {
    "_name_or_path": "THUDM/chatglm2-6b",
    "model_type": "chatglm",
    "num_layers": 28,
    "padded_vocab_size": 65024,
    "hidden_size": 4096,
    "ffn_hidden_size": 13696,
    "kv_channels": 128,
    "num_attention_heads": 32,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "layernorm_epsilon": 1e-05,
    "seq_length": 32768,
    "original_rope": True,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_residual_connection_post_layernorm": False,
    "post_layer_norm": True,
    "rmsnorm": True,
    "quantization_bit": 0,
    "pre_seq_len": None,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
CHATGLM3 = {**CHATGLM2, "_name_or_path": "THUDM/chatglm3-6b", "seq_length": 8192}
GLM4_CHAT = {
    **CHATGLM2,
    "_name_or_path": "THUDM/glm-4-9b-chat",
    "num_layers": 40,
    "padded_vocab_size": 151552,
    "layernorm_epsilon": 1.5625e-07,
    "rope_ratio": 500,
    "seq_length": 131072,
    "eos_token_id": [151329, 151336, 151338],
}
NATIVE: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 1000,
    "eos_token_id": 2,
}
MODELS = {
    "chatglm-1": CHATGLM,
    "chatglm": CHATGLM2,
    **{kind: {**NATIVE, "model_type": kind} for kind in ("glm", "glm4", "llama", "qwen2", "qwen3")},
}


def read(values: dict[str, Any], **changes: Any) -> ModelConfig:
    changed = {**values, **changes}
    family = family_of(changed)
    assert family is not None
    return family.config(changed)


def test_the_first_chatglm() -> None:
    config = read(CHATGLM)
    assert config == SHAPES["chatglm-6b"]
    assert (config.family, config.num_layers, config.max_context) == ("chatglm", 28, 2048)
    layer = LayerSpec(
        hidden_size=4096,
        attention=AttentionSpec(32, 32, 128, qkv_bias=True, output_bias=True),
        mlp=MLPSpec(16384, gated=False, bias=True, output_bias=True),
        norm=NormSpec(1e-5, "layer"),
        normed_residual=math.sqrt(56),
    )
    assert config.layers == (layer,) * 28
    assert read(CHATGLM, num_layers=4).layers == (layer,) * 4  # the residual does not depend on the number of layers
    assert config.rope == RopeConfig(theta=1e4, rotary_dim=64, interleaved=False, two_dimensional=True)
    assert config.tie_embeddings
    assert (config.prompt_end, config.stop_ids) == (130004, (130005,))
    assert tuple(matrix.name for matrix in config.layers[0].matrices) == (
        "attention.qkv",
        "attention.o",
        "mlp.up",
        "mlp.down",
    )
    assert config.num_parameters == 6_173_286_400


def test_the_first_chatglm_by_its_vocabulary_alone() -> None:
    """Early revisions had entries for images first, and their config.json may name no token."""
    for vocabulary, ends in ((130528, (130004, 130005)), (150528, (150004, 150005))):
        config = read(CHATGLM, vocab_size=vocabulary, bos_token_id=None, eos_token_id=None)
        assert (config.prompt_end, *config.stop_ids) == ends
    early = read(CHATGLM, vocab_size=150528, bos_token_id=150004, eos_token_id=150005)
    assert (early.prompt_end, early.stop_ids, early.vocab_size) == (150004, (150005,), 150528)


def test_a_prefix_that_config_tells_of_does_no_harm() -> None:
    assert read(CHATGLM, pre_seq_len=128) == read(CHATGLM)
    assert read(CHATGLM2, pre_seq_len=128) == read(CHATGLM2)


@pytest.mark.parametrize("key", ["inner_hidden_size", "position_encoding_2d", "max_sequence_length"])
def test_which_chatglm_it_is(key: str) -> None:
    others = {"inner_hidden_size": None, "position_encoding_2d": None, "max_sequence_length": None}
    family = family_of({**CHATGLM, **others, key: CHATGLM[key]})
    assert family is not None
    assert family.name == "chatglm"
    assert read(CHATGLM2, **{key: CHATGLM[key]}).family == "chatglm2"


def test_chatglm2() -> None:
    config = read(CHATGLM2)
    assert (
        config.num_layers,
        config.attention.num_heads,
        config.attention.num_kv_heads,
        config.attention.head_dim,
    ) == (28, 32, 2, 128)
    assert config.attention.qkv_rows == (4096, 256, 256)
    assert (config.rope.theta, config.rope.rotary_dim, config.rope.interleaved) == (10000.0, 64, True)
    assert (config.max_context, config.stop_ids, config.norm.eps) == (32768, (2,), 1e-5)
    assert config.attention.qkv_bias
    assert not config.attention.output_bias
    assert config.num_parameters == 6_243_584_000


def test_chatglm3_stops_at_the_next_role() -> None:
    assert read(CHATGLM3).stop_ids == (2, 64795, 64797)


def test_a_chatglm_of_no_known_name_stops_at_roles_too() -> None:
    """ChatGLM2 never produces these ids, so they are safe where the generation is unknown."""
    assert read(CHATGLM2, _name_or_path="/models/mine").stop_ids == (2, 64795, 64797)


def test_glm4_chat() -> None:
    config = read(GLM4_CHAT)
    assert (config.rope.theta, config.rope.position_scale) == (5e6, 1.0)
    assert config.stop_ids == (151329, 151336, 151338)
    assert config.norm.eps == 1.5625e-07
    assert config.num_parameters == 9_399_951_360


@pytest.mark.parametrize(("generation", "scale", "theta"), [(2, 16, 1e4), (3, 1, 16e4)])
def test_a_model_that_was_saved_elsewhere_names_its_base_in_auto_map(generation: int, scale: int, theta: float) -> None:
    base = {"AutoConfig": f"THUDM/chatglm{generation}-6b-32k--configuration_chatglm.ChatGLMConfig"}
    rope = read(CHATGLM2, rope_ratio=16, _name_or_path="/data/base", auto_map=base).rope
    assert (rope.position_scale, rope.theta) == (scale, theta)
    # Names that contradict each other tell nothing.
    with pytest.raises(CheckpointError, match="neither _name_or_path nor auto_map tells which"):
        read(CHATGLM2, rope_ratio=16, _name_or_path=f"chatglm{5 - generation}-6b", auto_map=base)


def test_rope_ratio_means_positions_in_chatglm2_and_the_base_in_chatglm3() -> None:
    second = read(CHATGLM2, rope_ratio=16, _name_or_path="THUDM/chatglm2-6b-32k").rope
    third = read(CHATGLM2, rope_ratio=50, _name_or_path="/data/ChatGLM3-6B-32k").rope
    assert (second.theta, second.position_scale) == (10000.0, 16.0)
    assert (third.theta, third.position_scale) == (500000.0, 1.0)


@pytest.mark.parametrize("name", [None, "/models/mine", "/chatglm2/chatglm3-6b-32k"])
def test_rope_ratio_of_an_unknown_generation_is_refused(name: str | None) -> None:
    with pytest.raises(CheckpointError, match=r"rope_ratio.*set _name_or_path"):
        read(CHATGLM2, rope_ratio=16, _name_or_path=name)


def test_multi_head_chatglm() -> None:
    assert read(CHATGLM2, multi_query_attention=False).attention.num_kv_heads == 32


def test_glm_defaults() -> None:
    config = read({**NATIVE, "model_type": "glm"}, eos_token_id=None, head_dim=None)
    assert config.stop_ids == (151329, 151336, 151338)
    assert config.attention.head_dim == 128
    assert (config.rope.rotary_dim, config.rope.interleaved, config.attention.qkv_bias) == (64, True, True)
    assert not config.layers[0].output_norms
    assert read({**NATIVE, "model_type": "glm4"}).layers[0].output_norms


def test_llama_defaults() -> None:
    config = read(MODELS["llama"], num_key_value_heads=None, head_dim=None, rope_theta=None)
    assert (config.attention.num_kv_heads, config.attention.head_dim, config.rope.theta) == (32, 128, 10000.0)
    assert (config.rope.rotary_dim, config.rope.interleaved, config.attention.qkv_bias) == (128, False, False)


def test_qwen_traits() -> None:
    second, third = read(MODELS["qwen2"]).attention, read(MODELS["qwen3"]).attention
    assert (second.qkv_bias, second.output_bias, second.qk_norm) == (True, False, False)
    assert (third.qkv_bias, third.output_bias, third.qk_norm) == (False, False, True)


def test_linear_scaling_stretches_the_context() -> None:
    config = read(MODELS["llama"], rope_scaling={"type": "linear", "factor": 4.0})
    assert (config.rope.position_scale, config.max_context) == (4.0, 32768)


def test_new_rotary_keys_come_first() -> None:
    new = {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.25}
    rope = read(MODELS["glm"], rope_parameters=new, partial_rotary_factor=0.5).rope
    assert (rope.theta, rope.rotary_dim) == (7.0, 32)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "mrope", 3])
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_other_rotary_scalings_are_refused(key: str, kind: object) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {key}: rope_type: .* is not supported"):
        read(MODELS["qwen2"], **{key: {"rope_type": kind, "factor": 4.0}})
    with pytest.raises(CheckpointError, match="is not supported"):
        read(MODELS["qwen2"], **{key: {"type": kind, "factor": 4.0}})


REFUSED = [
    ("chatglm-1", {"position_encoding_2d": False}, "position_encoding_2d: False is not supported"),
    ("chatglm-1", {"num_attention_heads": 31}, "num_attention_heads.*divisor"),
    ("chatglm-1", {"num_attention_heads": 2048}, "num_attention_heads.*heads of a multiple of 4"),
    ("chatglm-1", {"vocab_size": 1000, "bos_token_id": None}, "bos_token_id: expected the id of <sop>.*missing"),
    ("chatglm-1", {"bos_token_id": 130528}, "bos_token_id: expected the id of <sop>, less than"),
    ("chatglm-1", {"bos_token_id": [1, 2]}, "bos_token_id: expected the id of <sop>"),
    ("chatglm-1", {"num_layers": 0}, "num_layers"),
    ("chatglm", {"add_bias_linear": True}, "add_bias_linear"),
    ("chatglm", {"rmsnorm": False}, "rmsnorm"),
    ("chatglm", {"post_layer_norm": False}, "post_layer_norm"),
    ("chatglm", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
    ("chatglm", {"multi_query_group_num": 3}, "multi_query_group_num.*divisor"),
    ("chatglm", {"kv_channels": 66}, "kv_channels"),
    ("chatglm", {"num_layers": 0}, "num_layers"),
    ("llama", {"num_key_value_heads": 5}, "num_key_value_heads.*divisor"),
    ("llama", {"num_hidden_layers": -1}, "num_hidden_layers"),
    ("llama", {"hidden_size": 10**12}, "hidden_size"),
    ("llama", {"hidden_size": 4097, "head_dim": None}, "num_attention_heads.*divisor"),
    ("llama", {"mlp_bias": True}, "mlp_bias"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", {"num_local_experts": 8}, "num_local_experts"),
    ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps"),
    ("llama", {"rope_theta": 0}, "rope_theta"),
    ("llama", {"eos_token_id": [1, "2"]}, "eos_token_id"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
        "high_freq_factor",
    ),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "between layers"),
    ("llama", {"rope_parameters": {"rope_theta": 2.0}, "rope_scaling": {"type": "linear"}}, "contradict"),
    ("glm", {"head_dim": 6}, "head_dim"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1}, "sliding_window"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 3}, "sliding"),
    ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "sliding_window: windows of 4096"),
    ("llama", {"sliding_window": 4096}, "sliding_window: windows of 4096"),
    ("glm", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}, "sliding_window"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported, only 1.0"),
    ("qwen2", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor: 0.25 is not supported"),
    ("qwen3", {"mlp_bias": True}, "mlp_bias: True is not supported"),
    ("glm", {"final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0 is not supported"),
    ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("llama", {"embedding_multiplier": 12}, "embedding_multiplier: 12 is not supported, only 1"),
    ("qwen3", {"is_causal": False}, "is_causal"),
    ("llama", {"dtype": "float3"}, "dtype: expected a floating dtype, such as bfloat16, but found 'float3'"),
    ("glm", {"torch_dtype": "int8"}, "torch_dtype: expected a floating dtype"),
]


@pytest.mark.parametrize(("model", "changes", "message"), REFUSED)
def test_what_is_refused(model: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(MODELS[model], **changes)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 8192, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
        {"use_sliding_window": True, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": 64},
        {"partial_rotary_factor": 1.0, "logits_scaling": 1.0, "is_causal": True, "torch_dtype": "auto"},
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 3},
    ],
)
def test_windows_that_change_nothing_are_accepted(changes: dict[str, Any]) -> None:
    assert read(MODELS["qwen2"], **changes).max_context == 8192


OPTIONAL = {
    *("_name_or_path", "model_type", "original_rope", "add_bias_linear", "add_qkv_bias", "rmsnorm", "pre_seq_len"),
    *("apply_residual_connection_post_layernorm", "post_layer_norm", "quantization_bit", "tie_word_embeddings"),
    *("eos_token_id", "hidden_act", "head_dim", "rope_theta", "multi_query_attention"),
    *("architectures", "position_encoding_2d", "bos_token_id", "mask_token_id", "gmask_token_id", "pad_token_id"),
    "prefix_projection",
}


@pytest.mark.parametrize("model", MODELS)
def test_every_required_key_is_missed_by_name(model: str) -> None:
    values = MODELS[model]
    defaulted = {"num_key_value_heads"} if model in ("llama", "qwen2", "qwen3") else set()
    required = values.keys() - OPTIONAL - defaulted
    assert len(required) >= 7
    for key in required:
        for missing in ({**values, key: None}, {name: value for name, value in values.items() if name != key}):
            with pytest.raises(CheckpointError, match=rf"config\.json: {key}: .*missing"):
                read(missing)


def outcome(values: dict[str, Any]) -> ModelConfig | CheckpointError:
    try:
        return read(values)
    except CheckpointError as error:
        return error


@pytest.mark.parametrize("model", MODELS)
def test_junk_is_a_checkpoint_error_or_harmless(model: str) -> None:
    """No value of any key ends in another exception than the one that names it."""
    junk = ["x", "", -1, 0, 1.5, True, [], [[]], {}, {"factor": []}, 10**30, math.nan, math.inf]
    further = {"rope_scaling", "rope_parameters", "layer_types", "use_sliding_window", "sliding_window"}
    further |= {"partial_rotary_factor", "attention_bias", "mlp_bias", "rope_ratio", "max_window_layers"}
    windowed = {**MODELS[model], "use_sliding_window": True, "sliding_window": 10000}
    for key in (windowed.keys() | further) - {"model_type"}:
        for value in junk:
            found = outcome({**windowed, key: value})
            if isinstance(found, CheckpointError):
                assert str(found).startswith("config.json: ")
            else:
                assert 0 < found.rope.rotary_dim <= found.attention.head_dim


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tied", [False, True])
def test_tensor_map_covers_the_decoder(model: str, tied: bool) -> None:
    config = read(MODELS[model], num_hidden_layers=2, num_layers=2, tie_word_embeddings=tied)
    tensors = tensor_map(config)
    with torch.device("meta"):
        decoder = Decoder(config)
    assert tensors.keys() == dict(decoder.named_parameters()).keys()
    sources = [name for names in tensors.values() for name in names]
    assert len(sources) == len(set(sources))
    assert config.num_parameters == sum(parameter.numel() for parameter in decoder.parameters())


def test_names_are_distinct() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    glm = ("chatglm", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
    assert (*glm, "llama", "qwen2", "qwen3", "qwen3_moe") == MODEL_TYPES
    assert family_of({"model_type": ["chatglm"]}) is family_of({}) is None
