"""Launching `wna16/decode.cu`: quantized weights times a few tokens, with what surrounds the product in a layer."""

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from warpbus.cuda import driver
from warpbus.cuda.green import multiprocessors
from warpbus.cuda.kernel import Kernel, Unit
from warpbus.cuda.parameters import Parameters
from warpbus.cuda.tensor_map import fits as copyable
from warpbus.cuda.tensor_map import tensor_map
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, aligned, blocks
from warpbus.kernels.ops.packed import STORED_BITS, TILE_COLUMNS, TILE_ROWS, PackedWeight
from warpbus.kernels.ops.packed_experts import PackedExperts
from warpbus.kernels.units import unit

PROBLEM = (
    "int m, int n, int k, int chunks, int groups, int shift, int middle, int gate_tiles, int stages, int streamed, "
    "float eps"
)
_PARAMETERS = Parameters(
    "TensorMap map, const uint4* codes, const uint32* scales, const uint32* zeros, const ELEMENT* x, "
    "const ELEMENT* norm, const ELEMENT* bias, const ELEMENT* residual, ELEMENT* out, Problem p",
    Problem=PROBLEM,
)
_EXPERTS = Parameters(
    "TensorMap map, const uint4* codes, const uint32* scales, const uint32* zeros, const uint4* host_codes, "
    "const uint32* host_scales, const uint32* host_zeros, const ELEMENT* residual, ELEMENT* out, Items items, "
    "Problem p",
    Items="const int* experts, const int4* tiles, const float* factors, int count, int per_token, int slots, "
    "int shared_expert, int early, int resident, int partial",
    Problem=PROBLEM,
)
MOST_TOKENS = 16
MOST_ROWS_OF_EXPERT = 8
MOST_STAGES, FEWEST_STAGES = 8, 2  # in flight
_PLENTY = 160 * 1024  # bytes of shared memory: with less, stages of two chunks per warp would be too few
_NO_MAP = bytes(128)


@dataclass(frozen=True)
class DecodeVariant:
    """A variant of csrc/wna16/decode.cu, whose macros these are.

    Attributes:
        bits: of a packed code.
        two_scales: a chunk of 64 columns has two groups.
        tokens: the most rows of x: 8 or 16.
        span: adjacent chunks of a stage that a warp multiplies.
        rounds: how often it does so in a stage; changes nothing in the order of the sums.
        experts: for a mixture of experts. Its products are small, and two blocks share a multiprocessor: those of the
            next kernel begin before the last ones of this have ended.
    """

    bits: int
    two_scales: bool
    tokens: int
    span: int
    rounds: int
    experts: bool

    @classmethod
    def of(cls, m: int, weight: PackedWeight, device: int, *, experts: bool = False) -> "DecodeVariant":
        """The variant for m rows of x and the GPU number `device`."""
        n, k = weight.shape
        several = n > 2 * TILE_ROWS * driver.attribute(driver.MULTIPROCESSOR_COUNT, device)
        two_scales = weight.scheme.group_size == 32
        return _chosen(m, k, several, weight.bits, two_scales, driver.shared_memory_of_block(device), experts)

    @property
    def warps(self) -> int:
        """That multiply."""
        return 8 if self.experts else 16

    @property
    def finishers(self) -> int:
        """Warps that add up the sums of those that multiply."""
        return 1 if self.experts else 3

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor."""
        return 2 if self.experts else 1

    @property
    def threads(self) -> int:
        """Of a block: those of the warps that multiply and finish, and of one that loads."""
        return 32 * (self.warps + 1 + self.finishers)

    @property
    def chunks(self) -> int:
        """In a stage."""
        return self.warps * self.span * self.rounds

    @functools.cached_property
    def stage_bytes(self) -> int:
        """Of shared memory: of a stage without x; the source compares it with its struct."""
        codes = 2 * self.chunks * 128 * self.bits
        scales = 2 * (self.chunks * (2 if self.two_scales else 1) + 1) * 32
        return blocks((codes + 2 * scales, 128)) * 128

    @functools.cached_property
    def other_bytes(self) -> int:
        """Of shared memory: of the sums, barriers and squares; the source compares it with its structs."""
        sums, barriers, squares = self.warps * 2 * (self.tokens // 8) * 32 * 16, 200, self.tokens * self.warps * 4
        return sums + barriers + squares

    def shared(self, m: int, k: int, *, streamed: bool) -> tuple[int, int]:
        """Bytes of shared memory: of one stage, and of all the rest of a block, with x in the one or the other."""
        step = self.chunks * m * TILE_COLUMNS * 2
        if streamed:
            return self.stage_bytes + step, self.other_bytes
        return self.stage_bytes, self.other_bytes + blocks((k, self.chunks * TILE_COLUMNS)) * step

    def stages(self, m: int, k: int, device: int, *, streamed: bool) -> int:
        """How many stages there is room for, with m rows of x."""
        return self.fitting(m, k, driver.shared_memory_of_block(device), streamed=streamed)

    def fitting(self, m: int, k: int, room: int, *, streamed: bool) -> int:
        """The same for so many bytes of shared memory."""
        stage, others = self.shared(m, k, streamed=streamed)
        shared_room = (room + 1024) // self.resident - 1024  # the system takes 1 KB of each block
        fitting = (shared_room - others) // stage
        return fitting if fitting >= FEWEST_STAGES else (room - others) // stage

    @functools.cache  # noqa: B019 - variants are few, and are kept as long as their kernels
    def kernel(self, dtype: torch.dtype) -> Kernel:
        """The kernel for activations of a dtype."""
        declared = self.unit("wna16/decode.cu", dtype)
        if self.experts:
            return declared.kernel("wna16_decode_experts", _EXPERTS)
        return declared.kernel("wna16_decode", _PARAMETERS)

    def unit(self, source: str, dtype: torch.dtype, *, experts: bool | None = None) -> Unit:
        """A source compiled with the macros of this variant, for activations of a dtype.

        Args:
            experts: the macro EXPERTS; by default that of the variant.
        """
        return unit(
            source,
            needs="sm_90",
            ELEMENT=ELEMENTS[dtype],
            BITS=self.bits,
            GROUPS=2 if self.two_scales else 1,
            TOKENS=self.tokens,
            WARPS=self.warps,
            SPAN=self.span,
            ROUNDS=self.rounds,
            FINISHERS=self.finishers,
            STAGE_BYTES=self.stage_bytes,
            OTHER_BYTES=self.other_bytes,
            EXPERTS=int(self.experts if experts is None else experts),
            RESIDENT=self.resident,
        )


@functools.lru_cache(maxsize=4096)
def _chosen(m: int, k: int, several: bool, bits: int, two_scales: bool, room: int, experts: bool) -> DecodeVariant:
    """The variant for GPUs whose blocks can ask for `room` bytes of shared memory.

    Args:
        several: a block has several pairs of tiles.
    """
    tokens = 8 if m <= 8 else 16
    # Two chunks share the work around their products, as far as registers and shared memory hold them.
    span = 2 if bits <= 4 and tokens == 8 and room >= _PLENTY else 1
    once = DecodeVariant(bits, two_scales, tokens, span, 1, experts)
    if span == 1 or experts:
        return once
    twice = replace(once, rounds=2)
    if not several and blocks((k, TILE_COLUMNS)) <= twice.chunks:
        return once  # all would be in one stage, and the first product would wait for the last byte
    for streamed in (False, True):
        if twice.fitting(m, k, room, streamed=streamed) < FEWEST_STAGES <= once.fitting(m, k, room, streamed=streamed):
            return once
    return twice


def fits(x: Tensor, weight: PackedWeight) -> bool:
    """Whether x `[m, k]` has few enough rows for a GPU's shared memory."""
    return x.shape[0] <= MOST_TOKENS and _stages(x, weight, streamed=True) >= FEWEST_STAGES


