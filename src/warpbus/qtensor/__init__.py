"""Quantized matrices: a scheme (`scheme`), those of a model (`schemes`), packed integers (`packing`), `QTensor`."""

from warpbus.qtensor.packing import pack, packed_words, unpack
from warpbus.qtensor.qtensor import QTensor
from warpbus.qtensor.scheme import Scheme
from warpbus.qtensor.schemes import Schemes

__all__ = ["QTensor", "Scheme", "Schemes", "pack", "packed_words", "unpack"]
