"""The scales of an 8-bit KV cache, from the largest magnitudes of calibrated keys and values."""

from collections.abc import Callable

import torch
from torch import Tensor

from warpbus.formats.kv_cache import KVCacheScheme
from warpbus.kernels.reference.grid import LARGEST


class KVRange:
    """An attention context that records the ranges of keys and values and does not attend.

    Args:
        tokens: from `[batch, tokens, features]` to `[n, features]`, without padding.

    Attributes:
        largest: float32 `[2, kv_heads]`, the largest magnitudes of the keys, after rotary positions, and the values.
    """

    def __init__(self, tokens: Callable[[Tensor], Tensor]) -> None:
        self._tokens = tokens
        self.largest: Tensor

    def attend(self, layer: int, q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, positions_bt: Tensor) -> Tensor:
        del layer, positions_bt
        heads = k_bthd.shape[2]
        found = [self._tokens(x.flatten(2)).unflatten(1, (heads, -1)).abs().amax((0, 2)) for x in (k_bthd, v_bthd)]
        self.largest = torch.stack(found).float()
        return q_bthd


def scales_of(scheme: KVCacheScheme, largest: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The scales of keys and values, float32 `[kv_heads]` each, that map the largest magnitudes to the largest code;
    all equal unless the scheme has one per head. For zeros the scale is 1."""
    found = []
    for each in largest:
        own = each if scheme.per_head else each.max().expand(len(each))
        scales = own / LARGEST[scheme.stored]
        found.append(torch.where(scales > 0, scales, 1.0))
    return found[0], found[1]
