"""Quantization of checkpoints: algorithms on one matrix, calibration on text, and the driver that does a model.

The public names are loaded when they are first used: the processes of a run start with `job`, and need no tokenizer.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warpbus.quantization.algorithms import gptq, rtn
    from warpbus.quantization.calibration import Calibration
    from warpbus.quantization.driver import ALGORITHMS, Progress, quantize
    from warpbus.quantization.estimate import QuantizationEstimate
    from warpbus.quantization.report import LayerResult, Report
    from warpbus.quantization.texts import read_calibration

__all__ = [
    "ALGORITHMS",
    "Calibration",
    "LayerResult",
    "Progress",
    "QuantizationEstimate",
    "Report",
    "gptq",
    "quantize",
    "read_calibration",
    "rtn",
]

# None has the name of a file of this room, which would hide it.
_FILES = {
    "ALGORITHMS": "driver",
    "Calibration": "calibration",
    "QuantizationEstimate": "estimate",
    "LayerResult": "report",
    "Progress": "driver",
    "Report": "report",
    "gptq": "algorithms",
    "quantize": "driver",
    "read_calibration": "texts",
    "rtn": "algorithms",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'warpbus.quantization' has no attribute {name!r}")
    return getattr(importlib.import_module(f"warpbus.quantization.{_FILES[name]}"), name)
