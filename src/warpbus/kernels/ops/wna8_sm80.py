"""Many tokens, rounded to int8 or e4m3, times packed weights by `mma.sync`, for GPUs without `wgmma`.

Nothing here checks shapes or dtypes: the operators that call it have done so.
"""

import functools
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from warpbus.cuda.devices import shared_memory
from warpbus.cuda.green import multiprocessors
from warpbus.cuda.kernel import Kernel
from warpbus.cuda.parameters import Parameters
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, blocks
from warpbus.kernels.ops.packed import TILE_ROWS, PackedWeight
from warpbus.kernels.ops.split_k import partial_sums, reduce
from warpbus.kernels.ops.tiles_sm80 import Sm80Tiling, choose, clocks, resident_within
from warpbus.kernels.ops.wna8_quantize import round_e4m3, round_int8
from warpbus.kernels.units import unit

_PARAMETERS = Parameters(
    "const unsigned char* x, const float* x_scale, const float* sums, const uint4* codes, const ELEMENT* scales, "
    "const ELEMENT* zeros, const ELEMENT* bias, ELEMENT* out, float* partial, int m, int n, int k, int groups, "
    "int group_shift, int sums_stride, int k_per_split"
)
_SUMS = {torch.int8: "int", torch.float8_e4m3fn: "float"}
_NEEDS = {torch.int8: "sm_80", torch.float8_e4m3fn: "sm_89"}
_RATE = 2  # of the tensor cores, relative to that for 16 bits
_SCALED = (64, 128)  # columns whose sums are scaled at once
_WHOLE_ROW = 31  # a shift that leaves nothing of a column's number: one group a row
_LEAST_CODE = 2.0**-9  # the number that the bits of code 1 are in e4m3


@dataclass(frozen=True)
class KernelForm:
    """What a kernel is compiled for beside its tiling.

    Attributes:
        dtype: of scales, bias and results.
        codes: of the activations: int8 or float8_e4m3fn.
        bits: of a packed code.
        columns: whose sums are scaled at once: 64 or 128.
        symmetric: whether the zero point is the middle code.
    """

    dtype: torch.dtype
    codes: torch.dtype
    bits: int
    columns: int
    symmetric: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class Wna8Sm80Tiling(Sm80Tiling):
    """A tiling of sm80_wna8.cu; its rows are those of x, and its columns the rows of the weight.

    Attributes:
        resident: blocks that a multiprocessor holds at a time as far as registers go.
    """

    resident: int

    def shared(self, form: KernelForm) -> int:
        """Bytes of shared memory of a block: of each stage x, codes, and scales, with int8 zero points too."""
        pairs = 1 if form.symmetric or form.codes != torch.int8 else 2
        scales = self.tile_n // TILE_ROWS * (self.tile_k // form.columns) * 32 * pairs
        return self.stages * (self.tile_m * self.tile_k + self.tile_n * self.tile_k * form.bits // 8 + scales)

    def kernel(self, form: KernelForm) -> Kernel:
        """The kernel for a form."""
        return unit(
            "wna8/sm80_wna8.cu",
            needs=_NEEDS[form.codes],
            ELEMENT=ELEMENTS[form.dtype],
            SUM=_SUMS[form.codes],
            BITS=form.bits,
            COLUMNS=form.columns,
            SYMMETRIC=int(form.symmetric),
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            WARP_M=self.warp_m,
            WARP_N=self.warp_n,
            TILE_K=self.tile_k,
            STAGES=self.stages,
            RESIDENT=self.resident,
            SHARED_BYTES=self.shared(form),
        ).kernel("sm80_wna8", _PARAMETERS)


# Efficiencies are ranked as an H200 does, where the smaller one is 2 to 3 % faster with 4,096 tokens. Three blocks of
# it per multiprocessor are 2 to 4 % faster there, but spill registers on sm_80, sm_86 and sm_89.
LARGE = Wna8Sm80Tiling(128, 128, 128, 32, 64, 3, efficiency=0.65, resident=1)
MEDIUM = Wna8Sm80Tiling(64, 128, 128, 32, 64, 3, efficiency=0.7, resident=2)
TILINGS = (LARGE, MEDIUM)

_FORMS = [
    KernelForm(dtype, codes, bits, columns, symmetric)
    for dtype, codes, bits, columns, symmetric in product(HALVES, _SUMS, (2, 3, 4, 8), _SCALED, (True, False))
    if bits <= 4 or (codes == torch.int8 and symmetric)
]
_KERNELS = {(tiling, form): tiling.kernel(form) for tiling in TILINGS for form in _FORMS}


def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, codes: torch.dtype) -> None:
    """`out = x @ weight.T + bias`, each row of x rounded to 8 bits with a scale of its own.

    Args:
        x: `[m, k]` in the dtype of the weight, as `wna8.fits` says.
        bias: `[n]`, contiguous, or `None`.
        out: `[m, n]`, contiguous.
        codes: int8 or float8_e4m3fn.
    """
    (m, k), n = x.shape, out.shape[1]
    form = form_of(weight, codes)
    if codes == torch.int8:
        (rounded, x_scale), sums = round_int8(x), None
    else:
        factor = -_LEAST_CODE * (weight.scheme.middle_code if form.symmetric else 1)
        rounded, x_scale, sums = round_e4m3(x, form.columns, factor)
    tiling, part = plan(m, n, k, form, multiprocessors(x.device), shared_memory(x.device))
    splits = blocks((k, part))
    partial = partial_sums(splits, out)
    group = weight.scheme.group_size
    _KERNELS[tiling, form](
        (tiling.tiles(m, n), splits),
        tiling.threads,
        x=rounded,
        x_scale=x_scale,
        sums=sums,
        codes=weight.codes,
        scales=weight.scales,
        zeros=weight.zeros,
        bias=bias,
        out=out,
        partial=partial,
        m=m,
        n=n,
        k=k,
        groups=weight.scales.shape[1],
        group_shift=_WHOLE_ROW if group is None else group.bit_length() - 1,
        sums_stride=0 if sums is None else sums.stride(0),
        k_per_split=part,
        shared=tiling.shared(form),
        dependent=True,
    )
    reduce(partial, bias, out)


def form_of(weight: PackedWeight, codes: torch.dtype) -> KernelForm:
    """The form of the kernels for a weight and activations rounded to `codes`."""
    columns = min(weight.scheme.group_size or _SCALED[-1], _SCALED[-1])
    return KernelForm(weight.dtype, codes, weight.bits, columns, weight.zeros is None)


@functools.lru_cache(maxsize=4096)
def plan(
    m: int, n: int, k: int, form: KernelForm, multiprocessors: int, shared_memory: int
) -> tuple[Wna8Sm80Tiling, int]:
    """The tiling of least expected time, and how much of k a block sums; see `tiles_sm80.choose`.

    Args:
        shared_memory: bytes of a multiprocessor.

    Returns:
        A tiling of `TILINGS`, and a multiple of its `tile_k`.
    """

    def cost(tiling: Wna8Sm80Tiling, part: int) -> float:
        return clocks(
            tiling,
            m=m,
            n=n,
            k=k,
            part=part,
            resident=resident_within(tiling.resident, tiling.shared(form), shared_memory),
            multiprocessors=multiprocessors,
            bytes_per_k=min(m, tiling.tile_m) + min(n, tiling.tile_n) * form.bits / 8,
            weight_bytes=n * k * form.bits / 8,
            rate=_RATE,
        )

    return choose(TILINGS, k, cost)
