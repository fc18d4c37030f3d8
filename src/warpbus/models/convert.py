"""`convert` writes a quantized checkpoint in another format, with one matrix in memory at a time."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from warpbus.errors import StorageError, TensorError, UsageError
from warpbus.formats import Checkpoint, CheckpointWriter
from warpbus.formats.companions import find_companions
from warpbus.formats.files import check_target
from warpbus.formats.safetensors_io import raw_bytes
from warpbus.models.conversion_plan import ConversionPlan, ConvertedMatrix, prepare, refuse_kv_scales
from warpbus.models.fp8_blocks import TARGET as FP8_BLOCK
from warpbus.models.fp8_blocks import write_fp8_blocks
from warpbus.models.gguf.export import TARGETS, GGUFExport, export_gguf
from warpbus.models.loading import quantized_parameters, read_config
from warpbus.models.padding import pad_columns, pad_plain, pad_rows
from warpbus.qtensor import QTensor, Scheme, Schemes

Progress = Callable[[str, int, int], None]
"""Called with the name of the current phase, the number of finished tensors, and their total."""

_WEIGHTS_AT_ONCE = 2**22
_CONSTANTS = "inv_freq"  # rotary frequencies that some exporters wrote: they keep their dtype


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion.

    Attributes:
        source: the format of the model.
        target: the format of the output, or its dtype.
        schemes: of the quantized matrices.
        matrices: number of quantized matrices.
        ffn: the FFN size before and after.
        scales: number of scales written; 0 if the output is not quantized.
        scales_rounded: number of scales that the target's dtype cannot represent exactly.
        bytes_before, bytes_after: of all tensors.
    """

    model: str
    output: str
    source: str
    target: str
    schemes: str
    matrices: int
    ffn: tuple[int, int]
    scales: int
    scales_rounded: int
    bytes_before: int
    bytes_after: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        """A summary for the terminal, one line per fact."""
        lines = [
            f"{self.output}: {self.matrices} matrices of {self.schemes} from {self.source} to {self.target}, "
            f"{self.bytes_before / 1e6:,.1f} MB to {self.bytes_after / 1e6:,.1f} MB"
        ]
        if self.ffn[0] != self.ffn[1]:
            lines.append(f"FFN widened with zeros from {self.ffn[0]} to {self.ffn[1]}")
        if self.scales_rounded:
            lines.append(f"{self.scales_rounded:,} of {self.scales:,} scales were rounded to float16")
        return "\n".join([*lines, "read back bit for bit"])


