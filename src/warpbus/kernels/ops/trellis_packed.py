"""`PackedTrellis`: a matrix whose weights are a trellis, in the order in which `trellis/decode.cu` reads it.

The words of a tile of 16 by 16 weights remain as they are stored (`qtensor.trellis`); each lane of a warp finds its own
states in them. They lie as `[rows / 16][blocks][2 units][8 * bits words][4 tiles]`, where a block has 128 columns and a
unit 64, so that a lane reads the same word of four neighbouring tiles with one load of 16 bytes. Columns up to a
multiple of 128 have words of zeros, and are multiplied by zeros.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.errors import TensorError
from warpbus.kernels.ops.arguments import blocks
from warpbus.qtensor import QTensor, Scheme
from warpbus.qtensor.trellis import TILE, column_signs

BLOCK = 128
_TILES = 4  # whose words alternate


@dataclass(frozen=True)
class PackedTrellis:
    """A matrix `[n, k]` for the kernels `trellis`.

    Attributes:
        codes: int32, flat; see the module.
        scales: float32 `[n]`.
        signs: uint8 `[k / 8]`: bit i of byte j is set where the rotation negates column 8 j + i.
        scheme: of the `QTensor` that it was made from.
        shape: `(n, k)`.
        dtype: of the activations that it is multiplied with, float16 or bfloat16.
    """

    codes: Tensor
    scales: Tensor
    signs: Tensor
    scheme: Scheme
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, the scales and the signs together."""
        return self.codes.nbytes + self.scales.nbytes + self.signs.nbytes

    def to(self, device: torch.device | str) -> "PackedTrellis":
        """The same on another device."""
        codes, scales, signs = (part.to(device) for part in (self.codes, self.scales, self.signs))
        return replace(self, codes=codes, scales=scales, signs=signs)

    def unpack(self) -> QTensor:
        """The matrix that was packed: the same words, the scales in float32."""
        n, k = self.shape
        words = 8 * self.scheme.bits  # of a tile
        tiles = self.codes.view(n // TILE, -1, words, _TILES).transpose(2, 3).reshape(n // TILE, -1, words)
        stored = tiles[:, : k // TILE].reshape(n, k * self.scheme.bits // 32)
        return QTensor(self.scheme, stored, self.scales.view(-1, 1), None, (n, k))


def packed_trellis_words(scheme: Scheme, n: int, k: int) -> int:
    """The number of int32 words of the codes of a matrix `[n, k]`."""
    return n * blocks((k, BLOCK)) * BLOCK * scheme.bits // 32


def pack_trellis(weight: QTensor, dtype: torch.dtype) -> PackedTrellis:
    """Reorder a matrix, on the device where it is.

    Args:
        dtype: of the activations.

    Raises:
        TensorError: its scheme is not a trellis.
    """
    if not weight.scheme.is_trellis:
        raise TensorError(f"pack_trellis: the weight is {weight.scheme}, expected w3a16-trellis or w2a16-trellis")
    n, k = weight.shape
    words = 8 * weight.scheme.bits  # of a tile
    tiles = weight.qweight.view(n // TILE, k // TILE, words)
    tiles = F.pad(tiles, (0, 0, 0, -k % BLOCK // TILE))
    codes = tiles.view(n // TILE, -1, _TILES, words).transpose(2, 3).contiguous().view(-1)
    signs = packed_signs(k, weight.device)
    return PackedTrellis(codes, weight.scales.float().view(-1), signs, weight.scheme, (n, k), dtype)


def packed_signs(k: int, device: torch.device) -> Tensor:
    """The signs of k columns as `PackedTrellis` has them."""
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    negated = (column_signs(k, device) < 0).to(torch.uint8).view(-1, 8)
    return (negated << shifts).sum(1, dtype=torch.uint8)
