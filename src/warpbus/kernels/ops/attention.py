"""`decode_attention`: one new token a row, from the projections to the heads' outputs."""

import ctypes
import functools
import math
from dataclasses import dataclass

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
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, aligned, check_alike, check_rank, check_shape, per_dtype
from warpbus.kernels.ops.cache import CODES, check_cache, check_indices, head_size
from warpbus.kernels.ops.cpu_library import Task, is_available, pointer
from warpbus.kernels.ops.workspace import counters
from warpbus.kernels.reference import attention as reference
from warpbus.kernels.reference.cache import INT4
from warpbus.kernels.units import unit

_PARAMETERS = Parameters(
    "const ELEMENT* qkv, const float* table, const int* positions, const int* block_table, Cache* keys, "
    "Cache* values, float* key_scales, float* value_scales, ELEMENT* out, float* part_values, "
    "float2* part_weights, int* counters, long long block_table_stride, long long key_head_stride, "
    "long long value_head_stride, long long key_scale_block_stride, long long key_scale_head_stride, "
    "long long value_scale_block_stride, long long value_scale_head_stride, unsigned int key_block_stride, "
    "unsigned int key_token_stride, unsigned int value_block_stride, unsigned int value_token_stride, "
    "int shift, int group, int head_dim, int rotary, int interleaved, int stages, int chunks_per_unit, "
    "int units_per_group, int units_per_part, int parts_per_block, int parts, int combiners, int limit, "
    "int late, int inputs_ready, float scale"
)
_HADAMARD = per_dtype("step/hadamard.cu", "hadamard_rows", "ELEMENT* x, int rows, int size, int lanes", HALVES)
_HEAD_DIMS = (64, 128, 256)  # what the kernel is compiled for; others run on the next larger one
_BITS = {0: 16, **{code: 4 if dtype == INT4 else 8 for dtype, code in CODES.items()}}  # of an element, by code
_TILE = 16  # queries of a block, all of one KV head
_THREADS = 128
_REGISTERS = {64: 168, 128: 168, 256: 255}  # of a thread, at most: by `kResident` in csrc/attention/block.cuh
_RESERVED = 1024  # bytes of shared memory that each block takes beside its own
_UNITS = 64  # of a row, at most
_GROUPS = 16  # of units, at most
_FOUR = 4  # groups of a quarter
_STAGES = 4  # chunks under way in a block, at most
# Blocks that share the sum over a row's parts, if all blocks of the launch run at once. On an
# H100, 4,096 tokens, 16 bits: for 1 sequence, whose parts are units, 9.5 us with 16 and 17.2 with 4 (8.5 with 16 where
# the next kernel starts late); for 8, whose parts are groups, 19.7 and 18.4 (int8: 15.9 and 14.6); for 32 and 64 alike.
_COMBINERS_OF_UNITS = 16
_COMBINERS = 4
# The time of a block beside its chunks, in chunks of about 1.3 us: launch, first copies, the sum over the parts. Seen:
# 8.5 us with a chunk; 72.6 for 64 sequences in int8 where all blocks run at once, 85.9 in four waves.
_AROUND = 2