def convert(
    model: str | Path,
    output: str | Path,
    *,
    to: str,
    pad_ffn: int | str = "none",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Conversion | GGUFExport:
    """Write a quantized model in another format. Codes, scales and zero points do not change, except to GGUF: see
    `warpbus.models.gguf.export`.

    A model that the target format cannot represent is refused before anything is written. The output is read back and
    compared bit for bit before it gets its final name. Scales become float16 if the target format requires it.

    Args:
        model: a model directory, quantized in a format of `warpbus.formats`, or a GGUF file.
        output: a new directory; for GGUF a new file.
        to: a format, see `format_named`; "float16" or "bfloat16" for dequantized matrices; or a target of
            `export_gguf` or "fp8-block" (`write_fp8_blocks`), for which the model need not be quantized.
        pad_ffn: see `padded_size`.
        overwrite: replace a model that is at `output`.
        progress: see `Progress`.

    Raises:
        UsageError: an argument is wrong, or the model is not quantized or already has the format.
        SchemeError: the target cannot represent a matrix; the message names it.
        CheckpointError: the model cannot be read or is not complete.
        TensorError: a tensor is missing, has the wrong shape or type, or values that the target's dtype cannot hold.
        StorageError: the output exists, cannot be written, or differs from what was written when it is read back.
    """
    refuse_kv_scales(Path(model), to)
    if to in TARGETS:
        if pad_ffn != "none":
            raise UsageError(f"--pad-ffn {pad_ffn}: an FFN is not widened in GGUF: drop it")
        return export_gguf(model, output, to=to, overwrite=overwrite, progress=progress)
    check_target(Path(output), overwrite=overwrite)  # before the tensors are read
    started = time.perf_counter()
    if to == FP8_BLOCK:
        if pad_ffn != "none":
            raise UsageError(f"--pad-ffn {pad_ffn}: an FFN is not widened in FP8: drop it")
        matrices, before, after = write_fp8_blocks(model, output, overwrite=overwrite)
        seconds = time.perf_counter() - started
        kind = "fp8 with a scale per 128 x 128"
        return Conversion(
            str(model), str(output), "floating point", to, kind, matrices, (0, 0), 0, 0, before, after, seconds
        )
    plan = prepare(Path(model), Path(output), to, pad_ffn)
    job = _RunningConversion(plan, Path(output), progress or (lambda what, done, total: None))
    scales, rounded = job.check()
    digests: dict[str, bytes] = {}
    with CheckpointWriter(
        output, shard_bytes=plan.shard_bytes, overwrite=overwrite, expected_bytes=plan.expected_bytes
    ) as writer:
        writer.write_json("config.json", plan.written_config())
        for name, file in find_companions(plan.checkpoint.directory).items():
            writer.copy_file(file, name)
        written = job.write(writer, digests)
        writer.finish(lambda directory: job.compare(directory, digests))
    return Conversion(
        model=str(model),
        output=str(output),
        source=plan.source_name,
        target=to,
        schemes=plan.source_name if plan.source is None else str(Schemes(None, plan.schemes)),
        matrices=len(plan.schemes) + plan.dequantized,
        ffn=plan.ffn,
        scales=scales,
        scales_rounded=rounded,
        bytes_before=plan.bytes_before,
        bytes_after=written,
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True)
class _RunningConversion:
    """The conversion of one model."""

    plan: ConversionPlan
    output: Path
    progress: Progress

    def check(self) -> tuple[int, int]:
        """Check every matrix before anything is written; returns the number of scales, and of those to be rounded."""
        if self.plan.target is None:
            return 0, 0
        self.plan.written_config()
        for matrix in self.plan.matrices:
            if matrix.scheme is not None:
                self.plan.target.check(matrix.scheme, matrix.target, matrix.prefix)
        scales = rounded = 0
        for done, matrix in enumerate(self.plan.matrices):
            self.progress("checking", done, len(self.plan.matrices))
            if matrix.scheme is not None:
                weight = self._read(matrix, matrix.scheme)
                if weight.zeros is not None:
                    self.plan.target.check_zeros(weight.zeros, matrix.prefix)
                scales += weight.scales.numel()
                rounded += int((self._scales(matrix, weight).double() != weight.scales.double()).sum())
        self.progress("checking", len(self.plan.matrices), len(self.plan.matrices))
        return scales, rounded

    def write(self, writer: CheckpointWriter, digests: dict[str, bytes]) -> int:
        """Write all tensors and store their digests in `digests`; returns the bytes written."""
        copied, written = self.plan.copied, 0
        total = len(copied) + len(self.plan.matrices)

        def add(name: str, tensor: Tensor) -> None:
            nonlocal written
            writer.add(name, tensor)
            written += tensor.nbytes

        for done, name in enumerate(copied):
            self.progress("converting", done, total)
            tensor = self._cast(name, self.plan.checkpoint.tensor(name))
            digests[name] = _digest(tensor)
            add(name, tensor)
        for done, matrix in enumerate(self.plan.matrices, len(copied)):
            self.progress("converting", done, total)
            name, converted = f"{matrix.prefix}.weight", self._convert(matrix)
            digests[name] = _digest(converted)
            for part, tensor in self._tensors(matrix.prefix, converted).items():
                add(part, tensor)
        self.progress("converting", total, total)
        return written

    def compare(self, directory: Path, digests: dict[str, bytes]) -> None:
        """Read everything back; raises StorageError if a digest differs."""
        found = Checkpoint(directory)
        quantized_parameters(found, read_config(found, mtp="stored"))
        target, quantized = self.plan.target, self.plan.schemes
        declared = None if target is None else target.read_schemes(found.config)
        for done, (name, expected) in enumerate(digests.items()):
            self.progress("reading back", done, len(digests))
            prefix = name.removesuffix(".weight")
            read: QTensor | Tensor
            scheme = None if declared is None or prefix not in quantized else declared.of(prefix)
            if target is None or scheme is None:
                read = found.tensor(name)
            else:
                read = target.from_tensors(found, prefix, scheme)
            if _digest(read) != expected:
                raise StorageError(
                    f"{self.output}: {name}: the data read back differs from what was written; the output was "
                    "discarded: check the disk, and try again"
                )
        self.progress("reading back", len(digests), len(digests))

    def _read(self, matrix: ConvertedMatrix, scheme: Scheme) -> QTensor:
        assert self.plan.source is not None
        weight = self.plan.source.from_tensors(self.plan.checkpoint, matrix.prefix, scheme)
        if weight.shape != matrix.shape:
            raise TensorError(
                f"{self.plan.checkpoint.directory}: {matrix.prefix}: expected shape {list(matrix.shape)}, as "
                f"config.json says, found {list(weight.shape)}"
            )
        return weight

    def _scales(self, matrix: ConvertedMatrix, weight: QTensor) -> Tensor:
        """The scales in the target's dtype."""
        dtype = None if self.plan.target is None else self.plan.target.scale_dtype
        if dtype is None or weight.scales.dtype == dtype:
            return weight.scales
        scales = weight.scales.to(dtype)
        lost = ~scales.isfinite() | ((scales == 0) & (weight.scales != 0))
        if bool(lost.any()):
            raise TensorError(
                f"{matrix.prefix}: a scale is {float(weight.scales[lost][0]):g}, which float16 cannot represent, but "
                f"{self.output} needs float16 scales: use compressed-tensors"
            )
        return scales

    def _convert(self, matrix: ConvertedMatrix) -> QTensor | Tensor:
        """The matrix of the output."""
        grown = matrix.target != matrix.shape
        if matrix.scheme is None:
            plain = self._cast(
                matrix.prefix, self.plan.checkpoint.tensor(f"{matrix.prefix}.weight", expected=matrix.shape)
            )
            return pad_plain(plain, matrix.parts, matrix.target) if grown else plain
        weight = self._read(matrix, matrix.scheme)
        weight = replace(weight, scales=self._scales(matrix, weight))
        if matrix.target[0] > matrix.shape[0]:
            weight = pad_rows(weight, matrix.parts, matrix.target[0] // matrix.parts)
        if matrix.target[1] > matrix.shape[1]:
            weight = pad_columns(weight, matrix.target[1])
        return weight if self.plan.dtype is None else _finite(matrix.prefix, _dense(weight, self.plan.dtype))

    def _tensors(self, prefix: str, converted: QTensor | Tensor) -> dict[str, Tensor]:
        """The tensors that store a matrix in the output."""
        if isinstance(converted, QTensor) and self.plan.target is not None:
            return self.plan.target.to_tensors(prefix, converted)
        return {f"{prefix}.weight": cast(Tensor, converted)}

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        """An unquantized tensor, converted to `plan.dtype` if that is set and the tensor may be rounded."""
        if self.plan.dtype is None or not tensor.is_floating_point():
            return tensor
        if name in self.plan.exact or name.endswith(_CONSTANTS):
            return tensor
        found = _finite(name, tensor.to(self.plan.dtype))
        if self.plan.dtype == torch.float16 and bool(tensor.any()) and not bool(found.any()):
            raise TensorError(f"{name}: all its values are so small that {found.dtype} makes 0 of them: use bfloat16")
        return found


def _dense(weight: QTensor, dtype: torch.dtype) -> Tensor:
    """Dequantize a matrix; each product is rounded once."""
    dense = torch.empty(weight.shape, dtype=dtype)
    height = max(1, _WEIGHTS_AT_ONCE // weight.shape[1])
    for start in range(0, weight.shape[0], height):
        stop = min(start + height, weight.shape[0])
        dense[start:stop] = weight.rows(start, stop).dequantize(torch.float32)
    return dense


def _finite(name: str, tensor: Tensor) -> Tensor:
    if not bool(tensor.isfinite().all()):
        raise TensorError(f"{name}: has values that overflow {tensor.dtype}, or NaNs: use bfloat16")
    return tensor


def _digest(value: QTensor | Tensor) -> bytes:
    """SHA-256 of the data, shapes and dtypes of a tensor or a quantized matrix."""
    digest = hashlib.sha256()
    parts: list[Tensor | None] = [value] if isinstance(value, Tensor) else [value.qweight, value.scales, value.zeros]
    for part in parts:
        if part is not None:
            digest.update(f"{part.dtype} {list(part.shape)}".encode())
            digest.update(raw_bytes(part.contiguous()))
    if isinstance(value, QTensor):
        digest.update(str(value.scheme).encode())
    return digest.digest()
