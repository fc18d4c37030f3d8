"""Qwen 2 and 2.5 (`model_type: qwen2`), Qwen 3 (`qwen3`), and Qwen 3 with experts (`qwen3_moe`)."""

from collections.abc import Mapping
from typing import Any

from warpbus.models.config import ModelConfig
from warpbus.models.families import moe, native
from warpbus.models.families.family import MAX_LAYERS, Family, Fields, TensorMap
from warpbus.models.layer_spec import MLPSpec, MoESpec, RouterSpec

_FIRST_WINDOW = 28
"""The first layer with a sliding window where the file turns windows on and names no `max_window_layers`."""


def _qwen2(values: Mapping[str, Any]) -> ModelConfig:
    return native.read(values, "qwen2", kv_heads_default=True, first_window=_FIRST_WINDOW, qkv_bias=True)


def _qwen3(values: Mapping[str, Any]) -> ModelConfig:
    bias = Fields(values).flag("attention_bias", default=False)
    return native.read(
        values,
        "qwen3",
        head_dim=128,
        kv_heads_default=True,
        first_window=_FIRST_WINDOW,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
    )


def _qwen3_moe(values: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(values)
    bias = fields.flag("attention_bias", default=False)
    return native.read(
        values,
        "qwen3_moe",
        kv_heads_default=True,
        mlps=_layer_mlps(fields),
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
    )


def _layer_mlps(fields: Fields) -> moe.LayerMLP:
    """Every `decoder_sparse_step`-th layer has experts, but for those of `mlp_only_layers`."""
    # The name that transformers writes since version 5 is the second one.
    experts, top_k = moe.expert_counts(fields, "num_experts" if "num_experts" in fields else "num_local_experts")
    normalized = fields.flag("norm_topk_prob", default=False)
    router = RouterSpec(experts, top_k, "softmax", normalized)
    mixture = MoESpec(router, MLPSpec(fields.size("moe_intermediate_size")))
    dense = MLPSpec(fields.size("intermediate_size"))
    step = fields.size("decoder_sparse_step", MAX_LAYERS, default=1)
    only = fields.values.get("mlp_only_layers") or []
    if not isinstance(only, list) or not all(isinstance(index, int) for index in only):
        raise fields.wrong("mlp_only_layers", "a list of layer numbers")
    return lambda index: dense if index in only or (index + 1) % step else mixture


def _qwen3_tensors(config: ModelConfig) -> TensorMap:
    return native.tensors(config, {**native.LAYER, **native.QK_NORMS})


def _qwen3_moe_tensors(config: ModelConfig) -> TensorMap:
    return native.tensors(config, {**native.LAYER, **native.QK_NORMS, **moe.EXPERTS})


QWEN2 = Family("qwen2", ("qwen2",), _qwen2, native.tensors)
QWEN3 = Family("qwen3", ("qwen3",), _qwen3, _qwen3_tensors)
QWEN3_MOE = Family("qwen3_moe", ("qwen3_moe",), _qwen3_moe, _qwen3_moe_tensors)
