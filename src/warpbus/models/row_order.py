"""Row order of a fused qkv projection: in the file and in the decoder.

The decoder stores all queries, then all keys, then all values. ChatGLM-6B's files interleave them by head: query, key
and value of head 0, then of head 1, and so on. Rows are independent in every quantized format, so that whole heads can
be moved, quantized or not.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from warpbus.models.config import ModelConfig
from warpbus.models.families import BY_NAME
from warpbus.models.parallel import Span, Spans
from warpbus.qtensor import QTensor

Rows = TypeVar("Rows", Tensor, QTensor)

_PARTS = 3  # queries, keys, values: as many heads of each


def in_decoder_order(config: ModelConfig, parameter: str, value: Rows) -> Rows:
    """Reorder a parameter from the file's row order to the decoder's.

    Args:
        config: of the whole model.
        parameter: of the decoder, with or without `layers.N.`. Parameters other than the fused projection's are
            returned unchanged.
        value: `[rows]`, or `[rows, any]`.
    """
    if not _by_head(config, parameter):
        return value
    return _moved(value, config.attention.head_dim, [head * _PARTS + part for part, head in _places(config)])


def in_file_order(config: ModelConfig, parameter: str, value: Rows) -> Rows:
    """Reorder a parameter from the decoder's row order to the file's; arguments as `in_decoder_order`."""
    if not _by_head(config, parameter):
        return value
    order = sorted(_places(config), key=lambda place: (place[1], place[0]))
    heads = config.attention.num_heads
    return _moved(value, config.attention.head_dim, [part * heads + head for part, head in order])


def spans_in_file(config: ModelConfig, parameter: str, spans: Spans) -> Spans:
    """The rows of the file that hold these rows of a parameter; of a fused projection they have to be whole heads."""
    if not _by_head(config, parameter):
        return spans
    dim, found = config.attention.head_dim, []
    for span in spans:
        for start in range(span.start, span.stop, dim):
            part, head = divmod(start // dim, config.attention.num_heads)
            first = (head * _PARTS + part) * dim
            found.append(Span(first, first + dim))
        if span.zeros:
            found.append(Span(0, 0, span.zeros))
    return tuple(found)


def _by_head(config: ModelConfig, parameter: str) -> bool:
    if not BY_NAME[config.family].qkv_by_head:
        return False
    fused = (
        matrix.name for matrix in config.layers[0].matrices if any(axis.name == "kv_heads" for axis in matrix.rows)
    )
    return any(f".{name}." in f".{parameter}" for name in fused)


def _places(config: ModelConfig) -> list[tuple[int, int]]:
    """Part (0 query, 1 key, 2 value) and head of each block of rows, in the decoder's order."""
    return [(part, head) for part in range(_PARTS) for head in range(config.attention.num_heads)]


def _moved(value: Rows, height: int, order: Sequence[int]) -> Rows:
    """Permute blocks of `height` rows."""
    if isinstance(value, QTensor):
        return QTensor.concatenate([value.rows(block * height, (block + 1) * height) for block in order])
    blocks = value.unflatten(0, (-1, height))
    return blocks[torch.tensor(order, device=value.device)].flatten(0, 1)