def norms(x: Tensor, weight: PackedWeight) -> bool:
    """Whether x can be normed on the way: it has to lie in shared memory as a whole."""
    return x.shape[1] % 8 == 0 and _stages(x, weight, streamed=False) >= FEWEST_STAGES


def multiply(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
    out: Tensor,
) -> None:
    """`out = epilogue(norm(x) @ weight.T)` on sm_90 and later; see `wna16.wna16_linear`.

    Args:
        x: `[m, k]`, contiguous; it `fits`.
        bias, residual: `[n]` and the shape of `out`, contiguous, or `None`.
        norm: `[k]`, or `None`; only where it `norms`. Copied where it is not contiguous and aligned.
        gated: the result is `silu(gate) * up`; n / 2 is a multiple of 16.
        out: `[m, n]`, or `[m, n / 2]` where gated, contiguous.
    """
    m, k = x.shape
    n = weight.shape[0]
    pairs = n // 2 // TILE_ROWS if gated else blocks((n, 2 * TILE_ROWS))
    once = pairs <= multiprocessors(x.device)  # a block needs x once, and stages have room for more of it
    streamed = norm is None and (once or _stages(x, weight, streamed=False) < FEWEST_STAGES)
    variant = DecodeVariant.of(m, weight, x.get_device())
    copied = False
    if norm is not None:
        x = x if aligned(x) else x.clone()
        if not (norm.is_contiguous() and aligned(norm)):
            norm, copied = norm.clone(memory_format=torch.contiguous_format), True
    elif not copyable(x) or k % TILE_COLUMNS:
        x = _padded(x)
    variant.kernel(x.dtype)(
        multiprocessors(x.device),
        variant.threads,
        map=_NO_MAP if norm is not None else tensor_map(x, m, TILE_COLUMNS, panels=variant.chunks),
        x=x,
        norm=norm,
        bias=bias,
        residual=residual,
        out=out,
        eps=eps,
        **_problem(variant, m, k, weight, gated, x.get_device(), streamed=streamed),
        dependent=not copied,  # the norm's weight is loaded before the kernels ahead have ended
    )


