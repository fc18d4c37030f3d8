"""Mixtures of experts as Hugging Face names them: the experts' tensors, and the keys that count the experts."""

from collections.abc import Callable

from warpbus.models.families.family import Fields
from warpbus.models.layer_spec import MLPSpec, MoESpec

EXPERTS = {
    "mlp.router.weight": ("mlp.gate.weight",),
    "mlp.router.bias": ("mlp.gate.e_score_correction_bias",),
    "mlp.experts.{}.gate_up.weight": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "mlp.experts.{}.down.weight": ("mlp.experts.{}.down_proj.weight",),
    "mlp.shared.gate_up.weight": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    "mlp.shared.down.weight": ("mlp.shared_experts.down_proj.weight",),
}
"""The tensors of a layer with experts; `{}` stands for the number of the expert."""

MAX_EXPERTS = 4096

LayerMLP = Callable[[int], MLPSpec | MoESpec]
"""The MLP of a layer by its number."""


def expert_counts(fields: Fields, key: str) -> tuple[int, int]:
    """The number of experts under `key`, and of experts per token. Raises CheckpointError."""
    experts = fields.size(key, MAX_EXPERTS)
    top_k = fields.size("num_experts_per_tok", MAX_EXPERTS)
    if top_k > experts:
        raise fields.wrong("num_experts_per_tok", f"at most {key} ({experts})")
    return experts, top_k
