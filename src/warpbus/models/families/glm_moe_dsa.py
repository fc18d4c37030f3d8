"""GLM-5, 5.1 and 5.2 (`model_type: glm_moe_dsa`): GLM-4.7-Flash's layers with sparse attention (DSA)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from warpbus.models.config import ModelConfig
from warpbus.models.families import mla, moe, native
from warpbus.models.families.family import MAX_LAYERS, Family, Fields, TensorMap
from warpbus.models.families.glm4_moe import mixture
from warpbus.models.families.glm4_moe_lite import STOP_IDS, layer_mlps
from warpbus.models.latent_spec import IndexerSpec

_DENSE_LAYERS, _SCALE = 3, 2.5  # where the file does not say
_KINDS = {"F": "full", "S": "shared"}

INDEXER = {
    "attention.indexer.q.weight": ("self_attn.indexer.wq_b.weight",),
    "attention.indexer.k.weight": ("self_attn.indexer.wk.weight",),
    "attention.indexer.k_norm.weight": ("self_attn.indexer.k_norm.weight",),
    "attention.indexer.k_norm.bias": ("self_attn.indexer.k_norm.bias",),
    "attention.indexer.weights.weight": ("self_attn.indexer.weights_proj.weight",),
}


def _layer_attention(fields: Fields) -> native.LayerAttention:
    """The attention of each layer: those of GLM-5.2 share the tokens that an earlier layer has selected.

    Raises CheckpointError naming the key that is wrong.
    """
    if "q_lora_rank" not in fields:
        raise fields.wrong("q_lora_rank", "the features of the latents of queries, which the indexer reads")
    own = IndexerSpec(fields.size("index_n_heads"), fields.size("index_head_dim"), fields.size("index_topk"))
    attention = mla.attention(fields)
    if own.head_dim < attention.rope_dim:
        raise fields.wrong("index_head_dim", f"at least qk_rope_head_dim ({attention.rope_dim})")
    full, shared = (replace(attention, indexer=replace(own, shared=shares)) for shares in (False, True))
    kinds = _indexer_kinds(fields)
    return lambda index: full if kinds[index] == "full" else shared


def _indexer_kinds(fields: Fields) -> list[str]:
    """Of each layer "full" or "shared", from a list, a pattern such as FSSF, or a period."""
    count = fields.size("num_hidden_layers", MAX_LAYERS)
    key = "indexer_types" if "indexer_types" in fields else "index_topk_pattern"
    given = fields.values.get(key)
    if given is None:
        period = fields.size("index_topk_freq", MAX_LAYERS, default=1)
        first = int(fields.number("index_skip_topk_offset", 0, MAX_LAYERS, default=2))
        return ["full" if max(index - first + 1, 0) % period == 0 else "shared" for index in range(count)]
    kinds = [_KINDS.get(kind, kind) for kind in given] if isinstance(given, list | str) else []
    if len(kinds) != count or kinds[0] != "full" or not all(kind in _KINDS.values() for kind in kinds):
        raise fields.wrong(key, f"full or shared for each of {count} layers, full for the first")
    return kinds


def _config(values: Mapping[str, Any]) -> ModelConfig:
    kinds = values.get("layer_types")
    fields = Fields(values)
    experts = mixture(fields, scale=_SCALE)
    if kinds is not None and not (isinstance(kinds, list) and all(kind == "indexed_attention" for kind in kinds)):
        raise fields.wrong("layer_types", "indexed_attention for every layer")
    return native.read(
        {key: value for key, value in values.items() if key != "layer_types"},
        "glm_moe_dsa",
        interleaved=True,
        stop_ids=STOP_IDS,
        mlps=layer_mlps(fields, _DENSE_LAYERS, experts),
        mtp=experts,
        latent_attention=_layer_attention(fields),
    )


def _tensors(config: ModelConfig) -> TensorMap:
    return native.tensors(config, {**native.LAYER, **mla.ATTENTION, **INDEXER, **moe.EXPERTS})


GLM_MOE_DSA = Family("glm_moe_dsa", ("glm_moe_dsa",), _config, _tensors, ignores=native.is_prediction_layer)