def decode_attention(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    blocks: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    *,
    heads: int,
    interleaved: bool,
    limit: int,
    stored: bool = False,
    inputs_ready: bool = False,
) -> Tensor:
    """Rotate queries and keys (RoPE; Su et al., 2021), write keys and values at `positions`, attend to all up to there.

    The queries that share a KV head are multiplied with it together (grouped queries; Ainslie et al., 2023); scores are
    scaled by `d ** -0.5`, and softmax and sums are in float32. Keys and values lie in blocks of B tokens that a table
    names for each row (paged attention; Kwon et al., 2023).

    Args:
        qkv: `[b, (heads + 2 kv_heads) d]`, the queries of all heads, then keys, then values; float16, bfloat16 or
            float32. On a GPU what `has_kernel` has no kernel for is done by torch's operators, which takes a copy of
            all keys and values up to `limit`, and never waits for the GPU.
        table: float32 `[positions, rotary_dim]`: of each position the cosines in the first half, the sines in the
            second. The first `rotary_dim` dimensions of a head rotate, the others stay.
        positions: int32 `[b]`: where each row's new token stands; each at least 0 and less than `limit`, which is not
            checked, since it would take the GPU's answer.
        blocks: int32 `[b, n]`, the last stride 1: the row's block table, position p lies in block `blocks[row, p // B]`
            of the cache. Entries past a row's position are not used, whatever they are. On Hopper, what `positions` and
            `blocks` hold until the kernel ahead is done may guide a fetch into L2: let them name blocks at any time.
        keys, values: the cache, `[blocks, kv_heads, B, d]` in the dtype of `qkv`, int8 or float8_e4m3fn, or `[blocks,
            kv_heads, B, d / 2]` in `INT4`, B a power of two from 16 to 256; any strides, the last one 1, for the kernel
            the others multiples of 16 bytes. Written in place. What lies past a row's position, in its last block too,
            may be anything, also NaN.
        key_scales, value_scales: for int8, float8_e4m3fn and `INT4`, float32 `[blocks, kv_heads, B]`, the last stride
            1, as `rope_and_cache` writes them. Written in place.
        heads: of the queries, a multiple of `kv_heads`.
        interleaved: pairs are (2i, 2i+1); otherwise (i, i + rotary_dim / 2).
        limit: an upper bound of all positions, known to the host: it decides how a row is cut into pieces.
        stored: the keys and values at `positions` are in the cache already (`rope_and_cache`): nothing is written, and
            of `qkv` only the queries are used. `INT4` needs it. Rows may then be consecutive tokens of one sequence.
            Otherwise no block that is written may be another row's.
        inputs_ready: `table`, `positions`, `blocks` and the cache below each row's position are not written by the last
            kernel that was launched without `dependent`, nor by any after it: that one began when all before it had
            ended. On Hopper they are then loaded while the kernel ahead is at work on `qkv`.

    Returns:
        `[b, heads, d]` in the dtype of `qkv`. The kernel gives the same bits at every run, and for a row alone or in
        any batch with the same `limit`, whatever its blocks.

    Raises:
        TensorError: other shapes, dtypes, strides or devices.
        UsageError: an `INT4` cache that is not `stored`; `limit` does not fit the block table and the rotary table.
    """
    _check(qkv, table, positions, blocks, keys, values, key_scales, value_scales, heads, limit)
    if keys.dtype == INT4 and not stored:
        raise UsageError("decode_attention: a cache of 4-bit codes is written by rope_and_cache: call it, give stored")
    of_cache = positions, blocks, keys, values, key_scales, value_scales
    return _decode_attention(qkv, table, *of_cache, heads, interleaved, limit, stored, inputs_ready)


def has_kernel(dtype: torch.dtype, head_dim: int, device: torch.device, cache: torch.dtype | None = None) -> bool:
    """Whether `decode_attention` has a kernel for such heads on a device, and for a cache of a dtype.

    It has on GPUs since Ampere, also on one behind a remote device, for float16 and bfloat16, where `head_dim` is a
    multiple of 16, for `INT4` of 32, up to 256, for any number of heads and KV heads.
    """
    return (
        is_gpu(device)
        and dtype in HALVES
        and 0 < head_dim <= _HEAD_DIMS[-1]
        and head_dim % (32 if cache == INT4 else 16) == 0
        and capabilities(architecture(device)).mma
    )


def _check(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    blocks: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    heads: int,
    limit: int,
) -> None:
    name = "decode_attention"
    check_rank(name, 2, qkv=qkv, blocks=blocks)
    check_rank(name, 1, positions=positions)
    check_alike(name, qkv=qkv)
    check_cache(name, qkv, table, keys, values, key_scales, value_scales)
    (_, kv_heads, block, _), size = keys.shape, head_size(keys)
    batch, width = qkv.shape
    if kv_heads < 1 or heads < 1 or heads % kv_heads or width != (heads + 2 * kv_heads) * size:
        raise TensorError(
            f"{name}: qkv has shape {list(qkv.shape)}, keys {list(keys.shape)}, and there are {heads} heads: give qkv "
            "[b, (heads + 2 kv_heads) * head_dim] and heads a multiple of kv_heads"
        )
    one_each = {"positions": (batch,), "blocks": (batch, blocks.shape[1])}
    check_shape(name, one_each, f"one for each of the {batch} rows of qkv", positions=positions, blocks=blocks)
    check_indices(name, qkv.device, torch.int32, positions=positions, blocks=blocks)
    if blocks.shape[1] > 1 and blocks.stride(1) != 1:
        raise TensorError(f"{name}: blocks have strides {blocks.stride()}: give 1 as the last one")
    rotary = table.shape[1]
    if rotary > size or rotary % 2:
        raise TensorError(
            f"{name}: table has {rotary} columns, expected an even number up to head_dim = {size}: give cosines and "
            "then sines"
        )
    held = blocks.shape[1] * block
    if not 0 < limit <= min(held, table.shape[0]):
        raise UsageError(
            f"{name}: limit is {limit}, with blocks for {held} tokens and a table of {table.shape[0]} positions: give "
            "one from 1 up to both"
        )


