"""Algorithms that quantize one matrix: pure functions of tensors, on any device."""

from warpbus.quantization.algorithms.factored import corrected_target
from warpbus.quantization.algorithms.gptq import gptq
from warpbus.quantization.algorithms.rtn import rtn
from warpbus.quantization.algorithms.smoothquant import smoothing

__all__ = ["corrected_target", "gptq", "rtn", "smoothing"]
