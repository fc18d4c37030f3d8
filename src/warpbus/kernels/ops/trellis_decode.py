"""Launching `trellis/decode.cu`: a trellis times a few tokens, with what surrounds the product in a layer."""

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.cuda import driver
from warpbus.cuda.green import multiprocessors
from warpbus.cuda.kernel import Kernel
from warpbus.cuda.parameters import Parameters
from warpbus.kernels.ops import workspace
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, aligned, blocks
from warpbus.kernels.ops.trellis_packed import BLOCK, PackedTrellis
from warpbus.kernels.units import unit
from warpbus.qtensor.scheme import TRELLIS_BITS
from warpbus.qtensor.trellis import TILE, rotation_block

_PARAMETERS = Parameters(
    "const uint4* codes, const float* scales, const unsigned char* signs, const ELEMENT* x, const ELEMENT* norm, "
    "const ELEMENT* bias, const ELEMENT* residual, ELEMENT* out, float* partial, int* counters, Problem p",
    Problem="int m, int n, int k, int blocks, int levels, int slices, int gate_tiles, int stages, float eps",
)
_TOKENS = (4, 8, 16)
MOST_TOKENS = 16
_MOST_SLICES = 8
_MOST_STAGES = 8  # kMostStages in trellis/decode.cu
# In units of the time of 128 columns of one warp and tile: what a stage, an item and the sums of slices take besides.
_OF_A_STAGE, _OF_AN_ITEM, _OF_SLICES = 0.1, 0.3, 3.0


