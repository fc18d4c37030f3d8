"""`Format`: the interface of the quantized file formats."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import SchemeError, UsageError
from warpbus.formats import awq, compressed_tensors, fp4, gptq, thudm, trellis
from warpbus.formats.checkpoint import Checkpoint
from warpbus.formats.fp4 import fp4_storage
from warpbus.formats.fp8 import fp8_storage
from warpbus.formats.reading import unreadable
from warpbus.qtensor import QTensor, Scheme, Schemes

Config = dict[str, Any]
"""A parsed `config.json`."""


@dataclass(frozen=True)
class Format:
    """A format that can be read.

    Attributes:
        name: on the command line.
        parts: the suffixes of the tensors that a quantized matrix may have, for instance `.qweight`.
        detect: whether a config.json describes it.
        read_schemes: the schemes of the layers by name, from a config.json that describes this format; raises
            CheckpointError for an unsupported one.
        is_quantized: `(checkpoint, prefix)`: whether the linear layer `prefix` is stored quantized.
        from_tensors: `(checkpoint, prefix, scheme)`: the matrix of the linear layer `prefix`; raises TensorError,
            CheckpointError or SchemeError, with the name of the tensor that is wrong.
    """

    name: str
    parts: tuple[str, ...]
    detect: Callable[[Config], bool]
    read_schemes: Callable[[Config], Schemes]
    is_quantized: Callable[[Checkpoint, str], bool]
    from_tensors: Callable[[Checkpoint, str, Scheme], QTensor]

    @property
    def has_embedding(self) -> bool:
        """Whether an embedding may be quantized in this format."""
        return self.name == "compressed-tensors"

    def stored(self, checkpoint: Checkpoint, prefix: str) -> list[str]:
        """The tensors that store the quantized linear layer `prefix` in a checkpoint."""
        return [prefix + part for part in self.parts if prefix + part in checkpoint]


@dataclass(frozen=True)
class WritableFormat(Format):
    """A format that can be written, too.

    Attributes:
        scale_dtype: the dtype that scales must have; None for any.
        check: `(scheme, shape, name)`: raises SchemeError for a matrix that the format cannot represent.
        check_zeros: `(zeros, name)`: raises SchemeError for uint8 zero points that it cannot represent.
        to_tensors: `(prefix, weight)`: the tensors of the linear layer `prefix`.
        quantization_config: `(schemes, ignore)`: what config.json holds under `quantization_config`; `schemes` is that
            of all quantized linear layers or that of each by its name, `ignore` are the names of those that are not
            quantized, for instance `lm_head`; raises SchemeError for schemes that cannot be together.
    """

    scale_dtype: torch.dtype | None
    check: Callable[[Scheme, tuple[int, int], str], None]
    check_zeros: Callable[[Tensor, str], None]
    to_tensors: Callable[[str, QTensor], dict[str, Tensor]]
    quantization_config: Callable[[Scheme | Mapping[str, Scheme], Sequence[str]], Config]


def format_named(name: str) -> WritableFormat:
    """The format to write: "compressed-tensors", "gptq", "gptq-v2", "awq", "modelopt" or "warpbus".

    Raises:
        UsageError: if there is no format of that name.
    """
    try:
        return WRITABLE[name]
    except KeyError:
        raise UsageError(
            f"format {name!r}: expected one of {', '.join(WRITABLE)}; GGUF is written by warpbus convert"
        ) from None


def format_of(config: Config, *, trellises: bool = False) -> Format | None:
    """The format of a model's quantized matrices, from its `config.json`; None if no matrix is loaded quantized.

    The latter is an unquantized model, or one with which no kernel computes: see `formats.dequantizing`.

    Args:
        trellises: count those as quantized: some devices have kernels for them.

    Raises:
        CheckpointError: the quantized format is not supported.
    """
    if fp4_storage(config) is not None or (trellis.detect(config) and not trellises):
        return None
    storage = fp8_storage(config)
    if storage is not None and not storage.is_scheme:
        return None
    for each in FORMATS:
        if each.detect(config):
            return each
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, dict):
        raise unreadable("quantization_config", quantization, "an object")
    raise unreadable(
        "quantization_config.quant_method",
        quantization.get("quant_method"),
        "'compressed-tensors', 'gptq', 'awq' or 'fp8'",
    )


def read_schemes(config: Config) -> Schemes:
    """The schemes of a model's quantized matrices, from its `config.json`; none where `format_of` gives None.

    Raises:
        CheckpointError: the quantization is not supported.
    """
    found = format_of(config)
    return Schemes(None) if found is None else found.read_schemes(config)


def _any_zeros(zeros: Tensor, name: str) -> None:
    """`check_zeros` of a format that can represent all zero points."""


def _any_matrix(scheme: Scheme, shape: tuple[int, int], name: str) -> None:
    if scheme.is_trellis:
        raise SchemeError(f"{name}: {scheme} has a format of its own: use --format warpbus")
    scheme.groups(shape[1], name)


def _gptq(name: str, version: int) -> WritableFormat:
    return WritableFormat(
        name=name,
        parts=gptq.PARTS,
        detect=lambda config: gptq.version(config) == version,
        read_schemes=gptq.read_schemes,
        is_quantized=gptq.is_quantized,
        from_tensors=partial(gptq.from_tensors, version=version),
        scale_dtype=torch.float16,
        check=gptq.check,
        check_zeros=partial(gptq.check_zeros, version=version),
        to_tensors=partial(gptq.to_tensors, version=version),
        quantization_config=partial(gptq.quantization_config, version=version),
    )


WRITABLE = {
    each.name: each
    for each in (
        WritableFormat(
            name="compressed-tensors",
            parts=compressed_tensors.PARTS,
            detect=compressed_tensors.detect,
            read_schemes=compressed_tensors.read_schemes,
            is_quantized=compressed_tensors.is_quantized,
            from_tensors=compressed_tensors.from_tensors,
            scale_dtype=None,
            check=_any_matrix,
            check_zeros=_any_zeros,
            to_tensors=compressed_tensors.to_tensors,
            quantization_config=compressed_tensors.quantization_config,
        ),
        _gptq("gptq", 1),
        _gptq("gptq-v2", 2),
        WritableFormat(
            name="awq",
            parts=awq.PARTS,
            detect=awq.detect,
            read_schemes=awq.read_schemes,
            is_quantized=awq.is_quantized,
            from_tensors=awq.from_tensors,
            scale_dtype=torch.float16,
            check=awq.check,
            check_zeros=_any_zeros,
            to_tensors=awq.to_tensors,
            quantization_config=awq.quantization_config,
        ),
        WritableFormat(
            name="modelopt",
            parts=fp4.MODELOPT_PARTS,
            detect=fp4.modelopt_detect,
            read_schemes=fp4.modelopt_schemes,
            is_quantized=lambda checkpoint, prefix: f"{prefix}.weight_scale" in checkpoint,
            from_tensors=partial(fp4.fp4_from_tensors, modelopt=True),
            scale_dtype=None,
            check=fp4.check_modelopt,
            check_zeros=_any_zeros,
            to_tensors=partial(fp4.fp4_to_tensors, modelopt=True),
            quantization_config=fp4.modelopt_config,
        ),
        WritableFormat(
            name="warpbus",
            parts=trellis.PARTS,
            detect=trellis.detect,
            read_schemes=trellis.read_schemes,
            is_quantized=trellis.is_quantized,
            from_tensors=trellis.from_tensors,
            scale_dtype=None,
            check=trellis.check,
            check_zeros=_any_zeros,
            to_tensors=trellis.to_tensors,
            quantization_config=trellis.quantization_config,
        ),
    )
}
"""The formats that are read and written, by their names."""

FORMATS: tuple[Format, ...] = (
    *WRITABLE.values(),
    Format(
        name="thudm",
        parts=thudm.PARTS,
        detect=thudm.detect,
        read_schemes=thudm.read_schemes,
        is_quantized=thudm.is_quantized,
        from_tensors=thudm.from_tensors,
    ),
)
"""All formats that are read."""
