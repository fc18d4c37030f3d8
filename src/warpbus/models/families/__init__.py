"""The families: one short declaration each, found by `model_type`. How to add one: docs/add_a_model.md."""

from collections.abc import Mapping
from typing import Any

from warpbus.models.families.chatglm import CHATGLM
from warpbus.models.families.chatglm2 import CHATGLM2
from warpbus.models.families.family import Family, TensorMap
from warpbus.models.families.glm import GLM
from warpbus.models.families.glm4 import GLM4
from warpbus.models.families.glm4_moe import GLM4_MOE
from warpbus.models.families.glm4_moe_lite import GLM4_MOE_LITE
from warpbus.models.families.glm_moe_dsa import GLM_MOE_DSA
from warpbus.models.families.llama import LLAMA
from warpbus.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE

FAMILIES = (CHATGLM, CHATGLM2, GLM, GLM4, GLM4_MOE, GLM4_MOE_LITE, GLM_MOE_DSA, LLAMA, QWEN2, QWEN3, QWEN3_MOE)

BY_NAME = {family.name: family for family in FAMILIES}
MODEL_TYPES = tuple(sorted({model_type for family in FAMILIES for model_type in family.model_types}))


def family_of(values: Mapping[str, Any]) -> Family | None:
    """The family of a parsed config.json; None for a `model_type` that no family declares."""
    fitting = (family for family in FAMILIES if values.get("model_type") in family.model_types)
    return next((family for family in fitting if family.claims(values)), None)


__all__ = ["BY_NAME", "FAMILIES", "MODEL_TYPES", "Family", "TensorMap", "family_of"]
