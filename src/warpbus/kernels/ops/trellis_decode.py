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
    Problem="int m, int n, int k, int blocks, int levels, int slices, int gate_tiles, float eps",
)
MOST_TOKENS = 16
_MOST_SLICES = 8
_RINGS = ((2, 3), (1, 6), (1, 5), (1, 4), (1, 2))  # blocks of a stage, and stages: the first ones are preferred
# In units of the time of 128 columns of one warp: what a stage, a tile and the sums of several slices take besides.
_OF_A_STAGE, _OF_A_TILE, _OF_SLICES = 0.1, 0.3, 3.0


@dataclass(frozen=True)
class TrellisVariant:
    """A variant of csrc/trellis/decode.cu, whose macros these are.

    Attributes:
        bits: of a weight.
        tokens: the most rows of x: 8 or 16.
        depth: stages of each warp.
        warps: that multiply.
    """

    bits: int
    tokens: int
    depth: int
    span: int = 1
    warps: int = 16

    @property
    def threads(self) -> int:
        """Of a block: those of the warps that multiply, and of those that add."""
        return 32 * (self.warps + self.tokens // 4)

    @functools.cached_property
    def other_bytes(self) -> int:
        """Of shared memory beside x: of rings, sums, measures of x and barriers; the source compares it."""
        ring = self.warps * self.depth * self.span * 256 * self.bits
        sums = 2 * self.warps * self.tokens // 8 * 32 * 16
        measures = 2 * self.warps * self.tokens * 4
        barriers = 8 * (4 + self.warps * self.depth)
        return ring + blocks((sums + measures + barriers, 16)) * 16

    def shared(self, m: int, k: int, slices: int) -> int:
        """Bytes of shared memory of a block."""
        return self.other_bytes + m * (blocks((blocks((k, BLOCK)), slices)) * BLOCK + 8) * 2

    @functools.cache  # noqa: B019 - variants are few, and are kept as long as their kernels
    def kernel(self, dtype: torch.dtype) -> Kernel:
        """The kernel for activations of a dtype."""
        return unit(
            "trellis/decode.cu",
            ELEMENT=ELEMENTS[dtype],
            BITS=self.bits,
            TOKENS=self.tokens,
            WARPS=self.warps,
            DEPTH=self.depth,
            SPAN=self.span,
            OTHER_BYTES=self.other_bytes,
        ).kernel("trellis_decode", _PARAMETERS)


@dataclass(frozen=True)
class TrellisPlan:
    """How a product is divided.

    Attributes:
        variant: the kernel.
        slices: parts of the columns, which different blocks multiply.
    """

    variant: TrellisVariant
    slices: int


@functools.cache
def choose(m: int, n: int, k: int, bits: int, gated: bool, multiprocessors: int, shared: int) -> TrellisPlan | None:
    """The plan for x `[m, k]` and a weight `[n, k]` that takes the fewest steps; None where none fits.

    Args:
        multiprocessors: of the GPU.
        shared: bytes of shared memory that a block can have.
    """
    tokens, items, columns = 8 if m <= 8 else 16, n // TILE // (2 if gated else 1), blocks((k, BLOCK))
    # Two blocks share a multiprocessor where they can: its memory, of which each block takes a kilobyte more.
    rooms = (shared - 1024) // 2, shared
    for room in rooms if tokens == 8 else rooms[1:]:
        found: tuple[float, TrellisPlan] | None = None
        for slices, (span, depth) in itertools.product(range(1, min(columns, _MOST_SLICES) + 1), _RINGS):
            variant = TrellisVariant(bits, tokens, depth, span)
            if slices > multiprocessors or variant.shared(m, k, slices) > room:
                continue
            stages = blocks((blocks((columns, slices)), variant.warps * span))  # of a warp and a tile
            turns = blocks((items, multiprocessors // slices)) * (2 if gated else 1)  # tiles of a block
            steps = turns * (stages * (span + _OF_A_STAGE) + _OF_A_TILE) + (0 if slices == 1 else _OF_SLICES)
            if found is None or steps < found[0]:
                found = steps, TrellisPlan(variant, slices)
        if found is not None:
            return found[1]
    return None


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
    tiles = n // TILE
    items = tiles // 2 if gated else tiles
    partial = counters = None
    if slices > 1:
        partial = torch.empty(slices * tiles * variant.tokens * TILE, dtype=torch.float32, device=x.device)
        counters = workspace.counters(x.device, items * (variant.tokens // 8))
    variant.kernel(x.dtype)(
        min(multiprocessors(x.device) // slices, items) * slices,
        variant.threads,
        shared=variant.shared(m, k, slices),
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
        gate_tiles=tiles // 2 if gated else 0,
        eps=eps,
        dependent=not copied,
    )


for _dtype, _bits, _tokens, (_span, _depth) in itertools.product(HALVES, TRELLIS_BITS, (8, 16), _RINGS):
    TrellisVariant(_bits, _tokens, _depth, _span).kernel(_dtype)
