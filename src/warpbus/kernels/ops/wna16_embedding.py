"""`wna16_embedding`: rows of a quantized matrix, looked up and dequantized.

Codes lie as the products take them (`packed`), so that a head that is tied to the embedding has the same matrix.
"""

import torch
from torch import Tensor

from warpbus.cuda.parameters import Parameters
from warpbus.errors import TensorError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, blocks, blocks_in_stride, check_device
from warpbus.kernels.ops.packed import STORED_BITS, TILE_COLUMNS, PackedWeight, check_weight_only, scheme_of, unpack
from warpbus.kernels.reference.wna16 import wna16_embedding as reference_embedding
from warpbus.kernels.units import unit
from warpbus.qtensor import QTensor

_PARAMETERS = Parameters(
    "const long long* tokens, const uint32* codes, const ELEMENT* scales, const ELEMENT* zeros, ELEMENT* out, "
    "int count, int n, int k, int groups, int group_shift, int middle"
)
_BLOCK = 128  # kBlock in wna16/embedding.cu
_WHOLE_ROW = 31  # a shift that leaves nothing of a column's number: one group a row

_KERNELS = {
    (dtype, bits): unit("wna16/embedding.cu", ELEMENT=ELEMENTS[dtype], BITS=bits).kernel("wna16_embedding", _PARAMETERS)
    for dtype in HALVES
    for bits in STORED_BITS
}


def wna16_embedding(tokens: Tensor, weight: PackedWeight | QTensor, dtype: torch.dtype) -> Tensor:
    """The rows of a matrix with these numbers, with the bits of `QTensor.dequantize`, on every device.

    Args:
        tokens: int64 of any shape, from 0 to n - 1. On a GPU another number ends the program, as in torch's embedding.
        weight: `[n, k]`, on the device of the tokens.
        dtype: of the result; with a `PackedWeight` its own, float16 or bfloat16.

    Returns:
        `[..., k]`.

    Raises:
        TensorError: tokens of another dtype or device, a weight without codes, or another dtype than that of a packed
            weight.
    """
    check_weight_only("wna16_embedding", weight.scheme)
    if tokens.dtype != torch.int64:
        raise TensorError(f"wna16_embedding: tokens are {tokens.dtype}, expected torch.int64: convert them with .to()")
    check_device("wna16_embedding", weight.scales, tokens=tokens)
    k = weight.shape[1]
    if isinstance(weight, QTensor):
        return reference_embedding(tokens, weight, dtype)
    if dtype != weight.dtype:
        raise TensorError(f"wna16_embedding: dtype is {dtype}, expected {weight.dtype}, the dtype of the packed weight")
    group = weight.scheme.group_size or 0
    rows: Tensor = _embedding(
        tokens.reshape(-1), weight.codes, weight.scales, weight.zeros, *weight.shape, weight.scheme.bits, group
    )
    return rows.view(*tokens.shape, k)


def _launch(
    tokens: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, n: int, k: int, bits: int, group: int
) -> Tensor:
    weight = _packed(codes, scales, zeros, n, k, bits, group)
    out = scales.new_empty(len(tokens), k)
    if not len(tokens):
        return out
    threads = len(tokens) * blocks((k, TILE_COLUMNS)) * (8 if weight.bits == 8 else 4)
    _KERNELS[weight.dtype, weight.bits](
        blocks_in_stride(threads, _BLOCK, tokens.device),
        _BLOCK,
        tokens=tokens.contiguous(),
        codes=codes,
        scales=scales,
        zeros=zeros,
        out=out,
        count=len(tokens),
        n=n,
        k=k,
        groups=scales.shape[1],
        group_shift=group.bit_length() - 1 if group else _WHOLE_ROW,
        middle=weight.scheme.middle_code,
    )
    return out


def _reference(
    tokens: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, n: int, k: int, bits: int, group: int
) -> Tensor:
    return reference_embedding(tokens, unpack(_packed(codes, scales, zeros, n, k, bits, group)), scales.dtype)


def _packed(codes: Tensor, scales: Tensor, zeros: Tensor | None, n: int, k: int, bits: int, group: int) -> PackedWeight:
    return PackedWeight(codes, scales, zeros, scheme_of(bits, group, zeros is None), (n, k))


_embedding = operator(
    "wna16_embedding(Tensor tokens, Tensor codes, Tensor scales, Tensor? zeros, int n, int k, int bits, int group) "
    "-> Tensor",
    cuda=_launch,
    reference=_reference,
    fake=lambda tokens, codes, scales, zeros, n, k, bits, group: scales.new_empty(tokens.shape[0], k),
)
