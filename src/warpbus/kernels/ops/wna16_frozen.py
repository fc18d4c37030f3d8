"""`wna16` while something else is trained: a product with packed weights that can be differentiated by x.

Forward it is `wna16_linear`. Backward, `dx = dy W` is a product of cuBLAS with columns of W that
`wna16/dequantize.cu` writes into a buffer, as many at a time as `BUFFER_BYTES` hold.
"""

from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.parameters import Parameters
from warpbus.kernels.operators import differentiable, operator
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, blocks, blocks_in_stride
from warpbus.kernels.ops.packed import STORED_BITS, TILE_COLUMNS, TILE_ROWS, PackedWeight, scheme_of, unpack
from warpbus.kernels.ops.wna16 import wna16_linear
from warpbus.kernels.units import unit

_PARAMETERS = Parameters(
    "const uint32* codes, const ELEMENT* scales, const ELEMENT* zeros, ELEMENT* out, int n, int stride, "
    "int first, int tiles, int groups, int group_shift, int middle"
)
BUFFER_BYTES = 2**28
"""The limit in bytes of the columns dequantized at a time; at least one tile of columns."""

_BLOCK = 256  # kBlock in wna16/dequantize.cu
_WHOLE_ROW = 31  # a shift that leaves nothing of a column's number: one group a row

_KERNELS = {
    (dtype, bits): unit("wna16/dequantize.cu", ELEMENT=ELEMENTS[dtype], BITS=bits).kernel(
        "wna16_dequantize", _PARAMETERS
    )
    for dtype in HALVES
    for bits in STORED_BITS
}


def wna16_frozen(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, which can be differentiated by x; works under `torch.compile`.

    Args:
        x: `[..., k]` in the dtype of the weight.
        weight: `[n, k]`.
        bias: `[n]`; it gets no gradient.

    Returns:
        `[..., n]`, what `wna16_linear` gives.
    """
    if torch.compiler.is_compiling():
        compiled: Tensor = _frozen(x, *_parts(weight), bias)
        return compiled
    # Where nothing compiles, what torch wraps around the gradient of an operator costs more than some products.
    y: Tensor = _Frozen.apply(x, weight, bias)
    return y


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        # Not among the saved tensors: it is held anyway, and who recomputes activations has no need of this product.
        ctx.weight = weight
        return wna16_linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        dx = times_packed(dy.reshape(-1, dy.shape[-1]), ctx.weight)
        return dx.view(*dy.shape[:-1], dx.shape[-1]), None, None


def times_packed(dy: Tensor, weight: PackedWeight) -> Tensor:
    """`dy @ weight` for dy `[m, n]` in the dtype of the weight `[n, k]`; summed in float32."""
    product: Tensor = _times(dy, *_parts(weight), weight.shape[1])
    return product


def dequantize_columns(weight: PackedWeight, first: int, tiles: int) -> Tensor:
    """Columns of a packed weight `[n, k]`, with the bits of `QTensor.dequantize`.

    Args:
        first, tiles: in 64 columns each.

    Returns:
        `[n, 64 tiles]` or less, where k ends; in the dtype of the weight.
    """
    n, k = weight.shape
    columns = min(64 * tiles, k - 64 * first)
    if weight.device.type != "cuda":
        return unpack(weight).dequantize(weight.dtype)[:, 64 * first : 64 * first + columns]
    out = torch.empty(n, 64 * tiles, dtype=weight.dtype, device=weight.device)
    loads = blocks((n, TILE_ROWS)) * tiles * (2 if weight.bits == 8 else 1)
    group = weight.scheme.group_size
    _KERNELS[weight.dtype, weight.bits](
        blocks_in_stride(32 * loads, _BLOCK, weight.device),
        _BLOCK,
        codes=weight.codes,
        scales=weight.scales,
        zeros=weight.zeros,
        out=out,
        n=n,
        stride=blocks((k, TILE_COLUMNS)),
        first=first,
        tiles=tiles,
        groups=weight.scales.shape[1],
        group_shift=_WHOLE_ROW if group is None else group.bit_length() - 1,
        middle=weight.scheme.middle_code,
    )
    return out[:, :columns]


_Parts = tuple[Tensor, Tensor, Tensor | None, int, int, int]


def _parts(weight: PackedWeight) -> _Parts:
    return weight.codes, weight.scales, weight.zeros, weight.shape[0], weight.scheme.bits, weight.scheme.group_size or 0


def _packed(parts: _Parts, k: int) -> PackedWeight:
    codes, scales, zeros, n, bits, group = parts
    return PackedWeight(codes, scales, zeros, scheme_of(bits, group, zeros is None), (n, k))


def _forward(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, n: int, bits: int, group: int, bias: Tensor | None
) -> Tensor:
    return wna16_linear(x, _packed((codes, scales, zeros, n, bits, group), x.shape[-1]), bias)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, codes, scales, zeros, *ctx.numbers, _ = inputs
    ctx.columns = x.shape[-1]
    ctx.save_for_backward(codes, scales, zeros)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx = _times(dy.reshape(-1, dy.shape[-1]), *ctx.saved_tensors, *ctx.numbers, ctx.columns)
    return dx.view(*dy.shape[:-1], ctx.columns), *(None,) * 7


def _multiply(
    dy: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, n: int, bits: int, group: int, k: int
) -> Tensor:
    weight = _packed((codes, scales, zeros, n, bits, group), k)
    out = dy.new_empty(len(dy), k)
    at_once = max(1, BUFFER_BYTES // (2 * TILE_COLUMNS * n))
    tiles = blocks((k, TILE_COLUMNS))
    for first in range(0, tiles, at_once):
        columns = dequantize_columns(weight, first, min(at_once, tiles - first))
        start = TILE_COLUMNS * first
        torch.mm(dy, columns, out=out[:, start : start + columns.shape[1]])
    return out


_times = operator(
    "wna16_times(Tensor dy, Tensor codes, Tensor scales, Tensor? zeros, int n, int bits, int group, int k) -> Tensor",
    cuda=_multiply,
    reference=_multiply,
    fake=lambda dy, codes, scales, zeros, n, bits, group, k: dy.new_empty(dy.shape[0], k),
)
_frozen = operator(
    "wna16_frozen(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, int n, int bits, int group, Tensor? bias) "
    "-> Tensor",
    cuda=_forward,
    reference=_forward,
    fake=lambda x, codes, scales, zeros, n, *others: x.new_empty(*x.shape[:-1], n),
)
differentiable("wna16_frozen", setup=_setup, backward=_backward)
