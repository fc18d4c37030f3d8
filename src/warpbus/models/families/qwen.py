"""Qwen 2 and 2.5 (`model_type: qwen2`), and Qwen 3 (`qwen3`), the dense ones."""

from collections.abc import Mapping
from typing import Any

from warpbus.errors import CheckpointError
from warpbus.models.config import ModelConfig
from warpbus.models.families import native
from warpbus.models.families.family import Family, TensorMap
from warpbus.models.families.fields import MAX_CONTEXT, MAX_LAYERS, Fields


def _qwen2(values: Mapping[str, Any]) -> ModelConfig:
    _refuse_windows(Fields(values))
    return native.read(values, "qwen2", kv_heads_default=True, qkv_bias=True)


def _qwen3(values: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(values)
    _refuse_windows(fields)
    bias = fields.flag("attention_bias", default=False)
    return native.read(
        values, "qwen3", head_dim=128, kv_heads_default=True, qk_norm=True, qkv_bias=bias, output_bias=bias
    )


def _qwen3_tensors(config: ModelConfig) -> TensorMap:
    norms = {f"attention.{part}_norm.weight": (f"self_attn.{part}_norm.weight",) for part in "qk"}
    return native.tensors(config, {**native.LAYER, **norms})


def _refuse_windows(fields: Fields) -> None:
    """A sliding window matters if it is on, shorter than the context, and used by a layer."""
    kinds = fields.values.get("layer_types") or []
    if not isinstance(kinds, list) or not all(kind in ("full_attention", "sliding_attention") for kind in kinds):
        raise fields.wrong("layer_types", "full_attention for every layer")
    if not fields.flag("use_sliding_window", default=False) or "sliding_window" not in fields:
        return
    window = fields.size("sliding_window", MAX_CONTEXT)
    from_layer = fields.number("max_window_layers", 0, MAX_LAYERS, default=0)
    used = "sliding_attention" in kinds if kinds else from_layer < fields.size("num_hidden_layers")
    if used and window < fields.size("max_position_embeddings", MAX_CONTEXT):
        raise CheckpointError(
            f"{fields.name}: sliding_window: windows of {window} tokens are not supported: "
            f"set max_position_embeddings to at most {window}, within which the window changes nothing"
        )


QWEN2 = Family("qwen2", ("qwen2",), _qwen2, native.tensors)
QWEN3 = Family("qwen3", ("qwen3",), _qwen3, _qwen3_tensors)
