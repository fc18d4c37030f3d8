"""The declaration of a family: how its config.json reads (`Fields`), and where its tensors lie.

A damaged config.json is refused by the name of the value and not by a crash. Keys that change what a model computes and
that no family here computes are refused, never ignored. They come from relatives of the families: the same `model_type`
with a cap on the logits, a factor on the embedding, a window of attention. A value that changes nothing is accepted.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from warpbus.errors import CheckpointError
from warpbus.models.config import ModelConfig
from warpbus.models.layer_spec import MoESpec

TensorMap = dict[str, tuple[str, ...]]
"""From a decoder's parameter to the checkpoint's tensors that are stacked along rows to make it."""


@dataclass(frozen=True)
class Family:
    """A family of models that share one config format and one naming of tensors.

    Attributes:
        name: the value of `ModelConfig.family`.
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
        prefix: the beginning of the tensor names of a layer, `{}` standing for the layer's number.

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


MAX_SIZE = 2**20
MAX_LAYERS = 4096
MAX_VOCABULARY = 2**22
MAX_CONTEXT = 2**27

_WINDOW = 4096
"""Tokens of a window whose size the file does not give, as in transformers."""

_ONLY: Mapping[str, tuple[object, str]] = {
    "attn_logit_softcapping": (None, "attention scores are not capped"),
    "final_logit_softcapping": (None, "logits are not capped"),
    "clip_qkv": (None, "queries, keys and values are not clipped"),
    "attention_chunk_size": (None, "all tokens attend to all before them"),
    "logit_scale": (1, "logits are not scaled"),
    "logits_scaling": (1, "logits are not scaled"),
    "attention_multiplier": (None, "attention scores are scaled by 1 / sqrt(head_dim)"),
    "embedding_multiplier": (1, "embeddings are not scaled"),
    "residual_multiplier": (1, "residuals are not scaled"),
    "scale_emb": (1, "embeddings are not scaled"),
    "scale_depth": (None, "residuals are not scaled"),
    "mlp_bias": (False, "gated MLPs have no biases here"),
    "parallel_attn": (False, "the MLP follows attention"),
    "use_parallel_residual": (False, "the MLP follows attention"),
    "qk_layernorm": (False, "queries and keys of this family are not normed"),
    "is_causal": (True, "attention is causal"),
    "use_bidirectional_attention": (False, "attention is causal"),
}


class Fields:
    """A parsed JSON object and the name it goes by in messages.

    A key whose value is null counts as missing, as it does in transformers. Every method raises
    `CheckpointError` for a value of the wrong type or outside its range, and for a missing key without a default.
    """

    def __init__(self, values: Mapping[str, Any], name: str = "config.json") -> None:
        self.values = values
        self.name = name

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """The error that says what `key` should have been."""
        found = f"found {self.values[key]!r}" if key in self else "it is missing"
        return CheckpointError(f"{self.name}: {key}: expected {expected}, but {found}")

    def size(self, key: str, limit: int = MAX_SIZE, default: int | None = None) -> int:
        """An integer from 1 to `limit`."""
        value = default if key not in self else self.values[key]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
            raise self.wrong(key, f"an integer from 1 to {limit}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number from `low` to `high`."""
        value = default if key not in self else self.values[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value is None or not math.isfinite(value) or not low <= value <= high:
            raise self.wrong(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """`true` or `false`."""
        value = self.values[key] if key in self else default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def table(self, key: str) -> "Fields":
        """A nested object; an empty one where the key is missing."""
        value = self.values[key] if key in self else {}
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return Fields(value, f"{self.name}: {key}")

    def insist(self, key: str, only: Any, why: str) -> None:
        """Refuse a model whose `key` is given and is not `only`."""
        if key in self and self.values[key] != only:
            raise CheckpointError(f"{self.name}: {key}: {self.values[key]!r} is not supported, only {only!r}: {why}")

    def divisor(self, key: str, of: str, total: int, default: int | None = None) -> int:
        """A size that divides `total`, which is the value of the key `of`."""
        value = self.size(key, default=default)
        if total % value:
            raise self.wrong(key, f"a divisor of {of} ({total})")
        return value

    def token_ids(self, key: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """One token id or a list of them."""
        if key not in self:
            return default
        value = self.values[key]
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise self.wrong(key, "a token id, or a list of them")
        return tuple(dict.fromkeys(ids))


def refuse_unsupported(fields: Fields, *, norms_queries: bool = False) -> None:
    """Check the keys of this file, for whatever family.

    Args:
        fields: of the file.
        norms_queries: queries and keys are normed as the file says.

    Raises:
        CheckpointError: names the key, its value and the only one that is supported.
    """
    for key, (only, why) in _ONLY.items():
        fields.insist(key, only, why)
    if not norms_queries:
        fields.insist("use_qk_norm", False, "queries and keys of this family are not normed")
    for key in ("dtype", "torch_dtype"):
        _check_dtype(fields, key)


def refuse_windows(fields: Fields, first: int | None = None) -> None:
    """Refuse a sliding window that some layer uses and that is shorter than the context.

    Args:
        fields: of a file with the keys of Hugging Face's own models.
        first: in a family whose windows `use_sliding_window` turns on, the first layer that has one where the file
            names none; `None` in families without that flag.

    Raises:
        CheckpointError: names the key.
    """
    kinds = fields.values.get("layer_types") or []
    if not isinstance(kinds, list) or not all(kind in ("full_attention", "sliding_attention") for kind in kinds):
        raise fields.wrong("layer_types", "full_attention for every layer")
    if not fields.flag("use_sliding_window", default=first is None and ("sliding_window" in fields or bool(kinds))):
        return
    if "sliding_window" in fields.values and "sliding_window" not in fields:
        return  # null, which is no window; a missing key is not
    window = fields.size("sliding_window", MAX_CONTEXT, default=_WINDOW)
    from_layer = fields.number("max_window_layers", 0, MAX_LAYERS, default=first or 0)
    used = "sliding_attention" in kinds if kinds else from_layer < fields.size("num_hidden_layers", MAX_LAYERS)
    if used and window < fields.size("max_position_embeddings", MAX_CONTEXT):
        raise CheckpointError(
            f"{fields.name}: sliding_window: windows of {window} tokens are not supported: "
            f"set max_position_embeddings to at most {window}, within which the window changes nothing"
        )


def _check_dtype(fields: Fields, key: str) -> None:
    """The name of a floating dtype, or "auto"."""
    if key not in fields:
        return
    name: Any = fields.values[key]
    found = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    if name != "auto" and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise fields.wrong(key, "a floating dtype, such as bfloat16")
