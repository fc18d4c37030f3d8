"""The rows of a fused projection in the file and in the decoder.

The decoder has all queries, then all keys, then all values. ChatGLM-6B's files have for each head its queries, keys and
values together. Rows do not depend on each other in any format, so whole heads of a matrix move, quantized or not.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from warpbus.models.config import ModelConfig
from warpbus.models.families import BY_NAME
from warpbus.models.parallel import Lines, Span
from warpbus.qtensor import QTensor

Rows = TypeVar("Rows", Tensor, QTensor)

_PARTS = 3  # queries, keys, values: as many heads of each


def in_decoder_order(config: ModelConfig, parameter: str, value: Rows) -> Rows:
    """What a file has for a parameter, its rows where the decoder has them.

    Args:
        config: of the whole model.
        parameter: of the decoder, with or without `layers.N.`; of other parameters than the fused projection's the rows
            stay where they are.
        value: `[rows]`, or `[rows, any]`.
    """
    if not _by_head(config, parameter):
        return value
    return _moved(value, config.attention.head_dim, [head * _PARTS + part for part, head in _places(config)])


def in_file_order(config: ModelConfig, parameter: str, value: Rows) -> Rows:
    """A parameter of the decoder, its rows where the file has them; arguments as of `in_decoder_order`."""
    if not _by_head(config, parameter):
        return value
    order = sorted(_places(config), key=lambda place: (place[1], place[0]))
    heads = config.attention.num_heads
    return _moved(value, config.attention.head_dim, [part * heads + head for part, head in order])


def lines_in_file(config: ModelConfig, parameter: str, lines: Lines) -> Lines:
    """Where the file has these rows of a parameter, which are whole heads where its rows are by heads."""
    if not _by_head(config, parameter):
        return lines
    dim, found = config.attention.head_dim, []
    for span in lines:
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
    """Part and head of each block of rows, in the order of the decoder."""
    return [(part, head) for part in range(_PARTS) for head in range(config.attention.num_heads)]


def _moved(value: Rows, height: int, order: Sequence[int]) -> Rows:
    """The blocks of `height` rows in another order."""
    if isinstance(value, QTensor):
        return QTensor.concatenate([value.rows(block * height, (block + 1) * height) for block in order])
    blocks = value.unflatten(0, (-1, height))
    return blocks[torch.tensor(order, device=value.device)].flatten(0, 1)
