"""Attention with a prefix of keys and values prepended to every sequence (P-Tuning v2; Liu et al., 2021)."""

import copy
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.models.layers.attention import CausalAttention, attend_masked
from warpbus.models.layers.packed_attention import Prefixed, packed_attention


class PrefixedAttention(CausalAttention):
    """`CausalAttention` in which each token also attends to the whole prefix, in packed rows too.

    Args:
        keys_lthd: `[layers, prefix tokens, kv_heads, head_dim]`, not rotated.
        values_lthd: same shape.
        documents_bt, prompts_bt: as `CausalAttention`; positions start at 0 after the prefix.
    """

    def __init__(
        self,
        keys_lthd: Tensor,
        values_lthd: Tensor,
        documents_bt: Tensor | None = None,
        prompts_bt: Tensor | None = None,
    ) -> None:
        super().__init__(documents_bt, prompts_bt)
        self._keys_lthd, self._values_lthd = keys_lthd, values_lthd
        self._prefixed: Prefixed | None = None

    def attend(self, layer: int, q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, positions_bt: Tensor) -> Tensor:
        extents = self.extents(q_bthd)
        if extents is not None:
            self._prefixed = self._prefixed or extents.behind(self._keys_lthd.shape[1])
            prefix = self._keys_lthd[layer], self._values_lthd[layer]
            return packed_attention(q_bthd, k_bthd, v_bthd, extents, self._prefixed, prefix)
        rows, tokens = q_bthd.shape[:2]
        mask = self.reached(positions_bt)
        if mask is None:
            mask = torch.ones(tokens, tokens, dtype=torch.bool, device=q_bthd.device).tril()
        mask = F.pad(mask, (self._keys_lthd.shape[1], 0), value=True)
        k_bthd, v_bthd = (
            torch.cat((prefix[layer].to(own.dtype).expand(rows, -1, -1, -1), own), dim=1)
            for prefix, own in ((self._keys_lthd, k_bthd), (self._values_lthd, v_bthd))
        )
        return attend_masked(q_bthd, k_bthd, v_bthd, mask)

    def of_layer(self, layer: int, positions_bt: Tensor) -> Self:
        other = copy.copy(super().of_layer(layer, positions_bt))
        other._keys_lthd, other._values_lthd = self._keys_lthd[layer, None], self._values_lthd[layer, None]
        return other
