"""Models: what a decoder computes (`decoder`, `layers`), which models it is (`families`), and how it is loaded."""

from warpbus.models.config import ModelConfig, RopeConfig, RopeScaling
from warpbus.models.decoder import Decoder, DecoderLayer
from warpbus.models.families import Family, TensorMap
from warpbus.models.loading import LINEARS, Progress, load_layer, load_model, read_config, tensor_map

__all__ = [
    "LINEARS",
    "Decoder",
    "DecoderLayer",
    "Family",
    "ModelConfig",
    "Progress",
    "RopeConfig",
    "RopeScaling",
    "TensorMap",
    "load_layer",
    "load_model",
    "read_config",
    "tensor_map",
]
