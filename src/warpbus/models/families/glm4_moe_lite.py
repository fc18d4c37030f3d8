"""GLM-4.7-Flash (`model_type: glm4_moe_lite`): multi-head latent attention, and the experts of GLM-4.5."""

from collections.abc import Mapping
from typing import Any

from warpbus.models.config import ModelConfig
from warpbus.models.families import mla, moe, native
from warpbus.models.families.family import MAX_LAYERS, Family, Fields, TensorMap
from warpbus.models.families.glm4_moe import mixture
from warpbus.models.layer_spec import MLPSpec, MoESpec

# <|endoftext|>, <|user|>, <|observation|>
STOP_IDS = (154820, 154827, 154829)


_SCALE = 1.8  # where the file does not say


def layer_mlps(fields: Fields, dense_layers: int, experts: MoESpec) -> moe.LayerMLP:
    """The MLP of each layer: the file lists the kinds, or counts the dense layers, which come first.

    Args:
        dense_layers: how many are dense where the file does not say.
        experts: the MLP of the others.

    Raises:
        CheckpointError: names the key that is wrong.
    """
    kinds = fields.values.get("mlp_layer_types")
    count = fields.size("num_hidden_layers", MAX_LAYERS)
    if kinds is None:
        dense_layers = int(fields.number("first_k_dense_replace", 0, MAX_LAYERS, default=dense_layers))
        kinds = ["dense" if index < dense_layers else "sparse" for index in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in ("dense", "sparse") for kind in kinds):
        raise fields.wrong("mlp_layer_types", f"dense or sparse for each of {count} layers")
    dense = MLPSpec(fields.size("intermediate_size"))
    return lambda index: dense if kinds[index] == "dense" else experts


def _config(values: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(values)
    attention, experts = mla.attention(fields), mixture(fields, scale=_SCALE)
    return native.read(
        values,
        "glm4_moe_lite",
        interleaved=fields.flag("rope_interleave", default=True),
        stop_ids=STOP_IDS,
        mlps=layer_mlps(fields, 1, experts),
        mtp=experts,
        latent_attention=lambda index: attention,
    )


def _tensors(config: ModelConfig) -> TensorMap:
    return native.tensors(config, {**native.LAYER, **mla.ATTENTION, **moe.EXPERTS})


GLM4_MOE_LITE = Family("glm4_moe_lite", ("glm4_moe_lite",), _config, _tensors, ignores=native.is_prediction_layer)