@dataclass(frozen=True)
class AttentionDevice:
    """The properties that decide how a row is cut: multiprocessors, and bytes of shared memory of one."""

    multiprocessors: int
    shared: int


@dataclass(frozen=True)
class AttentionPlan:
    """How the keys of a row are cut; the names are those of csrc/attention/decode.cu.

    Attributes:
        tiles: of the queries of a KV head, each with blocks of its own.
        parts: of each row and tile, which `blocks` share; `waves`: in which the GPU runs the blocks of all rows.
        late: the next kernel may start when the last copies have begun, not at once: pays where there is much to copy.
        shared: bytes of dynamic shared memory of a block.
    """

    head_dim: int
    tiles: int
    stages: int
    chunks_per_unit: int
    units_per_group: int
    units_per_part: int
    parts_per_block: int
    parts: int
    blocks: int
    combiners: int
    late: bool
    shared: int
    waves: int

    @property
    def chunks(self) -> int:
        """Of a block."""
        return self.parts_per_block * self.units_per_part * self.chunks_per_unit

    @property
    def time(self) -> int:
        """In chunks that are worked on one after another, for the choice between cuts alone."""
        return self.waves * (self.chunks + _AROUND)


@functools.lru_cache(maxsize=4096)
def plan(pairs: int, group: int, size: int, bits: int, limit: int, device: AttentionDevice) -> AttentionPlan:
    """The cut that takes least time, of such the one with fewest waves, then with most blocks. See `cuts`."""
    return min(cuts(pairs, group, size, bits, limit, device), key=lambda cut: (cut.time, cut.waves))


