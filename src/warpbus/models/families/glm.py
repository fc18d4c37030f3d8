"""GLM-4-9B in Hugging Face's own format (`model_type: glm`)."""

from collections.abc import Mapping
from typing import Any

from warpbus.models.config import ModelConfig
from warpbus.models.families import native
from warpbus.models.families.family import Family, Fields, TensorMap

# <|endoftext|>, <|user|>, <|observation|>
STOP_IDS = (151329, 151336, 151338)

LAYER = {**native.LAYER, "mlp.gate_up.weight": ("mlp.gate_up_proj.weight",)}


def read(values: Mapping[str, Any], family: str, *, output_norms: bool) -> ModelConfig:
    """Read a config.json of `glm` or `glm4`: half of each head rotates, in interleaved pairs."""
    return native.read(
        values,
        family,
        head_dim=128,
        rotary_part=0.5,
        interleaved=True,
        stop_ids=STOP_IDS,
        qkv_bias=Fields(values).flag("attention_bias", default=True),
        output_norms=output_norms,
    )


def _config(values: Mapping[str, Any]) -> ModelConfig:
    return read(values, "glm", output_norms=False)


def _tensors(config: ModelConfig) -> TensorMap:
    return native.tensors(config, LAYER)


GLM = Family("glm", ("glm",), _config, _tensors)
