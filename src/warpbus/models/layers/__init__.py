"""The layers that every family shares."""

from warpbus.models.layers.adapted import Adapted, Selection
from warpbus.models.layers.attention import (
    Attention,
    AttentionContext,
    BranchedAttention,
    CausalAttention,
    FusedAttention,
)
from warpbus.models.layers.linear import QuantizedLinear, project
from warpbus.models.layers.mlp import MLP
from warpbus.models.layers.moe import MoE, Router, Routing
from warpbus.models.layers.norm import LayerNorm, Norm, RMSNorm, make_norm
from warpbus.models.layers.rope import Rotary, coordinates, prompt_lengths, rotate

__all__ = [
    "MLP",
    "Adapted",
    "Attention",
    "AttentionContext",
    "BranchedAttention",
    "CausalAttention",
    "FusedAttention",
    "LayerNorm",
    "MoE",
    "Norm",
    "QuantizedLinear",
    "RMSNorm",
    "Rotary",
    "Router",
    "Routing",
    "Selection",
    "coordinates",
    "make_norm",
    "project",
    "prompt_lengths",
    "rotate",
]
