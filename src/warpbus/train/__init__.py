"""Training: `dataset` makes packed rows of conversations, `pretrain` trains a decoder on them."""

from warpbus.train.pretrain import train
from warpbus.train.settings import TrainingSettings

__all__ = ["TrainingSettings", "train"]
