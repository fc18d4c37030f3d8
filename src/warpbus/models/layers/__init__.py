"""The layers that every family shares."""

from warpbus.models.layers.attention import Attention, AttentionContext, CausalAttention
from warpbus.models.layers.linear import QuantizedLinear
from warpbus.models.layers.mlp import GatedMLP
from warpbus.models.layers.norm import RMSNorm
from warpbus.models.layers.rope import Rotary, rotate

__all__ = [
    "Attention",
    "AttentionContext",
    "CausalAttention",
    "GatedMLP",
    "QuantizedLinear",
    "RMSNorm",
    "Rotary",
    "rotate",
]
