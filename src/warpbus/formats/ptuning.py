"""Prefixes of P-Tuning v2 (Liu et al. 2021, arXiv:2110.07602) as the ChatGLM repositories save them.

A directory like a model's, whose config.json has `pre_seq_len`, the number P of tokens, and whose weights hold

    transformer.prefix_encoder.embedding.weight     [P, layers * 2 * kv_heads * head_dim]

Column `((2 l + s) * kv_heads + h) * head_dim + d` is element d of head h in layer l, of the keys for s = 0 and of the
values for s = 1. With `prefix_projection` the embedding is an input instead, of a network that gives these columns:

    transformer.prefix_encoder.trans.0.{weight,bias}    [m, n], [m]         then tanh
    transformer.prefix_encoder.trans.2.{weight,bias}    [columns, m], [columns]

The directory may be that of a whole model: other tensors are left alone.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import CheckpointError, TensorError
from warpbus.formats.checkpoint import Checkpoint
from warpbus.formats.writer import CheckpointWriter

MAX_TOKENS = 8192

_ENCODER = "transformer.prefix_encoder."
_EMBEDDING = "embedding.weight"
_FIRST, _SECOND = "trans.0", "trans.2"
_MAX_INNER = 2**20
_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_prefix(directory: Path) -> bool:
    """Whether a directory holds a model or a part of one with a prefix. Raises CheckpointError for a damaged file."""
    config = Checkpoint.of_tensors(directory, {}).load_json("config.json")
    return config is not None and config.get("pre_seq_len") is not None


def read_prefix(directory: Path, columns: int) -> Tensor:
    """Read a prefix, its projection computed.

    Args:
        directory: where it is.
        columns: `layers * 2 * kv_heads * head_dim` of the model that it is for.

    Returns:
        float32 `[P, columns]` on the CPU.

    Raises:
        CheckpointError: if a file is missing, damaged or not understood.
        TensorError: if a tensor is missing, has the wrong shape or type, or a value that is no finite number.
    """
    checkpoint = Checkpoint(directory)
    tokens = checkpoint.config.get("pre_seq_len")
    if type(tokens) is not int or not 1 <= tokens <= MAX_TOKENS:
        raise CheckpointError(
            f"{directory}: config.json: pre_seq_len: expected an integer from 1 to {MAX_TOKENS}, found {tokens!a:.80}"
        )
    start = _ENCODER if f"{_ENCODER}{_EMBEDDING}" in checkpoint else _ENCODER.partition(".")[2]
    encoder = _PrefixEncoder(checkpoint, start)
    projected = f"{start}{_FIRST}.weight" in checkpoint
    declared = checkpoint.config.get("prefix_projection") or False
    if declared is not projected:
        raise CheckpointError(
            f"{directory}: config.json: prefix_projection is {declared!a:.80}, and there is "
            f"{'a' if projected else 'no'} tensor {start}{_FIRST}.weight: check that config.json belongs to the weights"
        )
    if not projected:
        return encoder.tensor(_EMBEDDING, tokens, columns)
    width, inner = encoder.columns(_EMBEDDING), encoder.columns(f"{_SECOND}.weight")
    embedding = encoder.tensor(_EMBEDDING, tokens, width)
    hidden = encoder.linear(_FIRST, inner, embedding).tanh_()
    return encoder.linear(_SECOND, columns, hidden)


def write_prefix(directory: Path, rows: Tensor, config: Mapping[str, Any], *, overwrite: bool = False) -> None:
    """Write a prefix without projection, which is there complete or not at all.

    Args:
        directory: a new one.
        rows: `[P, columns]`, see `read_prefix`.
        config: the entries of config.json besides `pre_seq_len` and `prefix_projection`.
        overwrite: replace one that is there.

    Raises:
        StorageError: if the directory exists or cannot be written.
    """
    with CheckpointWriter(directory, overwrite=overwrite, expected_bytes=rows.nbytes) as writer:
        writer.add(f"{_ENCODER}{_EMBEDDING}", rows)
        writer.write_json("config.json", dict(config) | {"pre_seq_len": rows.shape[0], "prefix_projection": False})
        writer.finish()


class _PrefixEncoder:
    """The tensors of a prefix encoder, each checked before it is read."""

    def __init__(self, checkpoint: Checkpoint, start: str) -> None:
        self.checkpoint = checkpoint
        self.start = start

    def columns(self, name: str) -> int:
        shape = self.checkpoint.shape(f"{self.start}{name}")
        if len(shape) != 2 or not 1 <= shape[1] <= _MAX_INNER:
            raise self.wrong(name, f"a matrix of 1 to {_MAX_INNER} columns", list(shape))
        return shape[1]

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape, in float32."""
        found, dtype = self.checkpoint.shape(f"{self.start}{name}"), self.checkpoint.dtype(f"{self.start}{name}")
        if found != shape:
            raise self.wrong(name, f"shape {list(shape)}, as pre_seq_len and the model have it", list(found))
        if dtype not in _FLOATING:
            raise self.wrong(name, "floating point of 16 to 64 bits", dtype)
        tensor = self.checkpoint.tensor(f"{self.start}{name}").to(torch.float32)
        if not bool(tensor.isfinite().all()):
            raise self.wrong(name, "finite numbers", "NaN or infinity")
        return tensor

    def linear(self, name: str, out: int, x: Tensor) -> Tensor:
        weight, bias = self.tensor(f"{name}.weight", out, x.shape[1]), self.tensor(f"{name}.bias", out)
        return torch.addmm(bias, x, weight.T)

    def wrong(self, name: str, expected: str, found: object) -> TensorError:
        return TensorError(
            f"{self.checkpoint.directory}: {self.start}{name}: expected {expected}, found {found}: "
            "use a prefix that was trained for this model"
        )
