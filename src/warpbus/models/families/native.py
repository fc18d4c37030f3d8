"""Common parts of the formats of Hugging Face's models: keys of config.json, names of tensors, rotary parameters."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from warpbus.errors import CheckpointError
from warpbus.models.config import ModelConfig, RopeConfig, RopeScaling
from warpbus.models.families.family import (
    MAX_CONTEXT,
    MAX_LAYERS,
    MAX_VOCABULARY,
    Fields,
    TensorMap,
    expand,
    refuse_unsupported,
    refuse_windows,
)
from warpbus.models.families.moe import LayerMLP
from warpbus.models.latent_spec import LatentAttentionSpec
from warpbus.models.layer_spec import AttentionSpec, LayerSpec, MLPSpec, MoESpec, NormSpec

WHOLE = {
    "embedding.weight": ("model.embed_tokens.weight",),
    "final_norm.weight": ("model.norm.weight",),
    "head.weight": ("lm_head.weight",),
}

LAYER = {
    "attention_norm.weight": ("input_layernorm.weight",),
    "attention.qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attention.qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "attention.o.weight": ("self_attn.o_proj.weight",),
    "attention.o.bias": ("self_attn.o_proj.bias",),
    "mlp_norm.weight": ("post_attention_layernorm.weight",),
    "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down.weight": ("mlp.down_proj.weight",),
}

MTP = {
    "embedding_norm.weight": ("enorm.weight",),
    "hidden_norm.weight": ("hnorm.weight",),
    "projection.weight": ("eh_proj.weight",),
    "output_norm.weight": ("shared_head.norm.weight",),
}
"""The tensors of the layer of multi-token prediction besides those of a decoder layer."""

QK_NORMS = {f"attention.{part}_norm.weight": (f"self_attn.{part}_norm.weight",) for part in "qk"}

LayerAttention = Callable[[int], LatentAttentionSpec]
"""The attention of a layer by its number."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def read(
    values: Mapping[str, Any],
    family: str,
    *,
    head_dim: int | None = None,
    rotary_part: float = 1.0,
    interleaved: bool = False,
    kv_heads_default: bool = False,
    first_window: int | None = None,
    stop_ids: tuple[int, ...] = (),
    output_norms: bool = False,
    mlps: LayerMLP | None = None,
    latent_attention: LayerAttention | None = None,
    mtp: MoESpec | None = None,
    **biases_and_norms: bool,
) -> ModelConfig:
    """Read a config.json of Hugging Face's keys.

    Args:
        values: the parsed file.
        family: the name of the family.
        head_dim: the size of the family's heads if the file does not say; by default hidden_size / heads.
        rotary_part: the share of a head that rotates where the file does not say.
        interleaved: see `RopeConfig`.
        kv_heads_default: without num_key_value_heads there are as many as attention heads.
        first_window: see `refuse_windows`.
        stop_ids: where the file names none.
        output_norms: see `LayerSpec`.
        mlps: the MLP of each layer; by default all are dense ones of intermediate_size.
        latent_attention: the attention of each layer of a family with MLA; by default queries are grouped.
        mtp: the experts of the layer of multi-token prediction, which has the attention of the first layer. The file
            says whether there is one.
        biases_and_norms: further fields of `AttentionSpec`.

    Raises:
        CheckpointError: for a key that is missing or senseless, and for what the shared decoder does not compute.
    """
    fields = Fields(values)
    fields.insist("hidden_act", "silu", "the shared decoder's MLP is SwiGLU")
    refuse_unsupported(fields, norms_queries=biases_and_norms.get("qk_norm", False))
    refuse_windows(fields, first_window)
    if mlps is None:
        for key in _EXPERTS:
            if fields.values.get(key):
                raise CheckpointError(f"{fields.name}: {key}: a {family} model has no experts: use a dense model")
    dense = MLPSpec(fields.size("intermediate_size"))
    count = fields.size("num_hidden_layers", MAX_LAYERS)
    layer_mlps = [dense if mlps is None else mlps(index) for index in range(count)]
    hidden = fields.size("hidden_size")
    attention: Sequence[AttentionSpec | LatentAttentionSpec]
    if latent_attention is None:
        grouped = _grouped_attention(fields, head_dim, kv_heads_default, biases_and_norms)
        attention, rotating = [grouped] * count, grouped.head_dim
    else:
        attention, rotating = list(map(latent_attention, range(count))), latent_attention(0).rope_dim
    rope = _rope(fields, rotating, rotary_part, interleaved)
    context = fields.size("max_position_embeddings", MAX_CONTEXT)
    vocabulary = fields.size("vocab_size", MAX_VOCABULARY)
    norm = NormSpec(fields.number("rms_norm_eps", 1e-12, 0.1))
    # Layers of one kind share their table.
    sublayers = list(zip(attention, layer_mlps, strict=True))
    kinds = {each: LayerSpec(hidden, *each, norm, output_norms) for each in set(sublayers)}
    announced = fields.number("num_nextn_predict_layers", 0, MAX_LAYERS, default=0) >= 1
    return ModelConfig(
        family=family,
        vocab_size=vocabulary,
        layers=tuple(kinds[each] for each in sublayers),
        rope=rope,
        # With linear scaling the file states the context that was stretched, not the one that came of it.
        max_context=int(context * rope.position_scale),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        stop_ids=fields.token_ids("eos_token_id", stop_ids),
        mtp=LayerSpec(hidden, attention[0], mtp, norm, output_norms, predicts=True) if announced and mtp else None,
    )


