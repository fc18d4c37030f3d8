"""Warpbus: quantize, run and serve GLM-family language models, and share the GPUs they run on.

    report = warpbus.quantize("glm-4-9b-chat", "glm-4-9b-chat-w4", calibration="texts.jsonl")
    llm = warpbus.LLM("glm-4-9b-chat-w4")
    gpu = warpbus.pool.connect("warpbuss://gpu-host:7700", memory="8GB", share=0.25)

The public names are loaded when they are first used: `import warpbus` alone imports no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from warpbus.errors import WarpbusError

if TYPE_CHECKING:
    from warpbus import pool
    from warpbus.engine import LLM, Completion, SamplingParams
    from warpbus.quantization import quantize

__version__ = "0.1.0"

__all__ = ["LLM", "Completion", "SamplingParams", "WarpbusError", "pool", "quantize"]

_ROOMS = {
    "LLM": "warpbus.engine",
    "Completion": "warpbus.engine",
    "SamplingParams": "warpbus.engine",
    "quantize": "warpbus.quantization",
}


def __getattr__(name: str) -> Any:
    if name == "pool":
        return importlib.import_module("warpbus.pool")
    if name not in _ROOMS:
        raise AttributeError(f"module 'warpbus' has no attribute {name!r}")
    return getattr(importlib.import_module(_ROOMS[name]), name)
