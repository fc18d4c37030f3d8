"""Algorithms that quantize one matrix: pure functions of tensors, on any device."""

from warpbus.quantization.algorithms.factored import aim
from warpbus.quantization.algorithms.gptq import gptq
from warpbus.quantization.algorithms.rtn import rtn
from warpbus.quantization.algorithms.smoothquant import smoothing

__all__ = ["aim", "gptq", "rtn", "smoothing"]
