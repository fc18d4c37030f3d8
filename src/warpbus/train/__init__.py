"""Training a decoder: `job` starts a run, `run` is its course, `methods` says what is trained, and `dataset` on what.

See docs/training.md. The public names are loaded when they are first used: who tokenizes needs `dataset` alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warpbus.train.job import train
    from warpbus.train.run import TrainingProgress, TrainingStarted
    from warpbus.train.settings import TrainingSettings
    from warpbus.train.stopping import Stopped

__all__ = ["Stopped", "TrainingProgress", "TrainingSettings", "TrainingStarted", "train"]

# None has the name of a file of this room, which would hide it.
_FILES = {
    "TrainingStarted": "run",
    "TrainingProgress": "run",
    "Stopped": "stopping",
    "TrainingSettings": "settings",
    "train": "job",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'warpbus.train' has no attribute {name!r}")
    return getattr(importlib.import_module(f"warpbus.train.{_FILES[name]}"), name)
