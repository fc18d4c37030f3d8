"""`round_to_fp8`: a matrix as 8-bit floating-point numbers with one scale, by rows and by columns, for training.

`fp8/cast.cu` reads it twice, for its largest magnitude and for its codes. (Micikevicius et al., 2022, "FP8 Formats")
"""

import itertools

import torch
from torch import Tensor

from warpbus.cuda.parameters import Parameters
from warpbus.errors import TensorError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import ELEMENTS, aligned, blocks, blocks_in_stride, check_alike, check_rank
from warpbus.kernels.ops.workspace import counters
from warpbus.kernels.reference import fp8 as reference
from warpbus.kernels.units import unit

_CAST_PARAMETERS = Parameters(
    "const ELEMENT* x, const float* scale, unsigned char* codes, unsigned char* transposed, int m, int n, int padded"
)
_SCALE_PARAMETERS = Parameters("const uint4* x, float* scale, unsigned int* counters, long long chunks")
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)

_BLOCK = 256  # kBlock in fp8/cast.cu
_TILE = 128  # kTile
_CHUNK = 16  # bytes that fp8_scale reads at a time
_UNITS = {
    (dtype, codes): unit("fp8/cast.cu", needs="sm_89", ELEMENT=ELEMENTS[dtype], E4M3=int(codes == torch.float8_e4m3fn))
    for dtype, codes in itertools.product(ELEMENTS, FORMATS)
}
_SCALE = {key: of.kernel("fp8_scale", _SCALE_PARAMETERS) for key, of in _UNITS.items()}
_CAST = {key: of.kernel("fp8_cast", _CAST_PARAMETERS) for key, of in _UNITS.items()}


def round_to_fp8(x: Tensor, dtype: torch.dtype, *, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of a matrix, and the scale that they are to be multiplied with.

    The scale makes the largest magnitude, or 1e-12 where that is more, the format's largest. NaN and infinity give
    codes of NaN, whose sign means nothing.

    Args:
        x: `[m, n]`, m >= 1, n a multiple of 16; float32, float16 or bfloat16; copied where it is not contiguous.
        dtype: float8_e4m3fn or float8_e5m2.
        transposed: whether the second of the results is wanted.

    Returns:
        Codes `[m, n]`; the same as columns `[n, m']` with m' = m rounded up to a multiple of 16 and zeros beyond m, or
        `[n, 0]`; and the scale, a float32 scalar. The same bits at every run.

    Raises:
        TensorError: another shape or dtype.
        DeviceError: on a GPU older than sm_89.
    """
    check_rank("round_to_fp8", 2, x=x)
    check_alike("round_to_fp8", x=x)
    if x.numel() == 0 or x.shape[1] % reference.MULTIPLE:
        raise TensorError(
            f"round_to_fp8: x has shape {list(x.shape)}, expected rows and a multiple of {reference.MULTIPLE} columns: "
            f"pad it"
        )
    if dtype not in FORMATS:
        raise TensorError(f"round_to_fp8: codes of {dtype} are not known: use torch.float8_e4m3fn or torch.float8_e5m2")
    codes, columns, scale = _round(x, dtype, transposed)
    return codes, columns, scale


def _launch(x: Tensor, dtype: torch.dtype, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    if not aligned(x):
        x = x.clone()
    codes, columns, scale = _fake(x, dtype, transposed)
    (m, n), key = x.shape, (x.dtype, dtype)
    chunks = x.numel() * x.element_size() // _CHUNK
    grid = blocks_in_stride(chunks, _BLOCK, x.device)
    _SCALE[key](grid, _BLOCK, x=x, scale=scale, counters=counters(x.device, 2), chunks=chunks, dependent=True)
    _CAST[key](
        blocks((m, _TILE), (n, _TILE)),
        _BLOCK,
        x=x,
        scale=scale,
        codes=codes,
        transposed=columns if transposed else None,
        m=m,
        n=n,
        padded=columns.shape[1],
        dependent=True,
    )
    return codes, columns, scale


def _fake(x: Tensor, dtype: torch.dtype, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    m, n = x.shape
    padded = -(-m // reference.MULTIPLE) * reference.MULTIPLE if transposed else 0
    return (
        torch.empty(m, n, dtype=dtype, device=x.device),
        torch.empty(n, padded, dtype=dtype, device=x.device),
        torch.empty((), dtype=torch.float32, device=x.device),
    )


_round = operator(
    "round_to_fp8(Tensor x, ScalarType dtype, bool transposed) -> (Tensor, Tensor, Tensor)",
    cuda=_launch,
    reference=reference.round_to_fp8,
    fake=_fake,
)
