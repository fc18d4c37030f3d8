"""`decode_attention`: one new token a row, from the projections to the heads' outputs."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.cuda.jit import architecture
from warpbus.cuda.kernel import Kernel, runs_on
from warpbus.cuda.lent import is_gpu
from warpbus.errors import TensorError, UsageError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, aligned, check_alike, check_rank, check_shape
from warpbus.kernels.ops.cache import CODES, check_cache, check_indices
from warpbus.kernels.ops.workspace import counters
from warpbus.kernels.reference import attention as reference
from warpbus.kernels.units import unit

_HEAD_DIMS = (64, 128, 256)  # what the kernel is compiled for; others run on the next larger one
_TILE = 16  # queries of a group that an instruction takes
_LARGEST_GROUP = {64: 64, 128: 64, 256: 32}  # by what the registers of a block hold
_THREADS = 128  # for each tile of queries
_REGISTERS = {64: 128, 128: 128, 256: 256}  # of a thread, at most
_RESERVED = 1024  # bytes of shared memory that each block takes beside its own
_UNITS = 64  # of a row, at most
_GROUPS = 8  # of units, at most, and units of a group; also the blocks of a cluster that every GPU with clusters has
_STAGES = {16: 4, 8: 4}  # chunks under way in a block, by the bits of an element of the cache
_STAGES_CROWDED = {16: 3, 8: 4}  # where not every block has a multiprocessor to itself
_COMBINERS = 16  # blocks that share the sum over a row's parts
# Microseconds on an H100, for the choice between two cuts alone: a chunk of a block that has a multiprocessor to
# itself, and the rest, with the sum over a row's parts through global memory (written, counted, waited for, read in two
# rounds) or through a cluster's shared memory. Seen: 6.4 with a chunk and a cluster, 15.4 with eight chunks; 9.1 with a
# chunk and the sum through global memory.
_CHUNK_TIME = 1.3
_GLOBAL_TIME = 7.8
_CLUSTER_TIME = 5.1


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
        keys, values: the cache, `[blocks, kv_heads, B, d]` in the dtype of `qkv`, int8 or float8_e4m3fn, B a power of
            two from 16 to 256; any strides, the last one 1, for the kernel the others multiples of 16 bytes. Written in
            place. What lies past a row's position, in its last block too, may be anything, also NaN.
        key_scales, value_scales: for int8 and float8_e4m3fn, float32 `[blocks, kv_heads, B]`, the last stride 1: the
            largest magnitude of each head's vector / 127 or / 448. Written in place.
        heads: of the queries, a multiple of `kv_heads`.
        interleaved: pairs are (2i, 2i+1); otherwise (i, i + rotary_dim / 2).
        limit: what all positions are below, known to the host: it decides how a row is cut into pieces.
        stored: the keys and values at `positions` are in the cache already (`rope_and_cache`): nothing is written, and
            of `qkv` only the queries are used. Rows may then be consecutive tokens of one sequence. Otherwise no block
            that is written may be another row's.

    Returns:
        `[b, heads, d]` in the dtype of `qkv`. The kernel gives the same bits at every run, and for a row alone or in
        any batch with the same `limit`, whatever its blocks.

    Raises:
        TensorError: other shapes, dtypes, strides or devices.
        UsageError: `limit` does not fit the block table and the rotary table.
    """
    _check(qkv, table, positions, blocks, keys, values, key_scales, value_scales, heads, limit)
    return _decode_attention(
        qkv, table, positions, blocks, keys, values, key_scales, value_scales, heads, interleaved, limit, stored
    )


