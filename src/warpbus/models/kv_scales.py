"""The calibrated scales of a model's 8-bit KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from warpbus.errors import CheckpointError
from warpbus.formats import Checkpoint
from warpbus.formats.kv_cache import KVCacheScheme, read_kv_cache_scheme, read_kv_scales
from warpbus.kernels.reference.cache import quantize
from warpbus.models.config import ModelConfig
from warpbus.models.families import BY_NAME
from warpbus.models.layer_spec import AttentionSpec


@dataclass(frozen=True)
class KVScales:
    """Scales of keys and values.

    Attributes:
        scheme: of the cache.
        keys, values: for each of `ModelConfig.all_layers`, float32 `[kv_heads]`, on the CPU.
    """

    scheme: KVCacheScheme
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def rounded(self, layer: int, k_bthd: Tensor, v_bthd: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[batch, tokens, kv_heads, head_dim]` as they are read from the cache of a layer."""
        return self._rounded(k_bthd, self.keys[layer]), self._rounded(v_bthd, self.values[layer])

    def _rounded(self, x: Tensor, scales: Tensor) -> Tensor:
        codes, expanded = quantize(x, self.scheme.stored, scales.to(x.device))
        return (codes.float() * expanded[..., None]).to(x.dtype)


def attention_prefix(config: ModelConfig, index: int) -> str:
    """The name of a layer's attention in the checkpoint, which the names of its scales begin with."""
    (matrix, *_) = config.all_layers[index].reading("attention.normed")
    first, *_ = BY_NAME[config.family].tensors(config)[f"layers.{index}.{matrix.name}.weight"]
    return first.removesuffix(".weight").rpartition(".")[0]


def kv_cache_scheme(checkpoint: Checkpoint, config: ModelConfig) -> KVCacheScheme | None:
    """The scheme of a checkpoint's KV cache; None if it has none.

    Raises:
        CheckpointError: the scheme is not supported, or not with this model's attention.
    """
    scheme = read_kv_cache_scheme(checkpoint.config)
    if scheme is not None and not isinstance(config.attention, AttentionSpec):
        raise CheckpointError(
            f"{checkpoint.directory}: config.json: quantization_config.kv_cache_scheme: not supported with multi-head "
            "latent attention, whose FP8 cache has scales of its own: remove it, and k_scale and v_scale of all layers"
        )
    return scheme


def load_kv_scales(
    checkpoint: Checkpoint, config: ModelConfig, kv_heads: Sequence[int] | None = None
) -> KVScales | None:
    """The scales that a checkpoint has for its KV cache; None if it has none.

    Args:
        config: of the whole decoder.
        kv_heads: the numbers of those to read; None for all.

    Raises:
        CheckpointError: as `kv_cache_scheme`.
        TensorError: scales are missing or malformed.
    """
    scheme = kv_cache_scheme(checkpoint, config)
    if scheme is None:
        return None
    assert isinstance(config.attention, AttentionSpec)
    heads = config.attention.num_kv_heads
    keys, values = [], []
    for index in range(len(config.all_layers)):
        own = read_kv_scales(checkpoint, attention_prefix(config, index), scheme, heads)
        if kv_heads is not None:
            own = own[0][list(kv_heads)], own[1][list(kv_heads)]
        keys.append(own[0])
        values.append(own[1])
    return KVScales(scheme, tuple(keys), tuple(values))
