"""GLM-4.5, GLM-4.5-Air, GLM-4.6 and GLM-4.7 (`model_type: glm4_moe`): mixtures of experts with a shared expert."""

from collections.abc import Mapping
from typing import Any

from warpbus.models.config import ModelConfig
from warpbus.models.families import glm, moe, native
from warpbus.models.families.family import MAX_LAYERS, Family, Fields, TensorMap
from warpbus.models.layer_spec import MLPSpec, MoESpec, RouterSpec


def _sigmoid_router(fields: Fields, scale: float) -> RouterSpec:
    """The router of GLM-4.5 and its successors; `scale` where the file does not say. Raises CheckpointError."""
    experts, top_k = moe.expert_counts(fields, "n_routed_experts")
    groups = fields.divisor("n_group", "n_routed_experts", experts, default=1)
    top_groups = fields.size("topk_group", groups, default=1)
    if groups > 1 and experts // groups < 2:
        raise fields.wrong("n_group", f"at most {experts // 2}, groups of two experts or more")
    if top_groups * (experts // groups) < top_k:
        raise fields.wrong("topk_group", f"enough groups of {experts // groups} for num_experts_per_tok ({top_k})")
    return RouterSpec(
        experts=experts,
        top_k=top_k,
        scoring="sigmoid",
        normalized=fields.flag("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", 1e-3, 1e3, default=scale),
        groups=groups,
        top_groups=top_groups,
        bias=True,
    )


def mixture(fields: Fields, *, scale: float = 1.0) -> MoESpec:
    """The experts of GLM-4.5 and its successors.

    Args:
        scale: see `RouterSpec`, where the file does not say.

    Raises:
        CheckpointError: names the key that is wrong.
    """
    width = fields.size("moe_intermediate_size")
    shared = int(fields.number("n_shared_experts", 0, moe.MAX_EXPERTS, default=1))
    return MoESpec(_sigmoid_router(fields, scale), MLPSpec(width), MLPSpec(shared * width) if shared else None)


def _layer_mlps(fields: Fields, experts: MoESpec) -> moe.LayerMLP:
    """The MLP of each layer: the first layers are dense. Raises CheckpointError naming the key that is wrong."""
    dense_layers = int(fields.number("first_k_dense_replace", 0, MAX_LAYERS, default=1))
    dense = MLPSpec(fields.size("intermediate_size"))
    return lambda index: dense if index < dense_layers else experts


def _config(values: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(values)
    experts = mixture(fields)
    return native.read(
        values,
        "glm4_moe",
        rotary_part=0.5,
        stop_ids=glm.STOP_IDS,
        mlps=_layer_mlps(fields, experts),
        mtp=experts,
        qk_norm=fields.flag("use_qk_norm", default=False),
        qkv_bias=fields.flag("attention_bias", default=False),
    )


def _tensors(config: ModelConfig) -> TensorMap:
    return native.tensors(config, {**native.LAYER, **native.QK_NORMS, **moe.EXPERTS})


GLM4_MOE = Family("glm4_moe", ("glm4_moe",), _config, _tensors, ignores=native.is_prediction_layer)
