"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1) of single tokens, in the absorbed form.

All heads share one KV head: a token's key is its latent with its rotary key, its value the latent. `mla_queries` makes
the queries for such keys and stores the new tokens' latents, `mla_attention` attends and projects to the heads' values.
Prompts expand the latents to keys and values of each head instead, behind `mla_rope_and_cache`.
"""

import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.capabilities import capabilities
from warpbus.cuda.devices import shared_memory
from warpbus.cuda.green import multiprocessors
from warpbus.cuda.jit import architecture
from warpbus.cuda.kernel import Kernel
from warpbus.cuda.parameters import Parameters
from warpbus.cuda.remote import is_gpu
from warpbus.errors import TensorError, UsageError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import (
    ELEMENTS,
    HALVES,
    check_alike,
    check_rank,
    check_shape,
    contiguous_aligned,
    per_dtype,
)
from warpbus.kernels.ops.cache import CODES, check_indices
from warpbus.kernels.ops.latent_cache import RANK, ROPE, check_even, check_latents, even
from warpbus.kernels.ops.mla_plan import GROUP, HEADS, KEYS, WGMMA_KEYS, LatentDevice, other_bytes, plan, wgmma_bytes
from warpbus.kernels.reference import mla as reference
from warpbus.kernels.reference.latent_cache import LATENT_CODES
from warpbus.kernels.units import unit

_ROPE_AND_CACHE = Parameters(
    "ELEMENT* q, const ELEMENT* latent, const ELEMENT* norm, const float* table, const int* positions, "
    "const long long* slots, Cache* latents, ELEMENT* out, long long latent_stride, long long block_stride, "
    "long long token_stride, int heads, int shift, int interleaved, float eps"
)
_QUERIES = Parameters(
    "const ELEMENT* q, const ELEMENT* latent, const ELEMENT* norm, const ELEMENT* kv_b, const float* table, "
    "const int* positions, const long long* slots, Cache* latents, ELEMENT* out, long long latent_stride, "
    "long long head_stride, long long block_stride, long long token_stride, int rows, int heads, int shift, "
    "int interleaved, float eps"
)
_ATTENTION = Parameters(
    "const ELEMENT* q, const int* positions, const int* block_table, const Cache* latents, float* part_values, "
    "float2* part_weights, long long block_table_stride, long long block_stride, long long token_stride, int heads, "
    "int tile_heads, int shift, int stages, int chunks_per_unit, int units_per_part, int parts_per_block, int parts, "
    "int inputs_ready, float scale"
)
_OUTPUTS = per_dtype(
    "mla/outputs.cu",
    "mla_outputs",
    "const float* part_values, const float2* part_weights, const int* positions, const ELEMENT* kv_b, ELEMENT* out, "
    "long long head_stride, int rows, int heads, int value_dim, int parts, int part_keys, int group",
    HALVES,
)
_COMBINE = per_dtype(
    "mla/outputs.cu",
    "mla_combine",
    "const float* part_values, const float2* part_weights, const int* positions, ELEMENT* attended, int heads, "
    "int parts, int part_keys, int group",
    HALVES,
)
_NOPE = 192  # csrc/mla/shape.cuh
_ROWS = 16  # of a block of mla_queries and mla_outputs: kTile
_QUERY_THREADS, _ATTENTION_THREADS, _OUTPUT_THREADS = 128, 256, 512
_QUERY_COLUMNS = 64
_VALUES = 32  # rows of kv_b of a block of mla_outputs: kValues
_OUTPUT_SPLITS = 8  # kSplits there
_FEW_ROWS = 8  # up to which mla_outputs multiplies with kv_b: it reads all of it for each 16 rows


def mla_queries(
    q: Tensor,
    latent: Tensor,
    norm: Tensor,
    kv_b: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    latents: Tensor,
    *,
    eps: float,
    interleaved: bool,
) -> Tensor:
    """Rotate queries and absorb the keys' projection into them; norm, rotate and store the new tokens' latents.

    Args:
        q: `[b, heads, nope_dim + rope_dim]`, not rotated; float16, bfloat16 or float32.
        latent: `[b, kv_rank + rope_dim]`, the last stride 1: neither normed nor rotated.
        norm: `[kv_rank]`, the weight of the RMSNorm of latents, with `eps`.
        kv_b: `[heads, nope_dim + value_dim, kv_rank]`, contiguous: of each head the projections to keys, then to
            values.
        table: float32 `[positions, rope_dim]`: of each position the cosines in the first half, the sines in the second.
        positions: int32 `[b]`, rows of `table`. Not checked.
        slots: int64 `[b]`: block * B + token in the block, where a row's latent is stored. Not checked.
        latents: the cache, `[blocks, 1, B, kv_rank + rope_dim]` in the dtype of `q`, or `[blocks, 1, B,
            token_bytes(...)]` in float8_e4m3fn (`reference.latent_cache`); B a power of two from 16 to 256; any
            strides, the last one 1. Written in place.
        interleaved: pairs are (2i, 2i+1); otherwise (i, i + rope_dim / 2).

    Returns:
        `[b, heads, kv_rank + rope_dim]` in the dtype of `q`. Where there is no kernel (`has_kernel`), torch's operators
        do the work.

    Raises:
        TensorError: other shapes, dtypes, strides or devices.
    """
    name = "mla_queries"
    check_rank(name, 3, q=q, kv_b=kv_b)
    check_alike(name, q=q, kv_b=kv_b)
    _check_kv_b(name, kv_b, q.shape[1])
    _check_new(name, q, latent, norm, table, positions, slots, latents, kv_b.shape[2])
    if not 0 < q.shape[2] - table.shape[1] < kv_b.shape[1]:
        raise TensorError(
            f"{name}: q has shape {list(q.shape)}, kv_b is {list(kv_b.shape)}, table has {table.shape[1]} columns: "
            "give q [b, heads, nope_dim + columns of table], where nope_dim is less than a head's rows of kv_b"
        )
    return _mla_queries(q, latent, norm, kv_b, table, positions, slots, latents, eps, interleaved)


def mla_rope_and_cache(
    q: Tensor,
    latent: Tensor,
    norm: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    latents: Tensor,
    *,
    eps: float,
    interleaved: bool,
) -> Tensor:
    """Rotate queries in place; norm, rotate and store the new tokens' latents.

    Args:
        q: `[t, heads, nope_dim + rope_dim]`, contiguous; float16, bfloat16 or float32. The last features are rotated.
        latent, norm, table, positions, slots, latents, eps, interleaved: as of `mla_queries`.

    Returns:
        The latents with their rotary keys as they are read from the cache, `[t, kv_rank + rope_dim]` in the dtype of
        `q`: of an FP8 cache codes times their scales.

    Raises:
        TensorError: other shapes, dtypes, strides or devices.
    """
    name = "mla_rope_and_cache"
    _check_new(name, q, latent, norm, table, positions, slots, latents, norm.numel())
    if not q.is_contiguous() or q.shape[2] <= table.shape[1]:
        raise TensorError(
            f"{name}: q has shape {list(q.shape)}, strides {q.stride()}, and table has {table.shape[1]} columns: give "
            "contiguous queries of nope_dim + rope_dim features"
        )
    return _mla_rope_and_cache(q, latent, norm, table, positions, slots, latents, eps, interleaved)


def mla_attention(
    q: Tensor,
    positions: Tensor,
    blocks: Tensor,
    latents: Tensor,
    kv_b: Tensor,
    *,
    value_dim: int,
    scale: float,
    limit: int,
    listed: bool = False,
    inputs_ready: bool = False,
) -> Tensor:
    """Attend to all latents up to a position, or to those of a list; project the sums of latents to the heads' values.

    Args:
        q: `[b, heads, d]`: what `mla_queries` gives; float16, bfloat16 or float32.
        positions: int32 `[b]`: the last position that each row attends to; each at least 0 and less than `limit`, which
            is not checked, since it would take the GPU's answer.
        blocks: int32 `[b, n]`, the last stride 1: the row's block table, position p is in block `blocks[row, p // B]`
            of the cache. Entries past a row's position are not used, whatever they are. With `listed`, position p is in
            the slot `blocks[row, p]`: block * B + token in the block.
        latents: the cache, as of `mla_queries`. What is past a row's position may be anything, also NaN.
        kv_b: `[heads, nope_dim + value_dim, kv_rank]`, contiguous: of each head the projections to keys, then to
            values. The first `kv_rank` features of a key are its value.
        value_dim: features of a head's value.
        scale: of the scores.
        limit: greater than all positions. It decides how a row is cut into parts.
        listed: `blocks` has a slot for each token that a row attends to, as `index_select` gives them, and `positions`
            the index of the last one.
        inputs_ready: `positions`, `blocks` and the cache below each row's position are not written by the last kernel
            that was launched without `dependent`, nor by any after it: as in `decode_attention`.

    Returns:
        `[b, heads, value_dim]` in the dtype of `q`; the sums of latents are rounded to it too. The kernels give the
        same bits at every run, and the sums of latents of a row have the same bits alone and in any batch with the
        same `limit`. Where there is no kernel (`has_kernel`), torch's operators copy all latents up to `limit` for each
        row. Neither waits for the GPU.

    Raises:
        TensorError: other shapes, dtypes, strides or devices.
        UsageError: `limit` does not fit the block table, or `value_dim` kv_b.
    """
    name = "mla_attention"
    check_rank(name, 3, q=q, kv_b=kv_b)
    check_rank(name, 2, blocks=blocks)
    check_alike(name, q=q, kv_b=kv_b)
    batch, heads, size = q.shape
    _check_kv_b(name, kv_b, heads)
    if kv_b.shape[2] > size:
        raise TensorError(
            f"{name}: kv_b has shape {list(kv_b.shape)} and q {list(q.shape)}: give queries of kv_rank + rope_dim "
            "features: what mla_queries gives"
        )
    _check_cache(name, q, latents, kv_b.shape[2], size - kv_b.shape[2])
    one_each = {"positions": (batch,), "blocks": (batch, blocks.shape[1])}
    check_shape(name, one_each, f"one for each of the {batch} rows of q", positions=positions, blocks=blocks)
    check_indices(name, q.device, torch.int32, positions=positions, blocks=blocks)
    if not 1 <= value_dim <= kv_b.shape[1]:
        raise UsageError(f"{name}: value_dim is {value_dim}: give one from 1 to {kv_b.shape[1]}, a head's rows of kv_b")
    held = blocks.shape[1] * (1 if listed else latents.shape[2])
    if not 0 < limit <= held:
        raise UsageError(f"{name}: limit is {limit}, with blocks for {held} tokens: give one from 1 up to that")
    return _mla_attention(q, positions, blocks, latents, kv_b, value_dim, scale, limit, listed, inputs_ready)


def has_kernel(
    dtype: torch.dtype, nope_dim: int, rope_dim: int, kv_rank: int, value_dim: int, device: torch.device
) -> bool:
    """Whether `mla_queries` and `mla_attention` have kernels for such heads on a device.

    They have on GPUs since Ampere for what `is_compiled` says.
    """
    compiled = is_compiled(dtype, nope_dim, rope_dim, kv_rank, value_dim)
    return is_gpu(device) and compiled and capabilities(architecture(device)).mma


def is_compiled(dtype: torch.dtype, nope_dim: int, rope_dim: int, kv_rank: int, value_dim: int) -> bool:
    """Whether the kernels are compiled for such heads: float16 and bfloat16, the dimensions of GLM-4.7-Flash and GLM-5,
    which are 192, 64, 512 and any multiple of 32."""
    return dtype in HALVES and (nope_dim, rope_dim, kv_rank, value_dim % _VALUES) == (_NOPE, ROPE, RANK, 0)


def _check_new(
    name: str,
    q: Tensor,
    latent: Tensor,
    norm: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    latents: Tensor,
    rank: int,
) -> None:
    """What is projected from new tokens fits the rotary table and the cache."""
    check_rank(name, 3, q=q)
    check_rank(name, 2, latent=latent, table=table)
    check_alike(name, q=q, latent=latent, norm=norm)
    check_alike(name, (torch.float32,), table=table)
    batch, rope = len(q), table.shape[1]
    expected: dict[str, tuple[int, ...]] = {"latent": (batch, rank + rope), "norm": (rank,)}
    why = f"latents of {rank} features, and a table of {rope} columns"
    check_shape(name, expected, why, latent=latent, norm=norm)
    if rope % 2:
        raise TensorError(f"{name}: table has {rope} columns: give an even number")
    _check_cache(name, q, latents, rank, rope)
    check_shape(name, {"positions": (batch,), "slots": (batch,)}, "one per row", positions=positions, slots=slots)
    check_indices(name, q.device, torch.int32, positions=positions)
    check_indices(name, q.device, torch.int64, slots=slots)


def _check_cache(name: str, q: Tensor, latents: Tensor, rank: int, rope: int) -> None:
    check_latents(name, latents, q.dtype, rank, rope)
    if latents.device != q.device:
        raise TensorError(f"{name}: latents are on {latents.device} and q on {q.device}: move one with .to()")


def _check_kv_b(name: str, kv_b: Tensor, heads: int) -> None:
    # A kernel fetches it before the one ahead has ended, which could be that of a copy.
    if kv_b.shape[0] != heads or not kv_b.is_contiguous() or kv_b.data_ptr() % 16:
        raise TensorError(
            f"{name}: kv_b has shape {list(kv_b.shape)}, strides {kv_b.stride()} and begins at {kv_b.data_ptr():#x}: "
            f"give [{heads}, nope_dim + value_dim, kv_rank], contiguous, at a multiple of 16 bytes"
        )


def _device(device: torch.device) -> LatentDevice:
    wgmma = capabilities(architecture(device)).wgmma
    return LatentDevice(multiprocessors(device), shared_memory(device), wgmma)


@functools.cache
def _new_tokens_kernel(name: str, dtype: torch.dtype, code: int) -> Kernel:
    declared = unit("mla/queries.cu", ELEMENT=ELEMENTS[dtype], CODE=code)
    return declared.kernel(name, {"mla_queries": _QUERIES, "mla_rope_and_cache": _ROPE_AND_CACHE}[name])


@functools.cache
def _attention_kernel(dtype: torch.dtype, code: int, listed: bool, heads: int, keys: int) -> Kernel:
    source, needs, bytes_of = "mla/sm80_attention.cu", "sm_80", {"OTHER_BYTES": other_bytes(heads, keys)}
    if keys == WGMMA_KEYS:
        source, needs, bytes_of = "mla/sm90_attention.cu", "sm_90a", {"SHARED_BYTES": wgmma_bytes(heads)}
    macros = {"ELEMENT": ELEMENTS[dtype], "CODE": code, "LISTED": int(listed), "HEADS": heads, "KEYS": keys}
    declared = unit(source, needs=needs, **macros, **bytes_of)
    return declared.kernel("mla_attention", _ATTENTION)


def _code(latents: Tensor) -> int:
    """The macro CODE: how a cache keeps latents."""
    return CODES.get(latents.dtype, 0)


def _launch_queries(
    q: Tensor,
    latent: Tensor,
    norm: Tensor,
    kv_b: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    latents: Tensor,
    eps: float,
    interleaved: bool,
) -> Tensor:
    batch, heads, width = q.shape
    rank, rope = kv_b.shape[2], table.shape[1]
    if not has_kernel(q.dtype, width - rope, rope, rank, kv_b.shape[1] - width + rope, q.device):
        return reference.mla_queries(q, latent, norm, kv_b, table, positions, slots, latents, eps, interleaved)
    out = q.new_empty(batch, heads, rank + rope)
    if batch == 0:
        return out
    tiles = -(-batch // _ROWS)
    _new_tokens_kernel("mla_queries", q.dtype, _code(latents))(
        (heads * (RANK // _QUERY_COLUMNS) + 1, tiles),
        _QUERY_THREADS,
        q=contiguous_aligned(q),
        kv_b=kv_b,
        out=out,
        head_stride=kv_b.shape[1] * rank,
        rows=batch,
        heads=heads,
        interleaved=interleaved,
        eps=eps,
        **_new_tokens("mla_queries", latent, norm, table, positions, slots, latents),
        shared=2 * (_NOPE * _QUERY_COLUMNS + _ROWS * width),
        dependent=True,
    )
    return out


def _launch_rope_and_cache(
    q: Tensor,
    latent: Tensor,
    norm: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    latents: Tensor,
    eps: float,
    interleaved: bool,
) -> Tensor:
    tokens, heads, width = q.shape
    rank, rope = norm.numel(), table.shape[1]
    if not has_kernel(q.dtype, width - rope, rope, rank, _VALUES, q.device):
        return reference.mla_rope_and_cache(q, latent, norm, table, positions, slots, latents, eps, interleaved)
    out = q.new_empty(tokens, rank + rope)
    if tokens == 0:
        return out
    if q.data_ptr() % 16:
        raise TensorError(f"mla_rope_and_cache: q begins at {q.data_ptr():#x}: give one at a multiple of 16 bytes")
    _new_tokens_kernel("mla_rope_and_cache", q.dtype, _code(latents))(
        tokens,
        _QUERY_THREADS,
        q=q,
        out=out,
        heads=heads,
        interleaved=interleaved,
        eps=eps,
        **_new_tokens("mla_rope_and_cache", latent, norm, table, positions, slots, latents),
        dependent=True,
    )
    return out


def _new_tokens(
    name: str, latent: Tensor, norm: Tensor, table: Tensor, positions: Tensor, slots: Tensor, latents: Tensor
) -> dict[str, Any]:
    """The parameters of a kernel that stores the latents of new tokens.

    Raises:
        TensorError: the cache has tokens that kernels cannot write.
    """
    check_even(name, latents)
    if latent.stride(1) != 1 or not even(latent):
        latent = latent.clone(memory_format=torch.contiguous_format)
    return {
        "latent": latent,
        "norm": contiguous_aligned(norm),
        "table": table.contiguous(),
        "positions": positions.contiguous(),
        "slots": slots.contiguous(),
        "latents": latents,
        "latent_stride": latent.stride(0),
        "block_stride": latents.stride(0),
        "token_stride": latents.stride(2),
        "shift": latents.shape[2].bit_length() - 1,
    }


def _launch_attention(
    q: Tensor,
    positions: Tensor,
    blocks: Tensor,
    latents: Tensor,
    kv_b: Tensor,
    value_dim: int,
    scale: float,
    limit: int,
    listed: bool,
    inputs_ready: bool,
) -> Tensor:
    batch, heads, size = q.shape
    rank = kv_b.shape[2]
    if not has_kernel(q.dtype, kv_b.shape[1] - value_dim, size - rank, rank, value_dim, q.device):
        return reference.mla_attention(q, positions, blocks, latents, kv_b, value_dim, scale, limit, listed)
    out = q.new_empty(batch, heads, value_dim)
    if batch == 0:
        return out
    check_even("mla_attention", latents)
    # A copy is the kernel just ahead: what it writes is not ready.
    inputs_ready = inputs_ready and positions.is_contiguous() and blocks.stride(1) == 1
    blocks = blocks if blocks.stride(1) == 1 else blocks.contiguous()
    code = _code(latents)
    cut = plan(batch, heads, limit, _device(q.device), coded=code != 0)
    part_values = torch.empty(batch * heads * cut.parts * rank, dtype=torch.float32, device=q.device)
    part_weights = torch.empty(batch * heads * cut.parts * 2, dtype=torch.float32, device=q.device)
    positions = positions.contiguous()
    _attention_kernel(q.dtype, code, listed, cut.heads, cut.keys)(
        (cut.blocks, cut.tiles, batch),
        _ATTENTION_THREADS,
        q=contiguous_aligned(q),
        positions=positions,
        block_table=blocks,
        latents=latents,
        part_values=part_values,
        part_weights=part_weights,
        block_table_stride=blocks.stride(0),
        block_stride=latents.stride(0),
        token_stride=latents.stride(2),
        heads=heads,
        tile_heads=cut.tile_heads,
        shift=latents.shape[2].bit_length() - 1,
        stages=cut.stages,
        chunks_per_unit=cut.chunks_per_unit,
        units_per_part=cut.units_per_part,
        parts_per_block=cut.parts_per_block,
        parts=cut.parts,
        inputs_ready=inputs_ready and not listed,
        scale=math.log2(math.e) * scale,
        shared=cut.shared,
        dependent=True,
    )
    parts: dict[str, Any] = {
        "part_values": part_values,
        "part_weights": part_weights,
        "positions": positions,
        "heads": heads,
        "parts": cut.parts,
        "part_keys": cut.part_keys,
        "group": 1 if cut.units_per_part == GROUP else GROUP,
    }
    if batch > _FEW_ROWS:
        attended = q.new_empty(batch, heads, rank)
        _COMBINE[q.dtype]((heads, batch), rank // 4, **parts, attended=attended, dependent=True)
        torch.bmm(attended.transpose(0, 1), kv_b[:, -value_dim:].mT, out=out.transpose(0, 1))
        return out
    _OUTPUTS[q.dtype](
        (heads * value_dim // _VALUES, -(-batch // _ROWS)),
        _OUTPUT_THREADS,
        **parts,
        kv_b=kv_b,
        out=out,
        head_stride=kv_b.shape[1] * rank,
        rows=batch,
        value_dim=value_dim,
        shared=2 * (_VALUES + _ROWS) * rank + 4 * _OUTPUT_SPLITS * _ROWS * (_VALUES + 4),
        dependent=True,
    )
    return out


_mla_queries = operator(
    "mla_queries(Tensor q, Tensor latent, Tensor norm, Tensor kv_b, Tensor table, Tensor positions, Tensor slots, "
    "Tensor(a!) latents, float eps, bool interleaved) -> Tensor",
    cuda=_launch_queries,
    reference=reference.mla_queries,
    fake=lambda q, latent, *others: q.new_empty(*q.shape[:2], latent.shape[1]),
)
_mla_rope_and_cache = operator(
    "mla_rope_and_cache(Tensor(a!) q, Tensor latent, Tensor norm, Tensor table, Tensor positions, Tensor slots, "
    "Tensor(b!) latents, float eps, bool interleaved) -> Tensor",
    cuda=_launch_rope_and_cache,
    reference=reference.mla_rope_and_cache,
    fake=lambda q, latent, *others: latent.new_empty(latent.shape),
)
_mla_attention = operator(
    "mla_attention(Tensor q, Tensor positions, Tensor blocks, Tensor latents, Tensor kv_b, int value_dim, float scale, "
    "int limit, bool listed, bool inputs_ready) -> Tensor",
    cuda=_launch_attention,
    reference=lambda *arguments: reference.mla_attention(*arguments[:-1]),
    fake=lambda q, positions, blocks, latents, kv_b, value_dim, *others: q.new_empty(*q.shape[:2], value_dim),
)

for _dtype, _stored in itertools.product(HALVES, (0, CODES[LATENT_CODES])):
    for _name in ("mla_queries", "mla_rope_and_cache"):
        _new_tokens_kernel(_name, _dtype, _stored)
    for _listed, _heads, _chunk in itertools.product((False, True), HEADS, (WGMMA_KEYS, *KEYS)):
        _attention_kernel(_dtype, _stored, _listed, _heads, _chunk)
