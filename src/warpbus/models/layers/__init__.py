"""The layers that every family shares."""

from warpbus.models.layers.adapted import Adapted, Selection
from warpbus.models.layers.attention import (
    Attention,
    AttentionContext,
    BranchedAttention,
    CausalAttention,
    FusedAttention,
    WholeAttention,
)
from warpbus.models.layers.chain import LayerChain, link_of, may_chain, mlp_links
from warpbus.models.layers.embedding import QuantizedEmbedding
from warpbus.models.layers.indexer import IndexFeatures, select_tokens
from warpbus.models.layers.latent_attention import LatentAttention
from warpbus.models.layers.linear import MLP, LayerNorm, Norm, QuantizedLinear, RMSNorm, make_norm, project
from warpbus.models.layers.moe import MoE, Router, Routing
from warpbus.models.layers.rope import Rotary, coordinates, prompt_lengths, rotate

__all__ = [
    "MLP",
    "Adapted",
    "Attention",
    "AttentionContext",
    "BranchedAttention",
    "CausalAttention",
    "FusedAttention",
    "IndexFeatures",
    "LatentAttention",
    "LayerChain",
    "LayerNorm",
    "MoE",
    "Norm",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "RMSNorm",
    "Rotary",
    "Router",
    "Routing",
    "Selection",
    "WholeAttention",
    "coordinates",
    "link_of",
    "make_norm",
    "may_chain",
    "mlp_links",
    "project",
    "prompt_lengths",
    "rotate",
    "select_tokens",
]
