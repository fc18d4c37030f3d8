"""The prefixes of an engine: keys and values that precede all tokens (P-Tuning v2; Liu et al., 2021).

Each prefix is written once, to reserved blocks of the cache, which all requests with the prefix read. If it does not
fill its last block, each request copies that block and appends its own tokens to the copy.
"""

from collections import abc

import torch
from torch import Tensor

from warpbus.engine.blocks import BLOCK, NULL_BLOCK, blocks_for
from warpbus.engine.kv_cache import KVCache
from warpbus.engine.positions import identity_rope, rotary_order
from warpbus.errors import CheckpointError
from warpbus.kernels.ops.rope import rope_and_cache
from warpbus.models import LatentAttentionSpec, ModelConfig
from warpbus.models.adapters import Lora, Prefix


class Prefixes:
    """The prefixes among an engine's adapters.

    Args:
        adapters: with names that differ.
        config: of the model, or of one process's part of it.

    Attributes:
        all: the prefixes.
        blocks: of all prefixes together, the first ones after `NULL_BLOCK`.
        longest: cache positions of the longest prefix.
        extra_blocks: 1 if requests may need one block more than their tokens fill, since a prefix ends within a block;
            else 0.

    Raises:
        CheckpointError: a prefix does not fit the model.
    """

    def __init__(self, adapters: abc.Sequence[Lora | Prefix], config: ModelConfig) -> None:
        self._config = config
        self.all = [adapter for adapter in adapters if isinstance(adapter, Prefix)]
        self._blocks: dict[str | None, range] = {}
        first = NULL_BLOCK + 1
        for prefix in self.all:
            _check(prefix, config)
            self._blocks[prefix.name] = range(first, first + blocks_for(prefix.tokens))
            first = self._blocks[prefix.name].stop
        self._tokens: dict[str | None, int] = {prefix.name: prefix.tokens for prefix in self.all}
        self.blocks = first - NULL_BLOCK - 1
        self.longest = max(self._tokens.values(), default=0)
        self.extra_blocks = int(any(tokens % BLOCK for tokens in self._tokens.values()))

    def of(self, name: str | None) -> tuple[tuple[int, ...], int]:
        """The blocks and the cache positions of a prefix; () and 0 for other names."""
        return tuple(self._blocks.get(name, ())), self._tokens.get(name, 0)

    @torch.inference_mode()
    def write(self, cache: KVCache, dtype: torch.dtype) -> None:
        """Write all prefixes to their committed blocks, in the storage type of the cache for activations of `dtype`.

        Raises:
            CheckpointError: a prefix holds NaN or infinity in `dtype`.
        """
        device = cache.layers[0][0].device
        order = rotary_order(self._config).to(device)
        for prefix in self.all:
            first = self._blocks[prefix.name].start * BLOCK
            slots = torch.arange(first, first + prefix.tokens, device=device)
            # Layer by layer: a memory plan leaves little for activations.
            layers = zip(cache.layers, cache.fixed_scales, prefix.keys_lthd, prefix.values_lthd, strict=True)
            for stored, fixed, *own in layers:
                k_thd, v_thd = (x.to(device, dtype) for x in own)
                if not (k_thd.isfinite().all() and v_thd.isfinite().all()):
                    raise CheckpointError(
                        f"adapter {prefix.name}: its keys and values hold NaN or infinity in {dtype}: it is damaged, "
                        "or needs dtype bfloat16 or float32"
                    )
                _store(k_thd.index_select(-1, order), v_thd, slots, stored, fixed)


def _store(
    k_thd: Tensor,
    v_thd: Tensor,
    slots: Tensor,
    stored: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    fixed: tuple[Tensor, Tensor] | None,
) -> None:
    """Write keys, without rotation, and values to slots of a layer's cache."""
    # The kernel also needs queries; their result is not used.
    qkv = torch.cat((k_thd, k_thd, v_thd), dim=1).flatten(1)
    nowhere = torch.zeros(len(slots), dtype=torch.int32, device=slots.device)
    table = identity_rope(1, slots.device)
    rope_and_cache(qkv, table, nowhere, slots, *stored, fixed, heads=k_thd.shape[1], interleaved=False)


def _check(prefix: Prefix, config: ModelConfig) -> None:
    if isinstance(config.attention, LatentAttentionSpec):
        raise CheckpointError(
            f"adapter {prefix.name}: P-Tuning prefixes are keys and values of every head, which a model with "
            "multi-head latent attention does not cache: use a LoRA"
        )
    expected = (config.num_layers, prefix.tokens, config.attention.num_kv_heads, config.attention.head_dim)
    for x in (prefix.keys_lthd, prefix.values_lthd):
        if tuple(x.shape) != expected:
            raise CheckpointError(
                f"adapter {prefix.name}: keys and values of {list(x.shape)}, expected {list(expected)}, which is "
                "[layers, tokens, KV heads, head_dim]: it is another model's"
            )
