"""Checkpoints whose matrices no kernel of a device computes with, read as unquantized ones.

They are in FP8 or FP4, trellises where there are no kernels for them, or have reordered columns.

A matrix is reordered if its columns were quantized in the order of their activations: `desc_act` of GPTQ, actorder
`group` of compressed-tensors.

    prefix.g_idx or prefix.weight_g_idx  int32 [in]  the group of each column

The columns of a group lie apart, and each matrix has its own order. It is dequantized exactly but for one rounding, and
takes the memory of an unquantized one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import TensorError
from warpbus.formats import fp8, trellis
from warpbus.formats.checkpoint import Checkpoint
from warpbus.formats.format import Format
from warpbus.formats.fp4 import Fp4Matrix, dequantized_fp4, fp4_storage
from warpbus.formats.stored import ComputedTensor, StoredTensor, row_bands
from warpbus.formats.trellis import TrellisMatrix, dequantized_trellis
from warpbus.qtensor import Scheme


def dequantized(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> Checkpoint:
    """A checkpoint in FP8 or FP4, or of trellises, as an unquantized one: each matrix is dequantized when it is read.

    Args:
        checkpoint: any; returned unchanged if it is none of these.
        dtype: of the dequantized matrices; by default the one that `config.json` declares, else bfloat16.

    Raises:
        CheckpointError: this kind of quantization is not supported.
        TensorError: a part of a matrix is missing, or has the wrong shape or dtype.
    """
    dtype = fp8.declared_dtype(checkpoint.config) if dtype is None else dtype
    return dequantized_trellis(dequantized_fp4(fp8.dequantized(checkpoint, dtype), dtype), dtype)


def dequantized_matrices(checkpoint: Checkpoint) -> list[str]:
    """The names of the matrices of an FP8, FP4, trellis or GGUF checkpoint that are dequantized when they are read."""
    if checkpoint.from_gguf:
        return checkpoint.dequantized_blocks
    found = dequantized(checkpoint)
    quantized = [name for name in found.names() if isinstance(found.stored(name), Fp4Matrix | TrellisMatrix)]
    return quantized or fp8.fp8_matrices(checkpoint)


_GROUPS = {".g_idx": (".scales", 1), ".weight_g_idx": (".weight_scale", 0)}
"""The suffixes of the groups of columns, each with those of the scales, and which of their axes are the rows."""


def dequantized_schemes(config: Mapping[str, Any]) -> str | None:
    """The format of a file that `dequantized` dequantizes, such as "w4a16-nvfp4" or "fp8"; None for other files.

    Args:
        config: its `config.json`.

    Raises:
        CheckpointError: this kind of quantization is not supported.
    """
    config = dict(config)
    if trellis.detect(config):
        return str(trellis.read_schemes(config))
    fp4 = fp4_storage(config)
    if fp4 is not None:
        return f"w4a16-{fp4.element}"
    storage = fp8.fp8_storage(config)
    return "fp8" if storage is not None and not storage.is_scheme else None


def dequantized_reordered(checkpoint: Checkpoint, format: Format, dtype: torch.dtype) -> Checkpoint:
    """The checkpoint with `P.weight` in place of the tensors of each matrix P whose columns were reordered.

    Whole groups in any order are not such a matrix in GPTQ, whose reader puts them in order. Only the groups of columns
    are read.

    Args:
        format: of the checkpoint.
        dtype: of the dequantized matrices.

    Raises:
        TensorError: the groups of columns have a wrong shape or dtype, or name groups that do not exist.
        CheckpointError: the quantization is not supported.
    """
    part = next((part for part in format.parts if part in _GROUPS), None)
    names = [] if part is None else [name for name in checkpoint.names() if name.endswith(part)]
    if part is None or not names:
        return checkpoint
    schemes = format.read_schemes(checkpoint.config)
    tensors = {name: checkpoint.stored(name) for name in checkpoint.names()}
    plain = {name: stored for name, stored in tensors.items() if name not in names}
    unordered = Checkpoint.of_tensors(checkpoint.directory, plain, checkpoint.config)
    for name in names:
        prefix = name.removesuffix(part)
        scheme = schemes.of(prefix)
        scales, axis = _GROUPS[part]
        if scheme is None or prefix + scales not in unordered or len(unordered.shape(prefix + scales)) != 2:
            continue
        groups = _column_groups(checkpoint, name, scheme)
        if torch.equal(groups, torch.arange(len(groups)) // (len(groups) // scheme.groups(len(groups)))):
            if part == ".weight_g_idx":
                tensors.pop(name)
            continue
        if part == ".g_idx" and _is_by_group(groups, scheme):
            continue
        shape = unordered.shape(prefix + scales)[axis], len(groups)
        matrix: StoredTensor = ReorderedMatrix(shape, dtype, unordered, format, prefix, scheme, groups)
        for stored in format.stored(checkpoint, prefix):
            tensors.pop(stored)
        tensors[f"{prefix}.weight"] = matrix
    return Checkpoint.of_tensors(checkpoint.directory, tensors, checkpoint.config)


def _column_groups(checkpoint: Checkpoint, name: str, scheme: Scheme) -> Tensor:
    """The group of each column, int64 `[in]`."""
    shape, dtype = checkpoint.shape(name), checkpoint.dtype(name)
    if len(shape) != 1 or shape[0] == 0 or dtype != torch.int32:
        raise TensorError(f"{name}: expected a vector of int32, found {dtype} of shape {list(shape)}")
    index = checkpoint.tensor(name).long()
    count = scheme.groups(len(index), name)
    if bool((index == -1).all()) and name.endswith(".weight_g_idx"):  # initialized, and never set
        return torch.arange(len(index)) // (len(index) // count)
    if bool(((index < 0) | (index >= count)).any()):
        wrong = int(index[(index < 0) | (index >= count)][0])
        raise TensorError(f"{name}: names group {wrong}, expected 0 to {count - 1}")
    return index


def _is_by_group(groups: Tensor, scheme: Scheme) -> bool:
    blocks = groups.view(scheme.groups(len(groups)), -1)
    return torch.equal(blocks, blocks[:, :1].expand_as(blocks))


@dataclass(frozen=True)
class ReorderedMatrix(ComputedTensor):
    """A reordered matrix, dequantized when it is read.

    Attributes:
        checkpoint: without the groups of columns.
        groups: of each column.
    """

    checkpoint: Checkpoint
    format: Format
    prefix: str
    scheme: Scheme
    groups: Tensor

    def bands(self) -> Iterator[Tensor]:
        """A product in float32 is rounded once, to `dtype`. Raises what the format's reader raises."""
        weight = self.format.from_tensors(self.checkpoint, self.prefix, self.scheme)
        if weight.shape != self.shape:
            raise TensorError(f"{self.prefix}: expected shape {list(self.shape)}, found {list(weight.shape)}")
        for rows in row_bands(self.shape):
            band = weight.rows(rows.start, rows.stop)
            zero: Tensor | int = self.scheme.middle_code
            if band.zeros is not None:
                zero = band.zeros[:, self.groups].to(torch.int16)
            centred = band.codes().to(torch.int16) - zero
            yield centred * band.scales.float()[:, self.groups]
