"""Bytes on disk and named tensors: model directories (`checkpoint`, `writer`) and quantized layers in them."""

from warpbus.formats.checkpoint import Checkpoint
from warpbus.formats.compressed_tensors import (
    from_tensors,
    is_quantized,
    quantization_config,
    read_scheme,
    to_tensors,
)
from warpbus.formats.writer import CheckpointWriter

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "from_tensors",
    "is_quantized",
    "quantization_config",
    "read_scheme",
    "to_tensors",
]
