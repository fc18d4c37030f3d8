"""The indexer of sparse attention (DSA; DeepSeek-V3.2-Exp, 2025) of single tokens: which cached tokens they attend to.

`index_rope_and_cache` rotates an indexer's queries and keys and stores the keys, `index_scores` scores all cached keys
of a row's sequence, and `index_select` gives the slots of the best ones: the list that `mla_attention` attends to.
"""

import torch
from torch import Tensor

from warpbus.cuda.capabilities import capabilities
from warpbus.cuda.green import multiprocessors
from warpbus.cuda.jit import architecture
from warpbus.cuda.kernel import runs_on
from warpbus.cuda.remote import is_gpu
from warpbus.errors import TensorError, UsageError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import HALVES, check_alike, check_rank, check_shape, contiguous_aligned, per_dtype
from warpbus.kernels.ops.cache import check_indices, check_stored
from warpbus.kernels.ops.latent_cache import even
from warpbus.kernels.ops.sampling import blocks_of_row
from warpbus.kernels.reference import dsa as reference
from warpbus.kernels.reference.dsa import SCORE_COLUMNS, score_columns

HEADS, HEAD_DIM = 32, 128
"""Heads of an indexer and their features that kernels are compiled for: those of GLM-5."""

_FEATURES = per_dtype(
    "dsa/features.cu",
    "index_rope_and_cache",
    "const ELEMENT* q, const ELEMENT* k, const float* table, const int* positions, const long long* slots, "
    "ELEMENT* out_q, ELEMENT* out_k, ELEMENT* keys, long long block_stride, long long token_stride, int heads, "
    "int size, int rotary, int shift, int interleaved",
    HALVES,
)
_SCORES = per_dtype(
    "dsa/scores.cu",
    "index_scores",
    "const ELEMENT* q, const float* weights, const int* positions, const int* block_table, const ELEMENT* keys, "
    "float* scores, long long block_table_stride, long long block_stride, long long token_stride, long long width, "
    "int shift, int tiles",
    HALVES,
)
_SELECT = per_dtype(
    "dsa/select.cu",
    "index_select",
    "const float* scores, const int* positions, const int* block_table, int* slots, long long block_table_stride, "
    "int width, int top_k, int shift, int blocks, int vectorised",
    (torch.float32,),
)[torch.float32]
_FEATURE_THREADS, _SCORE_THREADS, _SELECT_THREADS = 256, 128, 1024
_KEYS = 64  # of a block of index_scores, times `tiles`: kWarps * kTile
_MOST_TILES = 16
_RESIDENT = 3  # blocks of index_scores on a multiprocessor
_WAVES = 4  # of blocks, from which on these get more tiles


