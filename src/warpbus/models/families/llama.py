"""Llama 2 and 3 (`model_type: llama`), and what is built like them."""

from collections.abc import Mapping
from typing import Any

from warpbus.models.config import ModelConfig
from warpbus.models.families import native
from warpbus.models.families.family import Family, Fields


def _config(values: Mapping[str, Any]) -> ModelConfig:
    bias = Fields(values).flag("attention_bias", default=False)
    return native.read(values, "llama", kv_heads_default=True, qkv_bias=bias, output_bias=bias)


LLAMA = Family("llama", ("llama",), _config, native.tensors)
