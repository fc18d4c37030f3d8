"""The operators: each checks its shapes and chooses an implementation by device."""

from warpbus.kernels.ops.wna16 import wna16_linear

__all__ = ["wna16_linear"]
