"""Training a decoder: `job` starts a run, `run` is its course, `methods` says what is trained, and `dataset` on what.

See docs/training.md. The public names are loaded when they are first used: who tokenizes needs `dataset` alone.
"""

from typing import TYPE_CHECKING

from warpbus.lazy import lazy_names

if TYPE_CHECKING:
    from warpbus.train.job import train
    from warpbus.train.run import TrainingProgress, TrainingStarted
    from warpbus.train.settings import TrainingSettings
    from warpbus.train.stopping import Stopped

__all__ = ["Stopped", "TrainingProgress", "TrainingSettings", "TrainingStarted", "train"]

__getattr__ = lazy_names(
    __name__,
    run=("TrainingStarted", "TrainingProgress"),
    stopping=("Stopped",),
    settings=("TrainingSettings",),
    job=("train",),
)
