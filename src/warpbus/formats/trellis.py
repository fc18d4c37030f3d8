"""Warpbus's own format, for the schemes w3a16-trellis and w2a16-trellis, which no other program reads.

A matrix `[out, in]` is stored as

    P.weight_trellis  int32 [out, in * bits / 32]  the words of `qtensor.trellis.pack_symbols`
    P.weight_scale    floating [out, 1]

and `config.json` holds under `quantization_config` the method "warpbus", the trellis and the schemes:

    {"quant_method": "warpbus", "format": "trellis", "version": 2, "schemes": {"default": "w3a16-trellis", ...}}

A single process on a GPU keeps the words; elsewhere matrices are dequantized when they are read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import CheckpointError, SchemeError, TensorError
from warpbus.formats.checkpoint import Checkpoint
from warpbus.formats.reading import matrix_shape, read_scales, read_tensor, require, section, unreadable
from warpbus.formats.stored import ComputedTensor, StoredTensor
from warpbus.qtensor import QTensor, Scheme, Schemes
from warpbus.qtensor.qtensor import check_trellis

PARTS = (".weight_trellis", ".weight_scale")
METHOD = "warpbus"
_WHERE = "quantization_config"
_VERSION = 2
_WEIGHT = ".weight"


def detect(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes this format."""
    found = config.get(_WHERE)
    return isinstance(found, dict) and found.get("quant_method") == METHOD


def check(scheme: Scheme, shape: tuple[int, int], name: str) -> None:
    """Refuse what the format does not hold. Raises SchemeError."""
    if not scheme.is_trellis:
        raise SchemeError(f"{name}: the format warpbus holds w3a16-trellis and w2a16-trellis only, not {scheme}")
    check_trellis(shape, name, scheme)


def quantization_config(schemes: Scheme | Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of `config.json`."""
    found = Schemes(schemes, dict.fromkeys(ignore)) if isinstance(schemes, Scheme) else Schemes(None, schemes)
    for each in found.distinct():
        if not each.is_trellis:
            raise SchemeError(f"the format warpbus holds w3a16-trellis and w2a16-trellis only, not {each}")
    return {"quant_method": METHOD, "format": "trellis", "version": _VERSION, "schemes": found.to_json()}


def read_schemes(config: dict[str, Any]) -> Schemes:
    """The schemes of a model's matrices. Raises CheckpointError if they are not understood."""
    found = section(config)
    require(found, _WHERE, "quant_method", (METHOD,))
    require(found, _WHERE, "format", ("trellis",))
    if found.get("version") == 1:
        raise CheckpointError(
            f"config.json: {_WHERE}.version is 1, expected {_VERSION}: the numbers of a trellis have changed; quantize "
            "the original model again with `warpbus quantize`"
        )
    require(found, _WHERE, "version", (_VERSION,))
    try:
        schemes = Schemes.from_json(found.get("schemes"))
    except SchemeError as error:
        raise CheckpointError(f"config.json: {_WHERE}.schemes: {error}") from error
    for scheme in schemes.distinct():
        if not scheme.is_trellis:
            raise unreadable(f"{_WHERE}.schemes", str(scheme), "w3a16-trellis or w2a16-trellis")
    return schemes


def is_quantized(checkpoint: Checkpoint, prefix: str) -> bool:
    """Whether the linear layer `prefix` is stored quantized."""
    return f"{prefix}{PARTS[0]}" in checkpoint


def to_tensors(prefix: str, weight: QTensor) -> dict[str, Tensor]:
    """A quantized matrix as the tensors of a checkpoint. Raises SchemeError for another scheme."""
    check(weight.scheme, weight.shape, prefix)
    return {f"{prefix}{PARTS[0]}": weight.qweight, f"{prefix}{PARTS[1]}": weight.scales}


def from_tensors(checkpoint: Checkpoint, prefix: str, scheme: Scheme) -> QTensor:
    """Read a quantized matrix.

    Raises:
        TensorError: a tensor is missing or has the wrong shape or type.
        SchemeError: it does not consist of whole tiles.
    """
    rows, columns = _shape(checkpoint, prefix, scheme)
    words = read_tensor(checkpoint, prefix + PARTS[0], (rows, columns * scheme.bits // 32), torch.int32)
    scales = read_scales(checkpoint, prefix + PARTS[1], (rows, 1))
    return QTensor(scheme, words, scales, None, (rows, columns))


def _shape(checkpoint: Checkpoint, prefix: str, scheme: Scheme) -> tuple[int, int]:
    name = prefix + PARTS[0]
    rows, words = matrix_shape(checkpoint, name)
    if words % scheme.bits:
        raise TensorError(
            f"{checkpoint.directory}: {name}: {words} words a row are not those of {scheme}: check that config.json "
            "belongs to these weights"
        )
    shape = rows, words // scheme.bits * 32
    check_trellis(shape, name, scheme)
    return shape


@dataclass(frozen=True)
class TrellisMatrix(ComputedTensor):
    """A matrix that is dequantized when it is read."""

    checkpoint: Checkpoint
    prefix: str
    scheme: Scheme

    def bands(self) -> Iterator[Tensor]:
        """Computed in float32 and rounded once, to `dtype`."""
        yield from_tensors(self.checkpoint, self.prefix, self.scheme).dequantize(self.dtype)


def dequantized_trellis(checkpoint: Checkpoint, dtype: torch.dtype) -> Checkpoint:
    """A checkpoint in this format as an unquantized one: each matrix is dequantized when it is read.

    Args:
        checkpoint: any; returned unchanged if it is in another format.
        dtype: of the dequantized matrices.

    Raises:
        CheckpointError: config.json is not understood, or has no scheme for a matrix.
        TensorError: a part of a matrix is missing, or has the wrong shape or dtype.
    """
    if not detect(checkpoint.config):
        return checkpoint
    schemes = read_schemes(checkpoint.config)
    config = {key: value for key, value in checkpoint.config.items() if key != _WHERE}
    tensors: dict[str, StoredTensor] = {}
    for name in checkpoint.names():
        prefix = name.rpartition(".")[0]
        if not is_quantized(checkpoint, prefix) or not name.endswith(PARTS):
            tensors[name] = checkpoint.stored(name)
        elif name.endswith(PARTS[0]):
            scheme = schemes.of(prefix)
            if scheme is None:
                raise CheckpointError(f"config.json: {_WHERE}.schemes: none for {prefix}, which is stored quantized")
            shape = _shape(checkpoint, prefix, scheme)
            for part, expected in zip(PARTS, ((shape[0], shape[1] * scheme.bits // 32), (shape[0], 1)), strict=True):
                if checkpoint.shape(prefix + part) != expected:
                    raise TensorError(
                        f"{checkpoint.directory}: {prefix}{part}: expected shape {list(expected)}, found "
                        f"{list(checkpoint.shape(prefix + part))}: use an undamaged checkpoint"
                    )
            tensors[prefix + _WEIGHT] = TrellisMatrix(shape, dtype, checkpoint, prefix, scheme)
    return Checkpoint.of_tensors(checkpoint.directory, tensors, config)
