"""File formats: reading and writing model directories (`checkpoint`, `writer`) and the quantized layers in them."""

from warpbus.formats.checkpoint import Checkpoint
from warpbus.formats.compressed_tensors import (
    from_tensors,
    is_quantized,
    quantization_config,
    to_tensors,
)
from warpbus.formats.format import Format, WritableFormat, format_named, format_of, read_schemes
from warpbus.formats.parts import FinishedParts
from warpbus.formats.resumable_checkpoint import ResumableCheckpoint, discard_parts
from warpbus.formats.writer import CheckpointWriter

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "FinishedParts",
    "Format",
    "ResumableCheckpoint",
    "WritableFormat",
    "discard_parts",
    "format_named",
    "format_of",
    "from_tensors",
    "is_quantized",
    "quantization_config",
    "read_schemes",
    "to_tensors",
]
