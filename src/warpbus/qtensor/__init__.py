"""Quantized matrices: a scheme and those of a model (`scheme`), packed integers (`packing`), `QTensor`."""

from warpbus.qtensor.packing import pack, packed_words, unpack
from warpbus.qtensor.qtensor import QTensor
from warpbus.qtensor.scheme import Scheme, Schemes

__all__ = ["QTensor", "Scheme", "Schemes", "pack", "packed_words", "unpack"]
