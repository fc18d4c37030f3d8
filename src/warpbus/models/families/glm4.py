"""GLM-4-0414 (`model_type: glm4`): GLM-4-9B with norms on the outputs of attention and MLP as well."""

from collections.abc import Mapping
from typing import Any

from warpbus.models.config import ModelConfig
from warpbus.models.families import glm, native
from warpbus.models.families.family import Family, TensorMap

# post_attention_layernorm remains the norm before the MLP: the names say less than they seem to.
LAYER = {
    **glm.LAYER,
    "attention_output_norm.weight": ("post_self_attn_layernorm.weight",),
    "mlp_output_norm.weight": ("post_mlp_layernorm.weight",),
}


def _config(values: Mapping[str, Any]) -> ModelConfig:
    return glm.read(values, "glm4", output_norms=True)


def _tensors(config: ModelConfig) -> TensorMap:
    return native.tensors(config, LAYER)


GLM4 = Family("glm4", ("glm4",), _config, _tensors)
