"""Training: `dataset` makes packed rows of conversations, `pretrain` trains a decoder on them."""

from warpbus.train.pretrain import TrainingSettings, train

__all__ = ["TrainingSettings", "train"]
