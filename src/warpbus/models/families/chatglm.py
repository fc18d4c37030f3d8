"""ChatGLM-6B, the first of its line, in the format it was published in (`model_type: chatglm`; GLM; Du et al., 2022).

Its blocks carry on what was normed rather than what came in, prompts are read in both directions, and positions have
two dimensions.
"""

from collections.abc import Mapping
from typing import Any

from warpbus.models.config import ModelConfig, RopeConfig
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
    "embedding.weight": ("transformer.word_embeddings.weight",),
    "final_norm.weight": ("transformer.final_layernorm.weight",),
    "final_norm.bias": ("transformer.final_layernorm.bias",),
    "head.weight": ("lm_head.weight",),
}

_MODULES = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "attention.query_key_value",
    "attention.o": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}

LAYER = {f"{ours}.{part}": (f"{theirs}.{part}",) for ours, theirs in _MODULES.items() for part in ("weight", "bias")}

# sqrt(2 x 28) whatever num_layers says: the published code builds its blocks without telling them the number of layers,
# so each takes its default of 28.
_RESIDUAL_SCALE = (2 * 28) ** 0.5

# By the vocabulary: <sop> and <eop>. The first revisions had 20000 entries for images before those of text.
_ENDS = {130528: (130004, 130005), 150528: (150004, 150005)}


def claims(values: Mapping[str, Any]) -> bool:
    """Whether a config.json of `model_type: chatglm` is of this generation."""
    own = ("inner_hidden_size", "position_encoding_2d", "max_sequence_length")
    return values.get("padded_vocab_size") is None and any(values.get(key) is not None for key in own)


def _config(values: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(values)
    refuse_unsupported(fields)
    fields.insist("position_encoding_2d", True, "the checkpoints of ChatGLM-6B have two-dimensional positions")
    hidden = fields.size("hidden_size")
    heads = fields.divisor("num_attention_heads", "hidden_size", hidden)
    dim = hidden // heads
    if dim % 4:
        raise fields.wrong("num_attention_heads", "heads of a multiple of 4, each half of which rotates in pairs")
    vocabulary = fields.size("vocab_size", MAX_VOCABULARY)
    begin, end = _ENDS.get(vocabulary, (None, None))
    layer = LayerSpec(
        hidden_size=hidden,
        attention=AttentionSpec(heads, heads, dim, qkv_bias=True, output_bias=True),
        mlp=MLPSpec(fields.size("inner_hidden_size"), gated=False, bias=True, output_bias=True),
        norm=NormSpec(fields.number("layernorm_epsilon", 1e-12, 0.1), "layer"),
        normed_residual=_RESIDUAL_SCALE,
    )
    return ModelConfig(
        family="chatglm",
        vocab_size=vocabulary,
        layers=(layer,) * fields.size("num_layers", MAX_LAYERS),
        rope=RopeConfig(theta=10000.0, rotary_dim=dim // 2, interleaved=False, two_dimensional=True),
        max_context=fields.size("max_sequence_length", MAX_CONTEXT),
        tie_embeddings=fields.flag("tie_word_embeddings", default=True),
        stop_ids=fields.token_ids("eos_token_id", () if end is None else (end,)),
        prompt_end=_prompt_end(fields, vocabulary, begin),
    )


def _prompt_end(fields: Fields, vocabulary: int, default: int | None) -> int:
    """The id of `<sop>`, which these models begin their answers with."""
    ids = fields.token_ids("bos_token_id", () if default is None else (default,))
    if len(ids) != 1 or ids[0] >= vocabulary:
        raise fields.wrong("bos_token_id", f"the id of <sop>, less than vocab_size ({vocabulary})")
    return ids[0]


def _tensors(config: ModelConfig) -> TensorMap:
    return expand(config, WHOLE, LAYER, "transformer.layers.{}.")


CHATGLM = Family(
    "chatglm", ("chatglm",), _config, _tensors, ffn_key="inner_hidden_size", claims=claims, qkv_by_head=True
)
