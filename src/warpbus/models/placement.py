"""Moves quantized matrices to a device and packs them for its kernels, a few rows at a time to keep memory low."""

from collections.abc import Iterator

import torch
from torch import Tensor

from warpbus.kernels.ops.arguments import HALVES, gpu_has_kernels
from warpbus.kernels.ops.packed import TILE_ROWS, PackedWeight, pack, packed_shapes
from warpbus.kernels.ops.rounding import round_to_nearest
from warpbus.kernels.ops.trellis_packed import PackedTrellis, pack_trellis
from warpbus.qtensor import QTensor, Scheme

_ELEMENTS = 2**22  # per chunk: packing needs about ten bytes per element


def place(weight: QTensor, device: torch.device | str, dtype: torch.dtype) -> QTensor | PackedWeight | PackedTrellis:
    """Move a quantized matrix from the CPU to a device, packed if the device's kernels need that.

    Args:
        dtype: of the activations that it will be multiplied with.
    """
    device = torch.device(device)
    if not _packs(weight.scheme, device, dtype):
        return weight.to(device)
    if weight.scheme.is_trellis:
        return pack_trellis(weight.to(device), dtype)
    pieces = (pack(weight.rows(start, stop).to(device), dtype) for start, stop in _spans(*weight.shape))
    return _joined(pieces, weight.scheme, weight.shape)


def round_onto(
    weight: Tensor, scheme: Scheme, device: torch.device | str, dtype: torch.dtype
) -> QTensor | PackedWeight:
    """Move a matrix `[out, in]` from the CPU to a device and round it to nearest there, as `rtn` does; see `place`."""
    device = torch.device(device)
    if not _packs(scheme, device, dtype):
        return round_to_nearest(weight.to(device), scheme, scale_dtype=dtype)
    pieces = (
        pack(round_to_nearest(weight[start:stop].to(device), scheme, scale_dtype=dtype), dtype)
        for start, stop in _spans(*weight.shape)
    )
    return _joined(pieces, scheme, (weight.shape[0], weight.shape[1]))


def keeps_trellises(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether a device has kernels for trellises; others hold them dequantized.

    Args:
        dtype: of the activations.
    """
    return dtype in HALVES and gpu_has_kernels(torch.device(device))


def _packs(scheme: Scheme, device: torch.device, dtype: torch.dtype) -> bool:
    return scheme.activations is None and dtype in HALVES and gpu_has_kernels(device)


def _spans(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows, in whole tiles, of about `_ELEMENTS` elements each."""
    height = max(1, _ELEMENTS // (columns * TILE_ROWS)) * TILE_ROWS
    return ((start, min(start + height, rows)) for start in range(0, rows, height))


def _joined(pieces: Iterator[PackedWeight], scheme: Scheme, shape: tuple[int, int]) -> PackedWeight:
    """Concatenate packed chunks, each of whole tiles, along the rows."""
    first = next(pieces)
    words, tiles = packed_shapes(scheme, *shape)
    whole = PackedWeight(
        first.codes.new_empty(words),
        first.scales.new_empty(tiles),
        None if first.zeros is None else first.zeros.new_empty(tiles),
        scheme,
        shape,
    )
    word = tile = 0
    piece: PackedWeight | None = first
    while piece is not None:
        height = len(piece.scales)
        whole.codes[word : word + len(piece.codes)] = piece.codes
        whole.scales[tile : tile + height] = piece.scales
        if whole.zeros is not None and piece.zeros is not None:
            whole.zeros[tile : tile + height] = piece.zeros
        word, tile, piece = word + len(piece.codes), tile + height, next(pieces, None)
    return whole
