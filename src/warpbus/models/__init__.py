"""Models: what a decoder computes (`decoder`, `layers`), which models it is (`families`), and how it is loaded."""

from warpbus.models.config import ModelConfig, RopeConfig, RopeScaling
from warpbus.models.decoder import Decoder, DecoderLayer, PredictionLayer
from warpbus.models.families import Family, TensorMap
from warpbus.models.latent_spec import IndexerSpec, LatentAttentionSpec
from warpbus.models.layer_spec import AttentionSpec, Axis, LayerSpec, MatrixSpec, MLPSpec, MoESpec, NormSpec, RouterSpec
from warpbus.models.loading import (
    LayerLoader,
    Progress,
    check_loadable,
    load_layer,
    load_model,
    quantized_parameters,
    read_config,
)
from warpbus.models.parameter_source import tensor_map
from warpbus.models.random import random_model
from warpbus.models.shapes import SHAPES

__all__ = [
    "SHAPES",
    "AttentionSpec",
    "Axis",
    "Decoder",
    "DecoderLayer",
    "Family",
    "IndexerSpec",
    "LatentAttentionSpec",
    "LayerLoader",
    "LayerSpec",
    "MLPSpec",
    "MatrixSpec",
    "MoESpec",
    "ModelConfig",
    "NormSpec",
    "PredictionLayer",
    "Progress",
    "RopeConfig",
    "RopeScaling",
    "RouterSpec",
    "TensorMap",
    "check_loadable",
    "load_layer",
    "load_model",
    "quantized_parameters",
    "random_model",
    "read_config",
    "tensor_map",
]