def multiply_experts(
    x: Tensor,
    stacked: PackedExperts,
    rows: int,
    out: Tensor,
    *,
    gated: bool,
    count: int,
    experts: Tensor | None = None,
    tiles: Tensor | None = None,
    factors: Tensor | None = None,
    residual: Tensor | None = None,
    per_token: int = 1,
    slots: int = 1,
    shared_expert: int | None = None,
    early: bool = False,
    partial: bool = False,
) -> None:
    """Products of a mixture of experts on sm_90 and later; csrc/wna16/experts.cuh says what an item is.

    Args:
        x: `[any, k]`, contiguous.
        stacked: the weights of all experts.
        rows: of x in an item, at most: 1 or 8.
        out: `[any, n]`, or `[any, n / 2]` where gated, contiguous.
        gated: as in `multiply`.
        count: of items; with tiles the most that there can be.
        experts, factors, per_token, slots, shared_expert, early, partial: see `Items` in experts.cuh.
        tiles: int32 `[1 + count, 4]`, the number of tiles first.
        residual: in the shape of `out`.
    """
    k, weights, offloaded = x.shape[1], stacked.weights, stacked.offloaded
    if not copyable(x) or k % TILE_COLUMNS:
        x = _padded(x)
    variant = DecodeVariant.of(rows, weights, x.get_device(), experts=True)
    pairs = blocks((weights.shape[0], 2 * TILE_ROWS))
    variant.kernel(x.dtype)(
        min(multiprocessors(x.device) * variant.resident, pairs * count),
        variant.threads,
        map=tensor_map(x, rows, TILE_COLUMNS, panels=variant.chunks),
        residual=residual,
        out=out,
        experts=experts,
        tiles=None if tiles is None else tiles[1:],
        factors=factors,
        count=count,
        per_token=per_token,
        slots=slots,
        shared_expert=-1 if shared_expert is None else shared_expert,
        early=early,
        resident=stacked.resident,
        partial=partial,
        host_codes=None if offloaded is None else offloaded.codes,
        host_scales=None if offloaded is None else offloaded.scales,
        host_zeros=None if offloaded is None else offloaded.zeros,
        eps=0.0,
        **_problem(variant, rows, k, weights, gated, x.get_device(), streamed=True),
        dependent=True,
    )


def _problem(
    variant: DecodeVariant, m: int, k: int, weight: PackedWeight, gated: bool, device: int, *, streamed: bool
) -> dict[str, Any]:
    """The arguments of a launch that describe the weight, and how it is computed."""
    stages = min(variant.stages(m, k, device, streamed=streamed), MOST_STAGES)
    stage, others = variant.shared(m, k, streamed=streamed)
    return {**describe(weight, m, gated, stages), "k": k, "streamed": streamed, "shared": stages * stage + others}


def describe(weight: PackedWeight, m: int, gated: bool, stages: int) -> dict[str, Any]:
    """The fields of a launch with m rows of x, which is not streamed, except for `eps`."""
    (n, k), size = weight.shape, weight.scheme.group_size
    return {
        "codes": weight.codes,
        "scales": weight.scales,
        "zeros": weight.zeros,
        "m": m,
        "n": n,
        "k": k,
        "chunks": blocks((k, TILE_COLUMNS)),
        "groups": weight.scales.shape[1],
        "shift": 31 if size is None else max(size // TILE_COLUMNS, 1).bit_length() - 1,
        "middle": weight.scheme.middle_code,
        "gate_tiles": n // 2 // TILE_ROWS if gated else 0,
        "stages": stages,
        "streamed": False,
    }


def _padded(x: Tensor) -> Tensor:
    """A copy whose rows begin at multiples of 16 bytes, zero up to the next chunk."""
    m, k = x.shape
    copy = x.new_zeros(m, blocks((k, TILE_COLUMNS)) * TILE_COLUMNS)
    copy[:, :k] = x
    return copy


def _stages(x: Tensor, weight: PackedWeight, *, streamed: bool) -> int:
    """How many stages there is room for, with x `[m, k]`."""
    m, k = x.shape
    return DecodeVariant.of(m, weight, x.get_device()).stages(m, k, x.get_device(), streamed=streamed)


for _dtype, _two, _bits in itertools.product(HALVES, (False, True), STORED_BITS):
    for _tokens, _span, _rounds in ((8, 1, 1), (8, 2, 1), (8, 2, 2), (16, 1, 1)):
        if _span == 2 and _bits == 8:
            continue
        DecodeVariant(_bits, _two, _tokens, _span, _rounds, experts=False).kernel(_dtype)
        if _tokens == MOST_ROWS_OF_EXPERT and _rounds == 1:
            DecodeVariant(_bits, _two, _tokens, _span, _rounds, experts=True).kernel(_dtype)
