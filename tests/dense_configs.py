"""Configs of dense models from flat keywords, for tests."""

from dataclasses import replace
from typing import Any

from warpbus.models import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec, RopeConfig

_LAYER = ("hidden_size", "output_norms", "normed_residual")
_ATTENTION = ("num_heads", "num_kv_heads", "head_dim", "qkv_bias", "output_bias", "qk_norm")


def dense_config(
    family: str = "glm",
    *,
    vocab_size: int,
    num_layers: int,
    rope: RopeConfig,
    max_context: int,
    norm_eps: float = 1e-5,
    **traits: Any,
) -> ModelConfig:
    """A model whose layers are all alike; `traits` as of `with_traits`."""
    layer = LayerSpec(
        hidden_size=traits["hidden_size"],
        attention=AttentionSpec(traits["num_heads"], traits["num_kv_heads"], traits["head_dim"]),
        mlp=MLPSpec(traits["ffn_size"]),
        norm=NormSpec(norm_eps),
    )
    config = ModelConfig(family, vocab_size, (layer,) * num_layers, rope, max_context)
    return with_traits(config, **traits)


def with_traits(config: ModelConfig, **traits: Any) -> ModelConfig:
    """Fields of the model, its layers, their attention (`qkv_bias`), MLP (`ffn_size`, `gated`, `mlp_bias`) or norms."""
    found = config.resized(num_layers=traits.pop("num_layers", None))
    layer = found.layers[0]
    attention = {key: traits.pop(key) for key in _ATTENTION if key in traits}
    mlp = {key: traits.pop(key) for key in ("ffn_size", "gated") if key in traits}
    if "mlp_bias" in traits:
        mlp["bias"] = mlp["output_bias"] = traits.pop("mlp_bias")
    norm = {"eps": traits.pop("norm_eps")} if "norm_eps" in traits else {}
    if "layer_norm" in traits:
        norm["kind"] = "layer" if traits.pop("layer_norm") else "rms"
    of_layer = {key: traits.pop(key) for key in _LAYER if key in traits}
    if attention or mlp or norm or of_layer:
        layer = replace(
            layer,
            attention=replace(layer.attention, **attention),
            mlp=replace(layer.mlp, **mlp),
            norm=replace(layer.norm, **norm),
            **of_layer,
        )
        found = replace(found, layers=(layer,) * found.num_layers)
    return replace(found, **traits)
