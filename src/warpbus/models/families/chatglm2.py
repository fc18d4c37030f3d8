"""ChatGLM2, ChatGLM3 and GLM-4-9B in the format they were published in (`model_type: chatglm`, generations 2 to 4)."""

from collections.abc import Mapping
from typing import Any

from warpbus.errors import CheckpointError
from warpbus.models.config import ModelConfig, RopeConfig
from warpbus.models.families import glm
from warpbus.models.families.family import (
    MAX_CONTEXT,
    MAX_LAYERS,
    MAX_VOCABULARY,
    Family,
    Fields,
    TensorMap,
    expand,
    refuse_unsupported,
)
from warpbus.models.layer_spec import AttentionSpec, LayerSpec, MLPSpec, NormSpec

WHOLE = {
    "embedding.weight": ("transformer.embedding.word_embeddings.weight",),
    "final_norm.weight": ("transformer.encoder.final_layernorm.weight",),
    "head.weight": ("transformer.output_layer.weight",),
}

LAYER = {
    "attention_norm.weight": ("input_layernorm.weight",),
    "attention.qkv.weight": ("self_attention.query_key_value.weight",),
    "attention.qkv.bias": ("self_attention.query_key_value.bias",),
    "attention.o.weight": ("self_attention.dense.weight",),
    "mlp_norm.weight": ("post_attention_layernorm.weight",),
    "mlp.gate_up.weight": ("mlp.dense_h_to_4h.weight",),
    "mlp.down.weight": ("mlp.dense_4h_to_h.weight",),
}

# Generations 2 and 3 share a SentencePiece vocabulary; generation 4 has a byte-level one of 151552 entries.
_SENTENCEPIECE_ENTRIES = 65024
_STOP_IDS = {2: (2,), 3: (2, 64795, 64797), 4: glm.STOP_IDS}


def _config(values: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(values)
    refuse_unsupported(fields)
    _refuse_what_differs(fields)
    heads, dim = fields.size("num_attention_heads"), fields.size("kv_channels")
    vocabulary = fields.size("padded_vocab_size", MAX_VOCABULARY)
    generation = _generation(values, vocabulary)
    # ChatGLM3 publishes eos_token_id 2 alone; it ends a turn with the next role's token as often.
    stop_ids = dict.fromkeys((*_STOP_IDS[generation or 3], *fields.token_ids("eos_token_id")))
    kv_heads = heads
    if fields.flag("multi_query_attention", default=False):
        kv_heads = fields.divisor("multi_query_group_num", "num_attention_heads", heads)
    layer = LayerSpec(
        hidden_size=fields.size("hidden_size"),
        attention=AttentionSpec(heads, kv_heads, dim, qkv_bias=fields.flag("add_qkv_bias", default=False)),
        mlp=MLPSpec(fields.size("ffn_hidden_size")),
        norm=NormSpec(fields.number("layernorm_epsilon", 1e-12, 0.1)),
    )
    return ModelConfig(
        family="chatglm2",
        vocab_size=vocabulary,
        layers=(layer,) * fields.size("num_layers", MAX_LAYERS),
        rope=_rope(fields, dim, generation),
        max_context=fields.size("seq_length", MAX_CONTEXT),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        stop_ids=tuple(stop_ids),
    )


def _rope(fields: Fields, head_dim: int, generation: int | None) -> RopeConfig:
    """Half of each head rotates. `rope_ratio` divides the positions in generation 2, and multiplies the base after."""
    if head_dim % 4:
        raise fields.wrong("kv_channels", "a multiple of 4, half of which rotates in pairs")
    ratio = fields.number("rope_ratio", 1e-3, 1e6, default=1.0)
    if ratio != 1.0 and generation is None:
        raise CheckpointError(
            f"{fields.name}: rope_ratio: it divides the positions in ChatGLM2 and multiplies the base in ChatGLM3, and "
            "neither _name_or_path nor auto_map tells which it is: set _name_or_path to the model this one comes from, "
            "for instance THUDM/chatglm2-6b-32k or THUDM/chatglm3-6b-32k"
        )
    return RopeConfig(
        theta=10000.0 if generation == 2 else 10000.0 * ratio,
        rotary_dim=head_dim // 2,
        interleaved=fields.flag("original_rope", default=True),
        position_scale=ratio if generation == 2 else 1.0,
    )


def _generation(values: Mapping[str, Any], vocabulary: int) -> int | None:
    """2, 3 or 4; `None` where 2 and 3, whose configs have the same keys, cannot be distinguished."""
    if vocabulary > 2 * _SENTENCEPIECE_ENTRIES:
        return 4
    # A model that was trained further names its base in one or the other: "THUDM/chatglm2-6b-32k--modeling_chatglm...".
    classes = values.get("auto_map")
    names = f"{values.get('_name_or_path')} {list(classes.values()) if isinstance(classes, dict) else ''}".lower()
    named = [generation for generation in (2, 3) if f"chatglm{generation}" in names]
    return named[0] if len(named) == 1 else None


def _refuse_what_differs(fields: Fields) -> None:
    fields.insist("add_bias_linear", False, "only the query, key and value projections may have biases")
    fields.insist("apply_residual_connection_post_layernorm", False, "the residual is taken before the norm")
    fields.insist("rmsnorm", True, "the shared decoder has RMSNorm")
    fields.insist("post_layer_norm", True, "the shared decoder has a final norm")


def _tensors(config: ModelConfig) -> TensorMap:
    return expand(config, WHOLE, LAYER, "transformer.encoder.layers.{}.")


CHATGLM2 = Family("chatglm2", ("chatglm",), _config, _tensors, ffn_key="ffn_hidden_size")
