"""`kv_cache_scheme` of compressed-tensors: the calibrated scales of an 8-bit KV cache.

The attention `prefix` of a layer, `model.layers.0.self_attn` for instance, has one positive scale for all keys that it
caches, after rotary positions, and one for all values, or one for each KV head:

    prefix.k_scale, prefix.v_scale    float32 [1], strategy "tensor"; [kv_heads, 1, 1], strategy "attn_head"

and a key is cached as the number of the storage type nearest to `key / k_scale`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import CheckpointError, TensorError, UsageError
from warpbus.formats.checkpoint import Checkpoint
from warpbus.formats.reading import require, unreadable

KV_SCHEMES = ("fp8", "int8", "fp8-head", "int8-head")
"""The names of the schemes: the storage type, and `-head` where each KV head has its own scale."""

_WHERE = "quantization_config.kv_cache_scheme"
_TYPES = {"fp8": "float", "int8": "int"}
_KNOWN = {"num_bits", "type", "symmetric", "strategy", "dynamic"}
# How scales were chosen, and settings of strategies that are not these.
_IRRELEVANT = {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}
_ABSENT = {"group_size", "block_structure", "actorder"}
_LARGEST = 3.4e38  # above: not finite in float32


@dataclass(frozen=True)
class KVCacheScheme:
    """How keys and values are cached.

    Attributes:
        dtype: "fp8" (e4m3) or "int8".
        per_head: each KV head has a scale of its own; otherwise a layer's keys have one, and its values another.
    """

    dtype: str
    per_head: bool

    @classmethod
    def parse(cls, text: str) -> "KVCacheScheme":
        """The scheme of a name. Raises UsageError if there is none."""
        if text not in KV_SCHEMES:
            raise UsageError(f"kv_cache is {text!a:.60}: choose from {', '.join(KV_SCHEMES)}")
        dtype, _, head = text.partition("-")
        return cls(dtype, head == "head")

    def __str__(self) -> str:
        return f"{self.dtype}-head" if self.per_head else self.dtype

    @property
    def stored(self) -> torch.dtype:
        """The storage type."""
        return torch.int8 if self.dtype == "int8" else torch.float8_e4m3fn

    def to_json(self) -> dict[str, Any]:
        """What `config.json` holds under `quantization_config.kv_cache_scheme`."""
        strategy = "attn_head" if self.per_head else "tensor"
        return {
            "num_bits": 8,
            "type": _TYPES[self.dtype],
            "strategy": strategy,
            "symmetric": True,
            "dynamic": False,
        }

    def to_tensors(self, prefix: str, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """The tensors of the attention `prefix`, from scales float32 `[kv_heads]`, all equal if not `per_head`."""
        found = {}
        for name, scales in scale_names(prefix).items():
            own = (keys if name == "k" else values).float().cpu()
            found[scales] = (own[:, None, None] if self.per_head else own[:1]).contiguous()
        return found


def scale_names(prefix: str) -> dict[str, str]:
    """The names of the tensors of the attention `prefix`, by "k" and "v"."""
    return {name: f"{prefix}.{name}_scale" for name in ("k", "v")}


def read_kv_cache_scheme(config: dict[str, Any]) -> KVCacheScheme | None:
    """The scheme of a model's KV cache, from its `config.json`; None if it has none.

    Raises:
        CheckpointError: the scheme is not supported.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "compressed-tensors":
        return None
    found = quantization.get("kv_cache_scheme")
    if not found:
        return None
    if not isinstance(found, dict):
        raise unreadable(_WHERE, found, "an object")
    for key, values in {
        "num_bits": (8,),
        "type": tuple(_TYPES.values()),
        "strategy": ("tensor", "attn_head"),
        "symmetric": (True,),
        "dynamic": (False,),
        **dict.fromkeys(sorted(_ABSENT), (None,)),
    }.items():
        require(found, _WHERE, key, values)
    for key in sorted(found.keys() - _KNOWN - _IRRELEVANT - _ABSENT):
        require(found, _WHERE, key, (None,))
    dtype = next(name for name, kind in _TYPES.items() if kind == found["type"])
    return KVCacheScheme(dtype, found["strategy"] == "attn_head")


def read_kv_scales(checkpoint: Checkpoint, prefix: str, scheme: KVCacheScheme, kv_heads: int) -> tuple[Tensor, Tensor]:
    """The scales of the keys and the values of the attention `prefix`, float32 `[kv_heads]` each.

    Raises:
        TensorError: a tensor is missing, has the wrong shape or dtype, or a scale that is not positive and finite.
        CheckpointError: the scales are not symmetric.
    """
    found = []
    for kind, name in scale_names(prefix).items():
        if name not in checkpoint:
            raise TensorError(
                f"{checkpoint.directory}: {name}: missing, although config.json announces scales with kv_cache_scheme: "
                "use a complete checkpoint, or remove kv_cache_scheme"
            )
        if f"{prefix}.{kind}_zero_point" in checkpoint:
            raise CheckpointError(f"{checkpoint.directory}: {prefix}.{kind}_zero_point: zero points are not supported")
        count = checkpoint.stored(name).nbytes // checkpoint.dtype(name).itemsize
        expected = kv_heads if scheme.per_head else 1
        if count != expected or not checkpoint.dtype(name).is_floating_point:
            raise TensorError(
                f"{checkpoint.directory}: {name}: expected {expected} floating point scales, found "
                f"{checkpoint.dtype(name)} {list(checkpoint.shape(name))}"
            )
        scales = checkpoint.tensor(name).reshape(-1).to(torch.float32, copy=True)
        if not ((scales > 0) & (scales < _LARGEST)).all():
            raise TensorError(f"{checkpoint.directory}: {name}: expected positive, finite scales")
        found.append(scales.expand(kv_heads).contiguous())
    return found[0], found[1]
