"""P-Tuning v2: keys and values of a prefix are trained, which stands before every sequence (Liu et al., 2021).

They are trained as they are, without a network that makes them: what is learnt is what ChatGLM's own checkpoints hold.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from warpbus.models.decoder import Decoder
from warpbus.models.layers import CausalAttention
from warpbus.models.layers.prefixed import PrefixedAttention


class TrainedPrefix(nn.Module):
    """The keys and values of a prefix, float32.

    Attributes:
        keys, values: `[layers, tokens, kv_heads, head_dim]`; keys are not rotated.
    """

    def __init__(self, keys_lthd: Tensor, values_lthd: Tensor) -> None:
        super().__init__()
        self.keys, self.values = nn.Parameter(keys_lthd), nn.Parameter(values_lthd)

    @classmethod
    @torch.no_grad()
    def beginning(cls, model: Decoder, tokens: NDArray[np.int32], count: int) -> "TrainedPrefix":
        """A prefix to begin with: the keys and values that the model itself has of some tokens of the data.

        From there training is quicker and steadier than from random numbers (Li and Liang, 2021, arXiv:2101.00190,
        section 7.4).

        Args:
            tokens: ids, repeated where there are fewer than `count`.
            count: tokens of the prefix.
        """
        device = model.embedding_device
        ids = torch.from_numpy(np.resize(tokens, count).astype(np.int64)).to(device)[None]
        kept = _Kept()
        # At position 0, in both dimensions where there are two, nothing is rotated.
        model.hidden(ids, torch.zeros_like(ids), kept, torch.ones_like(ids))
        return cls(torch.cat(kept.keys).float(), torch.cat(kept.values).float())

    def context(self, documents_bt: Tensor | None) -> PrefixedAttention:
        """The context that the tokens of packed rows attend to."""
        return PrefixedAttention(self.keys, self.values, documents_bt)


class _Kept(CausalAttention):
    """Keeps the keys and values of all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, layer: int, q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, positions_bt: Tensor) -> Tensor:
        self.keys.append(k_bthd)
        self.values.append(v_bthd)
        return super().attend(layer, q_bthd, k_bthd, v_bthd, positions_bt)