@dataclass(frozen=True)
class TrellisVariant:
    """A variant of csrc/trellis/decode.cu, whose macros these are.

    Attributes:
        bits: of a weight.
        tokens: the most rows of x: 4, 8 or 16.
        tiles: of 16 rows of the weight, of an item: 1 or 2.
        warps: that multiply.
    """

    bits: int
    tokens: int
    tiles: int
    warps: int = 16

    @property
    def threads(self) -> int:
        """Of a block: those of the warps that multiply, of one that copies, and of those that add."""
        return 32 * (self.warps + 1 + min(2, self.tokens // 4))

    @property
    def stage_bytes(self) -> int:
        """Of shared memory of a stage: 128 columns for each warp."""
        return self.tiles * self.warps * 256 * self.bits

    @property
    def other_bytes(self) -> int:
        """Of shared memory beside stages and x: of sums, measures of x and barriers; the source compares it."""
        sums = self.tiles * self.warps * self.tokens // 4 * 32 * 8
        measures = 3 * self.warps * self.tokens * 4
        return sums + measures + (2 * _MOST_STAGES + 2) * 8

    def shared(self, m: int, k: int, slices: int, stages: int) -> int:
        """Bytes of shared memory of a block."""
        columns = blocks((blocks((k, BLOCK)), slices)) * BLOCK
        return self.other_bytes + stages * self.stage_bytes + m * (columns + 8) * 2 + columns // 8  # x and signs

    @functools.cache  # noqa: B019 - variants are few, and are kept as long as their kernels
    def kernel(self, dtype: torch.dtype) -> Kernel:
        """The kernel for activations of a dtype."""
        return unit(
            "trellis/decode.cu",
            ELEMENT=ELEMENTS[dtype],
            BITS=self.bits,
            TOKENS=self.tokens,
            TILES=self.tiles,
            WARPS=self.warps,
            OTHER_BYTES=self.other_bytes,
        ).kernel("trellis_decode", _PARAMETERS)


@dataclass(frozen=True)
class TrellisPlan:
    """How a product is divided.

    Attributes:
        variant: the kernel.
        slices: parts of the columns, which different blocks multiply.
        stages: of the ring of a block.
    """

    variant: TrellisVariant
    slices: int
    stages: int


@functools.cache
def choose(m: int, n: int, k: int, bits: int, gated: bool, multiprocessors: int, shared: int) -> TrellisPlan | None:
    """The plan for x `[m, k]` and a weight `[n, k]` that takes the fewest steps; None where none fits.

    Args:
        multiprocessors: of the GPU.
        shared: bytes of shared memory that a block can have.
    """
    found: tuple[float, TrellisPlan] | None = None
    tokens, rows, columns = next(each for each in _TOKENS if m <= each), n // TILE, blocks((k, BLOCK))
    for tiles, slices in itertools.product(_tiles_of(tokens, gated), range(1, min(columns, _MOST_SLICES) + 1)):
        variant = TrellisVariant(bits, tokens, tiles)
        room = shared - variant.shared(m, k, slices, 0)
        if slices > multiprocessors or room < 2 * variant.stage_bytes:
            continue
        parts = blocks((blocks((columns, slices)), variant.warps))  # stages of an item
        turns = blocks((blocks((rows, tiles)), multiprocessors // slices))  # items of a block
        steps = turns * (parts * (tiles + _OF_A_STAGE) + _OF_AN_ITEM) + (0 if slices == 1 else _OF_SLICES)
        if found is None or steps < found[0]:
            stages = min(room // variant.stage_bytes, _MOST_STAGES, max(2, turns * parts))
            found = steps, TrellisPlan(variant, slices, stages)
    return None if found is None else found[1]


def _tiles_of(tokens: int, gated: bool) -> tuple[int, ...]:
    """The tiles an item may have: a gate is one, beside that of up; with 16 rows of x two take too many registers."""
    return (2,) if gated else (1,) if tokens == MOST_TOKENS else (2, 1)


def plan_of(x: Tensor, weight: PackedTrellis, gated: bool) -> TrellisPlan | None:
    """The plan on the GPU of x `[m, k]`; None where x has too many rows for its kernels or its shared memory."""
    if x.shape[0] > MOST_TOKENS:
        return None
    shared = driver.shared_memory_of_block(x.get_device())
    return choose(x.shape[0], *weight.shape, weight.scheme.bits, gated, multiprocessors(x.device), shared)


def multiply(
    x: Tensor,
    weight: PackedTrellis,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
    out: Tensor,
    plan: TrellisPlan,
) -> None:
    """`out = epilogue(norm(x) @ weight.T)`; see `trellis_linear`.

    Args:
        x: `[m, k]`, contiguous, m up to 16. Copied where it does not begin at a multiple of 16 bytes.
        bias, residual: `[n]` and the shape of `out`, contiguous, or `None`.
        norm: `[k]`, or `None`, also where the plan has several slices. Copied where it is not contiguous and aligned.
        gated: the result is `silu(gate) * up`; n / 2 is a multiple of 16.
        out: `[m, n]`, or `[m, n / 2]` where gated, contiguous.
        plan: see `plan_of`.
    """
    m, k = x.shape
    n = weight.shape[0]
    x = x if aligned(x) else x.clone()
    copied = False
    if norm is not None and not (norm.is_contiguous() and aligned(norm)):
        norm, copied = norm.clone(memory_format=torch.contiguous_format), True
    variant, slices = plan.variant, plan.slices
    items = blocks((n // TILE, variant.tiles))
    partial = counters = None
    if slices > 1:
        sums = slices * items * variant.tiles * variant.tokens * TILE
        partial = torch.empty(sums, dtype=torch.float32, device=x.device)
        counters = workspace.counters(x.device, items * (variant.tokens // 4))
    variant.kernel(x.dtype)(
        min(multiprocessors(x.device) // slices, items) * slices,
        variant.threads,
        shared=variant.shared(m, k, slices, plan.stages),
        codes=weight.codes,
        scales=weight.scales,
        signs=weight.signs,
        x=x,
        norm=norm,
        bias=bias,
        residual=residual,
        out=out,
        partial=partial,
        counters=counters,
        m=m,
        n=n,
        k=k,
        blocks=blocks((k, BLOCK)),
        levels=rotation_block(k).bit_length() - 1,
        slices=slices,
        gate_tiles=n // TILE // 2 if gated else 0,
        stages=plan.stages,
        eps=eps,
        dependent=not copied,
    )


for _dtype, _bits, _tokens, _tiles in itertools.product(HALVES, TRELLIS_BITS, _TOKENS, (1, 2)):
    TrellisVariant(_bits, _tokens, _tiles).kernel(_dtype)