def has_kernel(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> bool:
    """Whether `decode_attention` has a kernel for such queries on a device.

    It has on GPUs since Ampere, also on one behind a lent device, for float16 and bfloat16, where `head_dim` is a
    multiple of 16 up to 256 and up to 64 queries share a KV head (32 where `head_dim` is over 128).
    """
    return (
        is_gpu(device)
        and dtype in HALVES
        and 0 < head_dim <= _HEAD_DIMS[-1]
        and head_dim % 16 == 0
        and heads // kv_heads <= _LARGEST_GROUP[_row(head_dim)]
        and runs_on(architecture(device), "sm_80")
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
    _, kv_heads, block, size = keys.shape
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
class Device:
    """What decides how a row is cut: multiprocessors, bytes of shared memory of one, whether blocks form clusters."""

    multiprocessors: int
    shared: int
    clusters: bool


@dataclass(frozen=True)
class Plan:
    """How the keys of a row are cut; the names are those of csrc/attention/decode.cu.

    Attributes:
        parts: blocks for each row and KV head; `shared`: bytes of dynamic shared memory of each.
        in_group: parts that are summed first; `combiners`: 0 where the blocks form a cluster, which sums them all.
        cluster: its blocks, a power of two, of which some may have no part; 1 for none.
    """

    head_dim: int
    stages: int
    chunks_per_unit: int
    units_per_block: int
    parts: int
    in_group: int
    combiners: int
    cluster: int
    threads: int
    shared: int


@functools.lru_cache(maxsize=4096)
def plan(pairs: int, group: int, size: int, bits: int, limit: int, device: Device) -> Plan:
    """How to cut rows.

    Args:
        pairs: rows times KV heads; `group`: queries of each.
        size: head_dim; `bits`: of an element of the cache.
    """
    head_dim = _row(size)
    tiles = -(-group // _TILE)
    threads = tiles * _THREADS
    chunks = -(-limit // _keys(head_dim))
    chunks_per_unit = -(-chunks // _UNITS)
    units = -(-chunks // chunks_per_unit)
    in_group = -(-units // _GROUPS)
    # The blocks of a cluster want neighbouring multiprocessors: where clusters fill the GPU, some have to wait.
    clusters = device.clusters and 2 * pairs * -(-units // in_group) <= device.multiprocessors

    def fitted(units_per_block: int) -> tuple[int, int, int]:
        """Stages, shared memory of a block, and how many blocks the GPU holds."""
        own = pairs * -(-units // units_per_block) <= device.multiprocessors
        stages, chunks = (_STAGES if own else _STAGES_CROWDED)[bits], units_per_block * chunks_per_unit
        while stages > 2 and shared_bytes(head_dim, bits, tiles, min(stages, chunks)) > device.shared - _RESERVED:
            stages -= 1
        shared = shared_bytes(head_dim, bits, tiles, min(stages, chunks))
        of_one = min(device.shared // (shared + _RESERVED), (1 << 16) // (threads * _REGISTERS[head_dim]))
        return stages, shared, of_one * device.multiprocessors

    def time(units_per_block: int, combine: float) -> float:
        turns = -(-pairs * -(-units // units_per_block) // device.multiprocessors)
        return combine + turns * units_per_block * chunks_per_unit * _CHUNK_TIME

    # A unit for each block, where all blocks run at once: else one would have to combine dozens of parts alone.
    fine = (
        in_group > 1
        and pairs * units <= fitted(1)[2]
        and time(1, _GLOBAL_TIME) < time(in_group, _CLUSTER_TIME if clusters else _GLOBAL_TIME)
    )
    units_per_block = 1 if fine else in_group
    parts = -(-units // units_per_block)
    stages, shared, resident = fitted(units_per_block)
    combiners = min(_COMBINERS, group) if pairs * parts <= resident else 1
    cluster = 1
    if clusters and not fine:
        combiners, cluster = 0, 1 << (parts - 1).bit_length()
    return Plan(
        head_dim,
        stages,
        chunks_per_unit,
        units_per_block,
        parts,
        in_group if fine else 1,
        combiners,
        cluster,
        threads,
        shared,
    )


def shared_bytes(head_dim: int, bits: int, tiles: int, stages: int) -> int:
    """The dynamic shared memory of a block: `Memory` in csrc/attention/block.cuh."""
    keys, row = _keys(head_dim), head_dim * bits // 8
    stage = 2 * keys * row + (8 * keys if bits == 8 else 0)
    weighed = (2 if tiles * head_dim < 512 else 1) * (2 * keys + 2 * 4 * 4)
    queries = tiles * _TILE * (2 * head_dim + weighed)
    return stages * stage + queries + 2 * row + 16


def _row(size: int) -> int:
    """The head_dim of the kernel that takes heads of `size` dimensions."""
    return next(bound for bound in _HEAD_DIMS if size <= bound)


def _keys(head_dim: int) -> int:
    """Keys of a chunk."""
    return 32 if head_dim == 256 else 64


@functools.cache
def _device(device: torch.device) -> Device:
    properties = torch.cuda.get_device_properties(device)
    return Device(
        properties.multi_processor_count, properties.shared_memory_per_multiprocessor, clusters=properties.major >= 9
    )


@functools.cache
def _kernel(dtype: torch.dtype, head_dim: int, bits: int, stored: bool) -> Kernel:
    declared = unit(
        "attention/decode.cu", ELEMENT=ELEMENTS[dtype], HEAD_DIM=head_dim, CODE_BITS=bits % 16, STORED=int(stored)
    )
    return declared.kernel("decode_attention", "P" * 12 + "q" * 7 + "I" * 4 + "i" * 12 + "f")


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
) -> Tensor:
    batch = qkv.shape[0]
    _, kv_heads, block, size = keys.shape
    if not has_kernel(qkv.dtype, heads, kv_heads, size, qkv.device):
        return reference.decode_attention(
            qkv, table, positions, blocks, keys, values, key_scales, value_scales, heads, interleaved, limit, stored
        )
    out = qkv.new_empty(batch, heads, size)
    if batch == 0:
        return out
    bits = 8 * keys.element_size()
    for of, tensor in (("keys", keys), ("values", values)):
        if tensor.data_ptr() % 16 or any(stride * bits % 128 for stride in tensor.stride()[:3]):
            raise TensorError(
                f"decode_attention: {of} begin at {tensor.data_ptr():#x} and have strides {tensor.stride()}: give a "
                "cache whose heads begin at multiples of 16 bytes"
            )
    qkv, table, positions = qkv.contiguous(), table.contiguous(), positions.contiguous()
    if not aligned(qkv):
        qkv = qkv.clone()
    group = heads // kv_heads
    cut = plan(batch * kv_heads, group, size, bits, limit, _device(qkv.device))
    part_values = part_weights = counting = None
    if cut.parts > 1 and cut.combiners:
        part_values = torch.empty(cut.parts * batch * heads * size, dtype=torch.float32, device=qkv.device)
        part_weights = torch.empty(cut.parts * batch * heads * 2, dtype=torch.float32, device=qkv.device)
        counting = counters(qkv.device, batch * kv_heads)
    _kernel(qkv.dtype, cut.head_dim, bits, stored)(
        (max(cut.parts, cut.cluster), kv_heads, batch),
        cut.threads,
        qkv,
        table,
        positions,
        blocks,
        keys,
        values,
        key_scales,
        value_scales,
        out,
        part_values,
        part_weights,
        counting,
        blocks.stride(0),
        keys.stride(1),
        values.stride(1),
        *((0, 0) if key_scales is None else key_scales.stride()[:2]),
        *((0, 0) if value_scales is None else value_scales.stride()[:2]),
        *(tensor.stride(axis) * bits // 128 for tensor in (keys, values) for axis in (0, 2)),
        block.bit_length() - 1,
        group,
        size,
        table.shape[1],
        int(interleaved),
        CODES.get(keys.dtype, 0),
        cut.stages,
        cut.chunks_per_unit,
        cut.units_per_block,
        cut.in_group,
        cut.combiners,
        limit,
        math.log2(math.e) * size**-0.5,
        shared=cut.shared,
        cluster=cut.cluster,
        dependent=True,
    )
    return out


def _fake(
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
) -> Tensor:
    return qkv.new_empty(qkv.shape[0], heads, keys.shape[3])


_decode_attention = operator(
    "decode_attention(Tensor qkv, Tensor table, Tensor positions, Tensor blocks, Tensor(a!) keys, Tensor(b!) values, "
    "Tensor(c!)? key_scales, Tensor(d!)? value_scales, int heads, bool interleaved, int limit, bool stored) -> Tensor",
    cuda=_launch,
    reference=reference.decode_attention,
    fake=_fake,
)

for _dtype in HALVES:
    for _head_dim in _HEAD_DIMS:
        for _bits in (16, 8):
            for _stored in (False, True):
                _kernel(_dtype, _head_dim, _bits, _stored)
