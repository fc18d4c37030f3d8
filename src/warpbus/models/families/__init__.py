"""The families: one short declaration each, found by `model_type`. How to add one: docs/add_a_model.md."""

from warpbus.models.families.chatglm2 import CHATGLM2
from warpbus.models.families.family import Family, TensorMap
from warpbus.models.families.glm import GLM
from warpbus.models.families.glm4 import GLM4
from warpbus.models.families.llama import LLAMA
from warpbus.models.families.qwen import QWEN2, QWEN3

FAMILIES = (CHATGLM2, GLM, GLM4, LLAMA, QWEN2, QWEN3)

BY_NAME = {family.name: family for family in FAMILIES}
BY_MODEL_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}

__all__ = ["BY_MODEL_TYPE", "BY_NAME", "FAMILIES", "Family", "TensorMap"]
