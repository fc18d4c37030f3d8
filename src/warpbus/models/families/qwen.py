"""Qwen 2 and 2.5 (`model_type: qwen2`), and Qwen 3 (`qwen3`), the dense ones."""

from collections.abc import Mapping
from typing import Any

from warpbus.models.config import ModelConfig
from warpbus.models.families import native
from warpbus.models.families.family import Family, TensorMap
from warpbus.models.families.fields import Fields

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


def _qwen3_tensors(config: ModelConfig) -> TensorMap:
    norms = {f"attention.{part}_norm.weight": (f"self_attn.{part}_norm.weight",) for part in "qk"}
    return native.tensors(config, {**native.LAYER, **norms})


QWEN2 = Family("qwen2", ("qwen2",), _qwen2, native.tensors)
QWEN3 = Family("qwen3", ("qwen3",), _qwen3, _qwen3_tensors)
