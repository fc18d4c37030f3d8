"""Quantized matrices: what a scheme is (`scheme`), how integers are packed (`packing`), the matrix (`qtensor`)."""

from warpbus.qtensor.packing import pack, packed_words, unpack
from warpbus.qtensor.qtensor import QTensor
from warpbus.qtensor.scheme import Scheme

__all__ = ["QTensor", "Scheme", "pack", "packed_words", "unpack"]
