"""The prefixes of an engine: keys and values that come before all tokens (P-Tuning v2; Liu et al., 2021).

Each is written once, into blocks of the cache that are nobody's: requests that have it read them there. Its last block,
where it does not fill that, is only copied from: behind its end a request's own tokens begin.
"""

from collections import abc

import torch
from torch import Tensor

from warpbus.engine.blocks import BLOCK, NULL_BLOCK
from warpbus.engine.kv_cache import KVCache
from warpbus.engine.positions import identity_rope, rotary_order
from warpbus.errors import CheckpointError
from warpbus.kernels.ops.rope import rope_and_cache
from warpbus.models import ModelConfig
from warpbus.models.adapters import Lora, Prefix


class Prefixes:
    """The prefixes among an engine's adapters.

    Args:
        adapters: with names that differ.
        config: of the model, or of one process's part of it.

    Attributes:
        blocks: that they take together, the first ones after `NULL_BLOCK`.
        longest: places of the cache that the longest takes.
        extra_blocks: 1 where requests may need a block more than their tokens fill, since a prefix ends within one;
            else 0.

    Raises:
        CheckpointError: one is another model's.
    """

    def __init__(self, adapters: abc.Sequence[Lora | Prefix], config: ModelConfig) -> None:
        self._config = config
        self._prefixes = [adapter for adapter in adapters if isinstance(adapter, Prefix)]
        self._blocks: dict[str | None, range] = {}
        first = NULL_BLOCK + 1
        for prefix in self._prefixes:
            _check(prefix, config)
            self._blocks[prefix.name] = range(first, first + prefix_blocks(prefix.tokens))
            first = self._blocks[prefix.name].stop
        self._tokens: dict[str | None, int] = {prefix.name: prefix.tokens for prefix in self._prefixes}
        self.blocks = first - NULL_BLOCK - 1
        self.longest = max(self._tokens.values(), default=0)
        self.extra_blocks = int(any(tokens % BLOCK for tokens in self._tokens.values()))

    def of(self, name: str | None) -> tuple[tuple[int, ...], int]:
        """The blocks of a prefix, and how many places it takes; none of both for other names."""
        return tuple(self._blocks.get(name, ())), self._tokens.get(name, 0)

    @torch.inference_mode()
    def write(self, cache: KVCache, dtype: torch.dtype) -> None:
        """Write all of them to their blocks, which have memory, as the cache keeps keys and values of `dtype`.

        Raises:
            CheckpointError: one holds NaN or infinity in `dtype`.
        """
        device = cache.layers[0][0].device
        order = rotary_order(self._config).to(device)
        for prefix in self._prefixes:
            first = self._blocks[prefix.name].start * BLOCK
            slots = torch.arange(first, first + prefix.tokens, device=device)
            # A layer at a time: what is planned for activations is not much.
            for stored, *own in zip(cache.layers, prefix.keys_lthd, prefix.values_lthd, strict=True):
                k_thd, v_thd = (x.to(device, dtype) for x in own)
                if not (k_thd.isfinite().all() and v_thd.isfinite().all()):
                    raise CheckpointError(
                        f"adapter {prefix.name}: its keys and values hold NaN or infinity in {dtype}: it is damaged, "
                        "or needs dtype bfloat16 or float32"
                    )
                _store(k_thd.index_select(-1, order), v_thd, slots, stored)


def prefix_blocks(tokens: int) -> int:
    """How many blocks of the cache a prefix takes."""
    return -(-tokens // BLOCK)


def _store(
    k_thd: Tensor, v_thd: Tensor, slots: Tensor, stored: tuple[Tensor, Tensor, Tensor | None, Tensor | None]
) -> None:
    """Write keys as they are, and values, to places of a layer's cache."""
    # Queries are asked for as well; nobody takes them.
    qkv = torch.cat((k_thd, k_thd, v_thd), dim=1).flatten(1)
    nowhere = torch.zeros(len(slots), dtype=torch.int32, device=slots.device)
    table = identity_rope(1, slots.device)
    rope_and_cache(qkv, table, nowhere, slots, *stored, heads=k_thd.shape[1], interleaved=False)


def _check(prefix: Prefix, config: ModelConfig) -> None:
    expected = (config.num_layers, prefix.tokens, config.attention.num_kv_heads, config.attention.head_dim)
    for x in (prefix.keys_lthd, prefix.values_lthd):
        if tuple(x.shape) != expected:
            raise CheckpointError(
                f"adapter {prefix.name}: keys and values of {list(x.shape)}, expected {list(expected)}, which is "
                "[layers, tokens, KV heads, head_dim]: it is another model's"
            )
