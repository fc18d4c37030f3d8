"""Checkpoints whose matrices no kernel computes with, read as unquantized ones: FP8, FP4 and trellises."""

import torch

from warpbus.formats import fp8
from warpbus.formats.checkpoint import Checkpoint
from warpbus.formats.fp4 import Fp4Matrix, dequantized_fp4
from warpbus.formats.trellis import TrellisMatrix, dequantized_trellis


def dequantized(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> Checkpoint:
    """A checkpoint in FP8 or FP4, or of trellises, as an unquantized one: each matrix is dequantized when it is read.

    Args:
        checkpoint: any; returned unchanged if it is none of these.
        dtype: of the dequantized matrices; by default the one that `config.json` declares, else bfloat16.

    Raises:
        CheckpointError: this kind of quantization is not supported.
        TensorError: a part of a matrix is missing, or has the wrong shape or dtype.
    """
    dtype = fp8.declared_dtype(checkpoint.config) if dtype is None else dtype
    return dequantized_trellis(dequantized_fp4(fp8.dequantized(checkpoint, dtype), dtype), dtype)


def dequantized_matrices(checkpoint: Checkpoint) -> list[str]:
    """The names of the matrices of an FP8, FP4, trellis or GGUF checkpoint that are dequantized when they are read."""
    if checkpoint.from_gguf:
        return checkpoint.dequantized_blocks
    found = dequantized(checkpoint)
    quantized = [name for name in found.names() if isinstance(found.stored(name), Fp4Matrix | TrellisMatrix)]
    return quantized or fp8.fp8_matrices(checkpoint)
