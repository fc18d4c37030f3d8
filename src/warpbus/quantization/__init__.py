"""Quantization of checkpoints: algorithms on one matrix, calibration on text, and the driver that does a model."""

from warpbus.quantization.algorithms import gptq, rtn
from warpbus.quantization.calibration import Calibration, read_calibration
from warpbus.quantization.driver import ALGORITHMS, Progress, quantize
from warpbus.quantization.estimate import Estimate, estimate
from warpbus.quantization.report import LayerResult, Report

__all__ = [
    "ALGORITHMS",
    "Calibration",
    "Estimate",
    "LayerResult",
    "Progress",
    "Report",
    "estimate",
    "gptq",
    "quantize",
    "read_calibration",
    "rtn",
]
