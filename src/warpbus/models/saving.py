"""A decoder's weights under its family's own names."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from warpbus.models.decoder import Decoder
from warpbus.models.layer_spec import FLOAT32_PARAMETERS
from warpbus.models.loading import part_rows
from warpbus.models.parameter_source import tensor_map
from warpbus.models.row_order import in_file_order


def named_tensors(
    model: Decoder, dtype: torch.dtype, whole: Callable[[Tensor], Tensor] = lambda parameter: parameter
) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint tensors of an unquantized model, on the CPU in `dtype`; fused ones are split again.

    Args:
        whole: makes of a parameter that processes share the whole one.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, sources in tensor_map(model.config).items():
        if name == "head.weight" and model.config.tie_embeddings:
            continue
        stored = torch.float32 if name.endswith(FLOAT32_PARAMETERS) else dtype
        tensor = whole(parameters[name].detach()).to("cpu", stored)
        if len(sources) == 1:
            yield sources[0], in_file_order(model.config, name, tensor)
        else:
            rows = part_rows(model.config, name, len(sources), tensor.shape[0])
            yield from zip(sources, tensor.split(rows), strict=True)