def index_rope_and_cache(
    q: Tensor, k: Tensor, table: Tensor, positions: Tensor, slots: Tensor, keys: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotate an indexer's queries and keys (RoPE; Su et al., 2021), and write the keys to the tokens' slots.

    Args:
        q: `[t, heads, d]`; float32, float16 or bfloat16.
        k: `[t, d]`, one for all heads.
        table: float32 `[positions, rotary_dim]`: of each position the cosines in the first half, the sines in the
            second. The first `rotary_dim` features rotate, the others stay.
        positions: int32 `[t]`, rows of `table`. Not checked.
        slots: int64 `[t]`: block * B + token in the block. Not checked.
        keys: the cache, `[blocks, 1, B, d]` in the dtype of `q`, B a power of two from 16 to 256; any strides, the last
            one 1. Written in place.
        interleaved: pairs are (2i, 2i+1); otherwise (i, i + rotary_dim / 2).

    Returns:
        the rotated queries and keys, as `q` and `k`, contiguous: rotated in float32 and rounded once.

    Raises:
        TensorError: other shapes, dtypes, strides or devices.
    """
    name = "index_rope_and_cache"
    check_rank(name, 3, q=q)
    check_rank(name, 2, k=k, table=table)
    check_alike(name, q=q, k=k)
    check_alike(name, (torch.float32,), table=table)
    tokens, _, size = q.shape
    check_shape(name, {"k": (tokens, size)}, f"q has {tokens} tokens and heads of {size} features", k=k)
    _check_keys(name, q, keys)
    check_shape(name, {"positions": (tokens,), "slots": (tokens,)}, "one per token", positions=positions, slots=slots)
    check_indices(name, q.device, torch.int32, positions=positions)
    check_indices(name, q.device, torch.int64, slots=slots)
    if table.device != q.device or table.shape[1] % 2 or table.shape[1] > size:
        raise TensorError(
            f"{name}: table is {list(table.shape)} on {table.device}: give an even number of columns up to {size}, on "
            f"{q.device}"
        )
    return _index_rope_and_cache(q, k, table, positions, slots, keys, interleaved)


def index_scores(q: Tensor, weights: Tensor, positions: Tensor, blocks: Tensor, keys: Tensor, *, limit: int) -> Tensor:
    """Score the cached keys of each row's sequence: the weighted sum of its heads' products, negative ones counting 0.

    Args:
        q: `[b, heads, d]`, rotated; float16, bfloat16 or float32.
        weights: of the heads, float32 `[b, heads]`.
        positions: int32 `[b]`: the last token that each row scores; each less than `limit`, which is not checked.
        blocks: int32 `[b, n]`, the last stride 1: the row's block table, token p is in block `blocks[row, p // B]`.
            Entries past a row's position are not used, whatever they are.
        keys: the cache, as of `index_rope_and_cache`. What is past a row's position may be anything, also NaN.
        limit: greater than all positions.

    Returns:
        float32 `[b, n]`, n being `limit` rounded up to a multiple of 4. Past a row's position there may be anything.
        The products of 16-bit queries and keys are exact and their sums float32, so that scores differ from those of
        float32 arithmetic by the order of the additions alone; and a score has the same bits in any batch. Where there
        is no kernel (`has_kernel`), torch's operators copy all keys up to `limit` for each row.

    Raises:
        TensorError: other shapes, dtypes, strides or devices.
        UsageError: `limit` does not fit the block table.
    """
    name = "index_scores"
    check_rank(name, 3, q=q)
    check_rank(name, 2, weights=weights, blocks=blocks)
    check_alike(name, q=q)
    check_alike(name, (torch.float32,), weights=weights)
    batch, heads, _ = q.shape
    check_shape(name, {"weights": (batch, heads)}, "one for each head of each row of q", weights=weights)
    if weights.device != q.device:
        raise TensorError(f"{name}: weights are on {weights.device} and q on {q.device}: move one with .to()")
    _check_keys(name, q, keys)
    _check_rows(name, batch, q.device, positions, blocks)
    held = blocks.shape[1] * keys.shape[2]
    if not 0 < limit <= held:
        raise UsageError(f"{name}: limit is {limit}, with blocks for {held} tokens: give one from 1 up to that")
    return _index_scores(q, weights, positions, blocks, keys, limit)


def index_select(scores: Tensor, positions: Tensor, blocks: Tensor, *, top_k: int, block: int) -> Tensor:
    """Select each row's tokens with the best scores, of equal scores the first ones: where they are in the cache.

    Args:
        scores: float32 `[b, n]`, contiguous; what is past a row's position is not used. The two zeros are equal, and
            NaN is the best score.
        positions: int32 `[b]`: the last token of each row; each less than n, which is not checked.
        blocks: int32 `[b, m]`, the last stride 1: the block table, as of `index_scores`, for n tokens or more.
        top_k: tokens to select.
        block: B, tokens of a block, a power of two.

    Returns:
        int32 `[b, top_k]`: the slots (block * B + token in the block) of the selected tokens, in the order of the
        tokens. A row of fewer tokens has all, then zeros. The same at every run and in any batch; nothing waits for the
        GPU.

    Raises:
        TensorError: other shapes, dtypes, strides or devices.
        UsageError: `top_k` is less than 1, `block` no power of two, or the block table too short.
    """
    name = "index_select"
    check_rank(name, 2, scores=scores, blocks=blocks)
    check_alike(name, (torch.float32,), scores=scores)
    _check_rows(name, len(scores), scores.device, positions, blocks)
    if not scores.is_contiguous():
        raise TensorError(f"{name}: scores have strides {scores.stride()}: use .contiguous()")
    held = blocks.shape[1] * block
    if top_k < 1 or block < 1 or block & (block - 1) or held < scores.shape[1] - SCORE_COLUMNS + 1:
        raise UsageError(
            f"{name}: top_k is {top_k}, block {block}, and there are scores of {scores.shape[1]} tokens with blocks "
            f"for {held}: give a top_k from 1 on, a power of two, and block tables for all tokens"
        )
    return _index_select(scores, positions, blocks, top_k, block)


def has_kernel(dtype: torch.dtype, heads: int, head_dim: int, device: torch.device) -> bool:
    """Whether `index_scores` has a kernel for such an indexer on a device.

    It has on GPUs since Ampere for what `is_compiled` says.
    """
    return is_gpu(device) and is_compiled(dtype, heads, head_dim) and capabilities(architecture(device)).mma


def is_compiled(dtype: torch.dtype, heads: int, head_dim: int) -> bool:
    """Whether `index_scores` is compiled for such an indexer: in 16 bits, 32 heads of 128 features, as in GLM-5."""
    return dtype in HALVES and (heads, head_dim) == (HEADS, HEAD_DIM)


def tiles_of(rows: int, limit: int, multiprocessors: int) -> int:
    """Tiles of a warp of `index_scores`: the more keys there are, the more of them read a query once."""
    blocks = rows * -(-limit // _KEYS)
    return max(1, min(_MOST_TILES, blocks // (multiprocessors * _RESIDENT * _WAVES)))


def _check_keys(name: str, q: Tensor, keys: Tensor) -> None:
    check_stored(name, "keys", keys, q.dtype, None, "scales")
    if keys.dtype != q.dtype or keys.device != q.device or keys.shape[1] != 1 or keys.shape[3] != q.shape[2]:
        raise TensorError(
            f"{name}: keys are {keys.dtype} {list(keys.shape)} on {keys.device}: give {q.dtype} [blocks, 1, tokens of "
            f"a block, {q.shape[2]}] on {q.device}"
        )


def _check_rows(name: str, batch: int, device: torch.device, positions: Tensor, blocks: Tensor) -> None:
    expected = {"positions": (batch,), "blocks": (batch, blocks.shape[1])}
    check_shape(name, expected, f"one for each of the {batch} rows", positions=positions, blocks=blocks)
    check_indices(name, device, torch.int32, positions=positions, blocks=blocks)


def _launch_features(
    q: Tensor, k: Tensor, table: Tensor, positions: Tensor, slots: Tensor, keys: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    tokens, heads, size = q.shape
    paired = size % 2 == 0 and keys.data_ptr() % 4 == 0 and all(stride % 2 == 0 for stride in keys.stride()[:-1])
    if q.dtype not in HALVES or not paired or not runs_on(architecture(q.device), "sm_80"):
        return reference.index_rope_and_cache(q, k, table, positions, slots, keys, interleaved)
    out_q, out_k = _like_features(q, k)
    if q.numel() == 0:
        return out_q, out_k
    pairs = (heads + 1) * size // 2
    _FEATURES[q.dtype](
        (tokens, -(-pairs // _FEATURE_THREADS)),
        _FEATURE_THREADS,
        q=contiguous_aligned(q),
        k=contiguous_aligned(k),
        table=table.contiguous(),
        positions=positions.contiguous(),
        slots=slots.contiguous(),
        out_q=out_q,
        out_k=out_k,
        keys=keys,
        block_stride=keys.stride(0),
        token_stride=keys.stride(2),
        heads=heads,
        size=size,
        rotary=table.shape[1],
        shift=keys.shape[2].bit_length() - 1,
        interleaved=interleaved,
    )
    return out_q, out_k


def _launch_scores(q: Tensor, weights: Tensor, positions: Tensor, blocks: Tensor, keys: Tensor, limit: int) -> Tensor:
    rows, heads, size = q.shape
    if not has_kernel(q.dtype, heads, size, q.device) or not even(keys):
        return reference.index_scores(q, weights, positions, blocks, keys, limit)
    scores = weights.new_empty(rows, score_columns(limit))
    if rows == 0:
        return scores
    blocks = _unit_stride(blocks)
    tiles = tiles_of(rows, limit, multiprocessors(q.device))
    _SCORES[q.dtype](
        (rows, -(-limit // (_KEYS * tiles))),
        _SCORE_THREADS,
        q=contiguous_aligned(q),
        weights=contiguous_aligned(weights),
        positions=positions.contiguous(),
        block_table=blocks,
        keys=keys,
        scores=scores,
        block_table_stride=blocks.stride(0),
        block_stride=keys.stride(0),
        token_stride=keys.stride(2),
        width=scores.shape[1],
        shift=keys.shape[2].bit_length() - 1,
        tiles=tiles,
    )
    return scores


def _launch_select(scores: Tensor, positions: Tensor, blocks: Tensor, top_k: int, block: int) -> Tensor:
    if not runs_on(architecture(scores.device), "sm_80"):
        return reference.index_select(scores, positions, blocks, top_k, block)
    rows, width = scores.shape
    slots = blocks.new_empty(rows, top_k)
    if rows == 0:
        return slots
    blocks, sharing = _unit_stride(blocks), blocks_of_row(scores.device)
    _SELECT(
        rows * sharing,
        _SELECT_THREADS,
        scores=scores,
        positions=positions.contiguous(),
        block_table=blocks,
        slots=slots,
        block_table_stride=blocks.stride(0),
        width=width,
        top_k=top_k,
        shift=block.bit_length() - 1,
        blocks=sharing,
        vectorised=width % SCORE_COLUMNS == 0 and scores.data_ptr() % 16 == 0,
        cluster=sharing,
    )
    return slots


def _unit_stride(blocks: Tensor) -> Tensor:
    """A block table whose rows are in one piece; they may be the same row."""
    return blocks if blocks.stride(1) == 1 else blocks.contiguous()


def _like_features(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


_index_rope_and_cache = operator(
    "index_rope_and_cache(Tensor q, Tensor k, Tensor table, Tensor positions, Tensor slots, Tensor(a!) keys, "
    "bool interleaved) -> (Tensor, Tensor)",
    cuda=_launch_features,
    reference=reference.index_rope_and_cache,
    fake=lambda q, k, *others: _like_features(q, k),
)
_index_scores = operator(
    "index_scores(Tensor q, Tensor weights, Tensor positions, Tensor blocks, Tensor keys, int limit) -> Tensor",
    cuda=_launch_scores,
    reference=reference.index_scores,
    fake=lambda q, weights, positions, blocks, keys, limit: weights.new_empty(len(q), score_columns(limit)),
)
_index_select = operator(
    "index_select(Tensor scores, Tensor positions, Tensor blocks, int top_k, int block) -> Tensor",
    cuda=_launch_select,
    reference=reference.index_select,
    fake=lambda scores, positions, blocks, top_k, block: blocks.new_empty(len(scores), top_k),
)
