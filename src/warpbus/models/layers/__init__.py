"""The layers that every family shares."""

from warpbus.models.layers.attention import Attention, AttentionContext, CausalAttention, FusedAttention
from warpbus.models.layers.linear import QuantizedLinear, project
from warpbus.models.layers.mlp import GatedMLP
from warpbus.models.layers.norm import RMSNorm
from warpbus.models.layers.rope import Rotary, rotate

__all__ = [
    "Attention",
    "AttentionContext",
    "CausalAttention",
    "FusedAttention",
    "GatedMLP",
    "QuantizedLinear",
    "RMSNorm",
    "Rotary",
    "project",
    "rotate",
]