def _grouped_attention(
    fields: Fields, head_dim: int | None, kv_heads_default: bool, biases_and_norms: Mapping[str, bool]
) -> AttentionSpec:
    """Attention with grouped queries; arguments and errors as of `read`."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if "head_dim" not in fields and head_dim is None:
        fields.divisor("num_attention_heads", "hidden_size", hidden)
    dim = fields.size("head_dim", default=head_dim or hidden // heads)
    kv_heads = fields.divisor(
        "num_key_value_heads", "num_attention_heads", heads, default=heads if kv_heads_default else None
    )
    return AttentionSpec(heads, kv_heads, dim, **biases_and_norms)


def tensors(config: ModelConfig, layer: Mapping[str, tuple[str, ...]] = LAYER) -> TensorMap:
    """The tensor map of a model named as Hugging Face does, its layers as in the table `layer`."""
    return expand(config, WHOLE, {**layer, **MTP}, "model.layers.{}.")


def is_prediction_layer(config: ModelConfig, name: str) -> bool:
    """Whether a tensor is of a layer after the last one: of multi-token prediction that is not used, or a copy of the
    embedding or the head."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return found is not None and int(found[1]) >= config.num_layers


def _rope(fields: Fields, head_dim: int, rotary_part: float, interleaved: bool) -> RopeConfig:
    """Rotary parameters from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling`."""
    old, new = fields.table("rope_scaling"), fields.table("rope_parameters")
    given = new if new.values else old
    if old.values and new.values and old.values != new.values:
        raise CheckpointError(f"{fields.name}: rope_scaling and rope_parameters contradict each other: remove one")
    if any(isinstance(value, Mapping) for value in given.values.values()):
        raise CheckpointError(f"{given.name}: rotary parameters that differ between layers are not supported")
    theta_from = given if "rope_theta" in given else fields
    part_from = given if "partial_rotary_factor" in given else fields
    if rotary_part == 1.0:  # transformers reads the key in no family that rotates whole heads
        part_from.insist("partial_rotary_factor", 1.0, "the whole of each head rotates in this family")
    part = part_from.number("partial_rotary_factor", 0.0, 1.0, default=rotary_part)
    rotary_dim = int(head_dim * part)
    if rotary_dim < 2 or rotary_dim % 2:
        raise fields.wrong("head_dim", f"a size of which the rotating part ({part:g} of it) is even")
    kind = given.values.get("rope_type", given.values.get("type", "default")) or "default"
    if kind not in ("default", "linear", "llama3"):
        raise CheckpointError(
            f"{given.name}: rope_type: {kind!r} is not supported, only default, linear and llama3: "
            "use a checkpoint without it"
        )
    return RopeConfig(
        theta=theta_from.number("rope_theta", 1.0, 1e15, default=10000.0),
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        position_scale=given.number("factor", 1.0, 1e6) if kind == "linear" else 1.0,
        scaling=_llama3(fields, given) if kind == "llama3" else None,
    )


def _llama3(fields: Fields, given: Fields) -> RopeScaling:
    key = "original_max_position_embeddings"
    original_from = fields if key in fields else given
    original = original_from.size(key, MAX_CONTEXT, default=fields.size("max_position_embeddings", MAX_CONTEXT))
    low = given.number("low_freq_factor", 1e-6, 1e6)
    high = given.number("high_freq_factor", 1e-6, 1e6)
    if not low < high:
        raise given.wrong("high_freq_factor", f"more than low_freq_factor ({low:g})")
    return RopeScaling(given.number("factor", 1.0, 1e6), low, high, original)
