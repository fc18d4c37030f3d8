"""What a file's weights are, without reading them: the schemes of those that are quantized, and the dtype."""

import torch

from warpbus.errors import CheckpointError
from warpbus.formats import Checkpoint
from warpbus.formats.format import Format
from warpbus.models.config import ModelConfig
from warpbus.models.families import BY_NAME, TensorMap
from warpbus.qtensor import Scheme


def read_stored_schemes(checkpoint: Checkpoint, format: Format, tensors: TensorMap) -> dict[str, Scheme]:
    """The schemes of the parameters that a file holds quantized."""
    declared = format.read_schemes(checkpoint.config)
    schemes = {}
    for parameter, names in tensors.items():
        prefixes = [prefix_of(name) for name in names]
        kinds = [parameter.endswith(".weight") and format.is_quantized(checkpoint, prefix) for prefix in prefixes]
        if not any(kinds):
            continue
        if not all(kinds):
            raise CheckpointError(
                f"{checkpoint.directory}: {', '.join(names)}: some of these are quantized and some are not: "
                "expected all or none, since they are fused into one matrix"
            )
        found = [declared.of(prefix) for prefix in prefixes]
        scheme = found[0]
        if any(other != scheme for other in found):
            listed = ", ".join(f"{prefix} {other or 'none'}" for prefix, other in zip(prefixes, found, strict=True))
            raise CheckpointError(
                f"{checkpoint.directory}: config.json: schemes of {listed}: expected one scheme, since they are "
                "fused into one matrix"
            )
        if scheme is None:
            raise CheckpointError(
                f"{checkpoint.directory}: {names[0]}: is stored quantized, but no group of quantization_config in "
                "config.json covers it: add it to the targets of a group, or remove it from ignore"
            )
        schemes[parameter] = scheme
    return schemes


def dtype_of_weights(checkpoint: Checkpoint, config: ModelConfig) -> torch.dtype:
    """The dtype of the embedding; if it is quantized, that of its scales. Raises TensorError if it is missing."""
    (name,) = BY_NAME[config.family].tensors(config)["embedding.weight"]
    scales = f"{prefix_of(name)}.weight_scale"
    return checkpoint.dtype(scales if name not in checkpoint and scales in checkpoint else name)


def prefix_of(name: str) -> str:
    """The name of a matrix without `.weight`."""
    return name.removesuffix(".weight")
