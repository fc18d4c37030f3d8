"""A decoder's weights under its family's own names."""

from collections.abc import Iterator

import torch
from torch import Tensor

from warpbus.models.decoder import Decoder
from warpbus.models.loading import part_rows, tensor_map


def named_tensors(model: Decoder, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint tensors of an unquantized model, on the CPU in `dtype`; fused ones are split again."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, sources in tensor_map(model.config).items():
        if name == "head.weight" and model.config.tie_embeddings:
            continue
        tensor = parameters[name].detach().to("cpu", dtype)
        if len(sources) == 1:
            yield sources[0], tensor
        else:
            rows = part_rows(model.config, name, len(sources), tensor.shape[0])
            yield from zip(sources, tensor.split(rows), strict=True)
