"""What a family declares: how its config.json reads, and where its tensors lie."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from warpbus.models.config import ModelConfig
from warpbus.models.layer_spec import MoESpec

TensorMap = dict[str, tuple[str, ...]]
"""From a decoder's parameter to the checkpoint's tensors that are stacked along rows to make it."""


@dataclass(frozen=True)
class Family:
    """A family of models that share one config format and one naming of tensors.

    Attributes:
        name: what `ModelConfig.family` says.
        model_types: the values of `model_type` in config.json that mean this family.
        config: reads a parsed config.json; raises `CheckpointError` naming the key that is wrong.
        tensors: the tensors that a decoder of that config needs, and no others.
        ffn_key: the key of config.json that has the size of the FFN.
        claims: whether a parsed config.json with one of these types is of this family, where others share the type.
        ignores: whether a tensor of a file is one that the decoder does not use.
        qkv_by_head: the file's fused projection has each head's queries, keys and values together, see
            `warpbus.models.row_order`.
    """

    name: str
    model_types: tuple[str, ...]
    config: Callable[[Mapping[str, Any]], ModelConfig]
    tensors: Callable[[ModelConfig], TensorMap]
    ffn_key: str = "intermediate_size"
    claims: Callable[[Mapping[str, Any]], bool] = lambda values: True
    ignores: Callable[[ModelConfig, str], bool] = lambda config, name: False
    qkv_by_head: bool = False


def expand(
    config: ModelConfig,
    whole: Mapping[str, tuple[str, ...]],
    layer: Mapping[str, tuple[str, ...]],
    prefix: str,
) -> TensorMap:
    """Write a family's tables out for every layer.

    Args:
        whole: parameters outside the layers, as in `TensorMap`.
        layer: parameters of a layer, without `layers.N.`, and their tensors without `prefix`; `{}` stands for the
            number of the expert.
        prefix: what the tensors of a layer begin with, `{}` standing for the layer's number.

    Returns:
        the tensors of this config. Of the tables only those parameters are taken that a layer's spec has.
    """
    tensors = {name: names for name, names in whole.items() if not (config.tie_embeddings and name == "head.weight")}
    for index, spec in enumerate(config.all_layers):
        start = prefix.format(index)
        experts = spec.mlp.router.experts if isinstance(spec.mlp, MoESpec) else 0
        for pattern, names in layer.items():
            for expert in range(experts) if "{}" in pattern else (0,):
                parameter = pattern.format(expert)
                if parameter in spec.parameters:
                    tensors[f"layers.{index}.{parameter}"] = tuple(start + name.format(expert) for name in names)
    return tensors
