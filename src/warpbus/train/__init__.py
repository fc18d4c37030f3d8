"""Training a decoder: `job` starts a run, `run` is its course, `methods` says what is trained, and `dataset` on what.

See docs/training.md.
"""

from warpbus.train.job import train
from warpbus.train.run import Begun, Progress
from warpbus.train.settings import TrainingSettings
from warpbus.train.stopping import Stopped

__all__ = ["Begun", "Progress", "Stopped", "TrainingSettings", "train"]