def cuts(pairs: int, group: int, size: int, bits: int, limit: int, device: AttentionDevice) -> list[AttentionPlan]:
    """All ways to cut rows, of the same bits, those with more blocks first.

    The tree of sums, with its units, groups and quarters, depends on `limit` alone. A block takes a unit, or one or
    several groups or quarters.

    Args:
        pairs: rows times KV heads; `group`: queries of each.
        size: head_dim; `bits`: of an element of the cache.
    """
    head_dim, tiles = _row(size, bits), -(-group // _TILE)
    chunks = -(-limit // _keys(head_dim))
    chunks_per_unit = -(-chunks // _UNITS)
    units = -(-chunks // chunks_per_unit)
    in_group = -(-units // _GROUPS)

    def cut(units_per_part: int, parts_per_block: int) -> AttentionPlan:
        parts = -(-units // units_per_part)
        blocks = -(-parts // parts_per_block)
        stages, shared, of_one = _fitted(head_dim, bits, parts_per_block * units_per_part * chunks_per_unit, device)
        waves = -(-pairs * tiles * blocks // (of_one * device.multiprocessors))
        few = pairs * tiles * blocks <= device.multiprocessors
        if few:  # one on each multiprocessor, even if the kernel ahead has left only some of them yet
            shared = max(shared, device.shared // 2)
        of_units = units_per_part * parts_per_block == 1 and (few or in_group > 1)
        # Blocks that wait for others must all be resident.
        combiners = _COMBINERS_OF_UNITS if of_units else _COMBINERS
        combiners = min(combiners, group, _TILE) if waves == 1 else 1
        return AttentionPlan(
            head_dim,
            tiles,
            stages,
            chunks_per_unit,
            in_group,
            units_per_part,
            parts_per_block,
            parts,
            blocks,
            combiners,
            of_units and in_group > 1,
            shared,
            waves,
        )

    found = []
    # A unit a block where all run at once: else one block would have to add up dozens.
    fine = cut(1, 1)
    if in_group > 1 and fine.waves == 1:
        found.append(fine)
    found += [cut(in_group, per_block) for per_block in (1, 2)]
    found += [cut(_FOUR * in_group, per_block) for per_block in (1, 2, 4)]
    return found


def _fitted(head_dim: int, bits: int, chunks: int, device: AttentionDevice) -> tuple[int, int, int]:
    """Stages, shared memory of a block, and how many blocks a multiprocessor holds, for blocks of so many chunks.

    Two blocks a multiprocessor, where each can have three stages. 8 sequences of 4,096 tokens took 19.1 us on an H100
    with two of three stages, 21.1 with one of six, and 22.2 with two of two.
    """
    by_registers = (1 << 16) // (_THREADS * _REGISTERS[head_dim])

    def with_stages(stages: int) -> tuple[int, int, int]:
        shared = shared_bytes(head_dim, bits, min(stages, chunks))
        return stages, shared, min(device.shared // (shared + _RESERVED), by_registers)

    possible = map(with_stages, range(2, _STAGES + 1))
    return max(possible, key=lambda fitted: (min(fitted[2], 1 if fitted[0] == 2 else 2), fitted[0]))


def shared_bytes(head_dim: int, bits: int, stages: int) -> int:
    """The dynamic shared memory of a block: `Memory` in csrc/attention/block.cuh."""
    stage, others = _shared_parts(head_dim, bits)
    return stages * stage + others


def _shared_parts(head_dim: int, bits: int) -> tuple[int, int]:
    """Bytes of shared memory of a stage, and of the rest of a block.

    csrc/attention/block.cuh compares both with its structs, as the macros STAGE_BYTES and OTHER_BYTES.
    """
    keys, row = _keys(head_dim), head_dim * bits // 8
    stage = 2 * keys * row + (8 * keys if bits <= 8 else 0)
    weighed = 2 * (2 * keys + 2 * 4 * 4)
    return stage, _TILE * (2 * head_dim + weighed) + 2 * row + 16


def _row(size: int, bits: int) -> int:
    """The head_dim of the kernel that takes heads of `size` dimensions."""
    return next(bound for bound in _HEAD_DIMS if size <= bound and (bits, bound) != (4, 64))


def _keys(head_dim: int) -> int:
    """Keys of a chunk."""
    return 32 if head_dim == 256 else 64


def _device(device: torch.device) -> AttentionDevice:
    return AttentionDevice(multiprocessors(device), shared_memory(device))


@functools.cache
def _kernel(dtype: torch.dtype, head_dim: int, code: int, stored: bool) -> Kernel:
    stage, others = _shared_parts(head_dim, _BITS[code])
    declared = unit(
        "attention/decode.cu",
        ELEMENT=ELEMENTS[dtype],
        HEAD_DIM=head_dim,
        CODE=code,
        STORED=int(stored),
        STAGE_BYTES=stage,
        OTHER_BYTES=others,
    )
    return declared.kernel("decode_attention", _PARAMETERS)


def _launch(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    blocks: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    heads: int,
    interleaved: bool,
    limit: int,
    stored: bool,
    inputs_ready: bool,
) -> Tensor:
    batch = qkv.shape[0]
    (_, kv_heads, block, _), size = keys.shape, head_size(keys)
    if not has_kernel(qkv.dtype, size, qkv.device, keys.dtype):
        return reference.decode_attention(
            qkv, table, positions, blocks, keys, values, key_scales, value_scales, heads, interleaved, limit, stored
        )
    out = qkv.new_empty(batch, heads, size)
    if batch == 0:
        return out
    code, width = CODES.get(keys.dtype, 0), keys.element_size()
    for of, tensor in (("keys", keys), ("values", values)):
        if tensor.data_ptr() % 16 or any(stride * width % 16 for stride in tensor.stride()[:3]):
            raise TensorError(
                f"decode_attention: {of} begin at {tensor.data_ptr():#x} and have strides {tensor.stride()}: give a "
                "cache whose heads begin at multiples of 16 bytes"
            )
    # A copy is the kernel just ahead: what it writes is not ready.
    inputs_ready = inputs_ready and table.is_contiguous() and positions.is_contiguous()
    qkv, table, positions = qkv.contiguous(), table.contiguous(), positions.contiguous()
    if not aligned(qkv):
        qkv = qkv.clone()
    group = heads // kv_heads
    cut = plan(batch * kv_heads, group, size, _BITS[code], limit, _device(qkv.device))
    part_values = part_weights = counting = None
    if cut.parts > 1:
        part_values = torch.empty(cut.parts * batch * heads * size, dtype=torch.float32, device=qkv.device)
        part_weights = torch.empty(cut.parts * batch * heads * 2, dtype=torch.float32, device=qkv.device)
        counting = counters(qkv.device, batch * kv_heads * cut.tiles)
    key_scale_strides = (0, 0) if key_scales is None else key_scales.stride()[:2]
    value_scale_strides = (0, 0) if value_scales is None else value_scales.stride()[:2]
    _kernel(qkv.dtype, cut.head_dim, code, stored)(
        (cut.blocks, kv_heads * cut.tiles, batch),
        _THREADS,
        qkv=qkv,
        table=table,
        positions=positions,
        block_table=blocks,
        keys=keys,
        values=values,
        key_scales=key_scales,
        value_scales=value_scales,
        out=out,
        part_values=part_values,
        part_weights=part_weights,
        counters=counting,
        block_table_stride=blocks.stride(0),
        key_head_stride=keys.stride(1),
        value_head_stride=values.stride(1),
        key_scale_block_stride=key_scale_strides[0],
        key_scale_head_stride=key_scale_strides[1],
        value_scale_block_stride=value_scale_strides[0],
        value_scale_head_stride=value_scale_strides[1],
        # In units of 16 bytes.
        key_block_stride=keys.stride(0) * width // 16,
        key_token_stride=keys.stride(2) * width // 16,
        value_block_stride=values.stride(0) * width // 16,
        value_token_stride=values.stride(2) * width // 16,
        shift=block.bit_length() - 1,
        group=group,
        head_dim=size,
        rotary=table.shape[1],
        interleaved=interleaved,
        stages=cut.stages,
        chunks_per_unit=cut.chunks_per_unit,
        units_per_group=cut.units_per_group,
        units_per_part=cut.units_per_part,
        parts_per_block=cut.parts_per_block,
        parts=cut.parts,
        combiners=cut.combiners,
        limit=limit,
        late=cut.late,
        # Blocks that fill the GPU begin when those ahead end: what is projected would only be asked for later.
        inputs_ready=inputs_ready and not cut.late,
        scale=math.log2(math.e) * size**-0.5,
        shared=cut.shared,
        dependent=True,
    )
    if keys.dtype == INT4:
        rows, lanes = batch * heads, 1 << (size // 8 - 1).bit_length()
        grid = -(-rows * lanes // _THREADS)
        _HADAMARD[qkv.dtype](grid, _THREADS, x=out, rows=rows, size=size, lanes=lanes, dependent=True)
    return out


class _AttentionTask(Task):
    """`Attention` of csrc/cpu/attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "table", "positions", "blocks", "keys", "values")),
        *((name, ctypes.c_void_p) for name in ("key_scales", "value_scales", "out")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("blocks_stride", "key_block", "key_head", "key_token", "value_block", "value_head", "value_token"),
                *("key_scale_block", "key_scale_head", "value_scale_block", "value_scale_head"),
                *("rows", "heads", "kv_heads", "block", "dim", "rotary", "interleaved", "stored", "threads"),
            )
        ),
    )


def _on_cpu(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    blocks: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    heads: int,
    interleaved: bool,
    limit: int,
    stored: bool,
    inputs_ready: bool,  # always: kernels of a CPU do not overlap
) -> Tensor:
    """The C++ kernel for float32 queries over float32 or 4-bit codes, else the reference."""
    if qkv.dtype != torch.float32 or keys.dtype not in (torch.float32, INT4) or not is_available():
        return reference.decode_attention(
            qkv, table, positions, blocks, keys, values, key_scales, value_scales, heads, interleaved, limit, stored
        )
    (_, kv_heads, block, _), dim = keys.shape, head_size(keys)
    out = qkv.new_empty(len(qkv), heads, dim)
    qkv, table, positions = qkv.contiguous(), table.contiguous(), positions.contiguous()
    _AttentionTask(
        *map(pointer, (qkv, table, positions, blocks, keys, values, key_scales, value_scales, out)),
        *(blocks.stride(0), *keys.stride()[:3], *values.stride()[:3]),
        *((0, 0) if key_scales is None else key_scales.stride()[:2]),
        *((0, 0) if value_scales is None else value_scales.stride()[:2]),
        *(len(qkv), heads, kv_heads, block, dim, table.shape[1], interleaved, stored, torch.get_num_threads()),
    ).run("attention")
    return out


_decode_attention = operator(
    "decode_attention(Tensor qkv, Tensor table, Tensor positions, Tensor blocks, Tensor(a!) keys, Tensor(b!) values, "
    "Tensor(c!)? key_scales, Tensor(d!)? value_scales, int heads, bool interleaved, int limit, bool stored, "
    "bool inputs_ready) -> Tensor",
    cuda=_launch,
    reference=_on_cpu,
    fake=lambda qkv, table, positions, blocks, keys, values, key_scales, value_scales, heads, *others: qkv.new_empty(
        qkv.shape[0], heads, head_size(keys)
    ),
)

for _dtype in HALVES:
    for _head_dim in _HEAD_DIMS:
        for _code, _bits in _BITS.items():
            for _stored in (False, True):
                if _bits != 4 or (_stored and _row(_head_dim, _bits) == _head_dim):
                    _kernel(_dtype, _head_dim, _code, _stored)
