"""Bytes that a step takes of a GPU's memory beside weights and cache, from the model's shape alone: see `plan`."""

import torch

from warpbus.engine.joined_spans import MOST_EXPANDED, MOST_GATHERED
from warpbus.kernels.ops import dsa, mla
from warpbus.kernels.reference.dsa import score_columns
from warpbus.models import IndexerSpec, LatentAttentionSpec, ModelConfig
from warpbus.models.cost import activation_features

PIECES = (2048, 1024, 512, 256)
"""Tokens of the prompts that are read at a time."""

_SHARE_OF_PIECE = 0.025  # of the memory, for the activations of a piece


def activation_bytes(config: ModelConfig, dtype: torch.dtype, tokens: int) -> int:
    """What is alive at once while a piece of the prompts passes through a layer, with room to spare."""
    return tokens * max(map(activation_features, set(config.all_layers))) * dtype.itemsize


def prompt_piece(config: ModelConfig, dtype: torch.dtype, limit: int, max_model_len: int | None) -> int:
    """How many tokens of the prompts to read at a time."""
    if config.prompt_end is not None:  # a prompt is read whole, and may be as long as the context
        return max_model_len or config.max_context
    fitting = [piece for piece in PIECES if activation_bytes(config, dtype, piece) <= _SHARE_OF_PIECE * limit]
    return fitting[0] if fitting else PIECES[-1]


def read_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What a token of the context takes while a prompt is read: a layer's keys and values, out of the cache."""
    return config.attention.cache_entry.size * dtype.itemsize


def joined_bytes(config: ModelConfig, dtype: torch.dtype, rows: int, context: int) -> int:
    """What chunks of `rows` sequences that are attended together read of the cache, beyond one of the whole context.

    Beside the joined keys, the values are there twice while they are joined. Latents are there once when they are
    expanded, which takes more than to join them. Prompts that are read in both directions are not joined.
    """
    if rows == 1 or config.prompt_end is not None:
        return 0
    spec = config.attention
    if isinstance(spec, LatentAttentionSpec):
        tokens = min(rows * context, MOST_EXPANDED)
    else:
        tokens = 3 * min(rows * context, MOST_GATHERED) // 2
    return max(0, tokens - context) * read_bytes(config, dtype)


def expanded_bytes(config: ModelConfig, dtype: torch.dtype, piece: int, rows: int, context: int) -> int:
    """What latents take besides, while the last pieces of prompts as long as the context are read.

    They are expanded to keys and values of all heads: of up to `rows` sequences, but no more than `MOST_EXPANDED`
    tokens. A longer prompt attends to the latents, with a mask, of which torch makes a copy in 16 bits; but not to
    tokens that an indexer selects, where there are kernels for their list.
    """
    spec = config.attention
    if not isinstance(spec, LatentAttentionSpec):
        return 0
    each = spec.num_heads * (spec.nope_dim + spec.value_dim + spec.query_dim) * dtype.itemsize
    masked = context
    if spec.indexer is not None and _lists_tokens(spec, spec.indexer, dtype):
        masked = min(context, spec.indexer.top_k)
    masks = piece * masked * (torch.bool.itemsize + dtype.itemsize) if masked > MOST_EXPANDED else 0
    return min(rows * context, MOST_EXPANDED) * each + masks


def _lists_tokens(spec: LatentAttentionSpec, indexer: IndexerSpec, dtype: torch.dtype) -> bool:
    """Whether a GPU since Ampere has kernels that select tokens and attend to the list."""
    heads = spec.nope_dim, spec.rope_dim, spec.kv_rank, spec.value_dim
    return dsa.is_compiled(dtype, indexer.heads, indexer.head_dim) and mla.is_compiled(dtype, *heads)


def selection_bytes(config: ModelConfig, rows: int, context: int) -> int:
    """What indexers take in a step of so many rows: a layer's scores of all tokens, and the slots of two selections, of
    which one is made while the other one is still there."""
    spec = config.attention
    if not isinstance(spec, LatentAttentionSpec) or spec.indexer is None or context <= spec.indexer.top_k:
        return 0
    return rows * (score_columns(context) * torch.float32.itemsize + 2 * spec.indexer.top_k * torch.int32.itemsize)


def table_bytes(config: ModelConfig) -> int:
    """A position's cosines and sines."""
    return config.rope.rotary_dim * torch.float32.itemsize
