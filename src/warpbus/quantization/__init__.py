"""Quantization of checkpoints: algorithms on one matrix, calibration on text, and the driver that does a model.

The public names are loaded when they are first used: the processes of a run start with `job`, and need no tokenizer.
"""

from typing import TYPE_CHECKING

from warpbus.lazy import lazy_names

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

__getattr__ = lazy_names(
    __name__,
    driver=("ALGORITHMS", "Progress", "quantize"),
    calibration=("Calibration",),
    estimate=("QuantizationEstimate",),
    report=("LayerResult", "Report"),
    algorithms=("gptq", "rtn"),
    texts=("read_calibration",),
)
