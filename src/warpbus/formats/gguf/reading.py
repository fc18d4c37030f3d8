"""The tensors of a GGUF file as those of a checkpoint in Hugging Face's layout.

Matrices of Q4_0, Q5_0 and Q8_0 become quantized matrices in the format of compressed-tensors, `pack-quantized`, with
groups of 32 and the same codes and scales. Matrices of other block types are dequantized to float16 when they are read,
since no scheme has their minima or their nested scales. Matrices that the decoder fuses (q, k and v; gate and up) are
all dequantized if their types differ.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from warpbus.errors import TensorError
from warpbus.formats.gguf.architectures import Keys, SourceRows, source_tensors
from warpbus.formats.gguf.blocks import GROUP, half, q4_0_codes, q5_0_codes, q8_0_codes
from warpbus.formats.gguf.file import read_header
from warpbus.formats.stored import ComputedTensor, row_bands
from warpbus.qtensor import Scheme, pack, packed_words

WEIGHTS = "model.gguf"
"""The name of the file in a model directory."""

SCHEMES = {"Q4_0": Scheme(4, GROUP), "Q5_0": Scheme(5, GROUP), "Q8_0": Scheme(8, GROUP)}
"""The schemes of block types whose blocks are exactly the groups of a scheme."""

_CODES: dict[str, Callable[[Tensor], Tensor]] = {"Q4_0": q4_0_codes, "Q5_0": q5_0_codes, "Q8_0": q8_0_codes}
_DEQUANTIZED = torch.float16
_WEIGHT = ".weight"
_ENDS = ("model.embed_tokens.weight", "lm_head.weight")
_FUSED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")


def read_weights(file: Path) -> dict[str, "ConvertedRows"]:
    """The tensors of a GGUF file in Hugging Face's layout. Raises CheckpointError or TensorError."""
    return stored_tensors(source_tensors(Keys(read_header(file.resolve()))))


def quantized_schemes(tensors: Mapping[str, SourceRows]) -> dict[str, Scheme]:
    """The schemes of the matrices that stay quantized, by their names without `.weight`."""
    own = {
        name.removesuffix(_WEIGHT): SCHEMES.get(rows.tensor.kind.name)
        for name, rows in tensors.items()
        if name.endswith("proj.weight") or name in _ENDS
    }
    found = {}
    for name, scheme in own.items():
        partners = {own.get(partner) for partner in _partners(name)}
        if scheme is not None and partners <= {scheme}:
            found[name] = scheme
    return found


def _partners(name: str) -> list[str]:
    """The matrices that the decoder fuses with this one, itself included."""
    for parts in _FUSED:
        for part in parts:
            if name.endswith(part):
                return [name.removesuffix(part) + other for other in parts]
    return []


def stored_tensors(tensors: Mapping[str, SourceRows]) -> dict[str, "ConvertedRows"]:
    """The tensors of a checkpoint by name; see the module's docstring.

    Raises:
        TensorError: a tensor has a shape that its type cannot have.
    """
    quantized = quantized_schemes(tensors)
    found: dict[str, ConvertedRows] = {}
    for name, rows in tensors.items():
        prefix = name.removesuffix(_WEIGHT)
        if len(rows.shape) > 2 or (len(rows.shape) == 1 and rows.tensor.kind.dtype is None):
            raise TensorError(
                f"{rows.tensor.file}: {rows.tensor.name}: expected a matrix, or a vector of plain numbers, found shape "
                f"{list(rows.tensor.shape)} of type {rows.tensor.kind.name}"
            )
        if prefix not in quantized:
            found[name] = ConvertedRows(rows.shape, rows.tensor.kind.dtype or _DEQUANTIZED, rows, _plain)
            continue
        (out, columns), bits = rows.shape, quantized[prefix].bits
        words = packed_words(columns, bits)
        found[f"{prefix}.weight_packed"] = ConvertedRows((out, words), torch.int32, rows, _packed)
        found[f"{prefix}.weight_scale"] = ConvertedRows((out, columns // GROUP), torch.float16, rows, _scales)
        found[f"{prefix}.weight_shape"] = ConvertedRows((2,), torch.int64, rows, None)
    return found


@dataclass(frozen=True)
class ConvertedRows(ComputedTensor):
    """A tensor that is computed from rows of a GGUF file when it is read.

    Attributes:
        rows: in the file.
        convert: from the bytes of some rows to those rows of the tensor; None for the shape of the matrix.
    """

    rows: SourceRows
    convert: Callable[[SourceRows, Tensor], Tensor] | None

    @property
    def is_dequantized(self) -> bool:
        return self.convert is _plain and self.rows.tensor.kind.decode is not None

    def bands(self) -> Iterator[Tensor]:
        """All at once, since the rows may be in another order in the file."""
        yield self.read()

    def read(self) -> Tensor:
        """The whole tensor."""
        if self.convert is None:
            return torch.tensor(self.rows.shape, dtype=torch.int64)
        tensor = self.rows.tensor
        if len(tensor.shape) == 1:
            whole = tensor.read_rows(0, 1).view(self.dtype).flatten()
            return self.rows.in_order(whole[self.rows.start : self.rows.stop].clone())
        found = torch.empty(self.shape, dtype=self.dtype)
        for band in row_bands((self.shape[0], tensor.shape[1])):
            raw = tensor.read_rows(self.rows.start + band.start, self.rows.start + band.stop)
            found[band] = self.convert(self.rows, raw)
        return self.rows.in_order(found)


def _blocks(rows: SourceRows, raw: Tensor) -> Tensor:
    return raw.view(-1, rows.tensor.kind.nbytes)


def _plain(rows: SourceRows, raw: Tensor) -> Tensor:
    """The weights, plain or dequantized."""
    kind = rows.tensor.kind
    if kind.decode is None:
        assert kind.dtype is not None
        return raw.view(kind.dtype)
    weights = kind.decode(_blocks(rows, raw)).view(len(raw), -1).to(_DEQUANTIZED)
    if not bool(weights.isfinite().all()):
        raise TensorError(f"{rows.tensor.file}: {rows.tensor.name}: has NaN, or weights that overflow float16")
    return weights


def _packed(rows: SourceRows, raw: Tensor) -> Tensor:
    kind = rows.tensor.kind.name
    return pack(_CODES[kind](_blocks(rows, raw)).view(len(raw), -1), SCHEMES[kind].bits)


def _scales(rows: SourceRows, raw: Tensor) -> Tensor:
    return half(_blocks(rows, raw)[:, :2]).half().view(len(raw), -1)
