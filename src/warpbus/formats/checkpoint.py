"""`Checkpoint`: a model directory whose tensors are read one by one.

Weights are looked for in this order: `model.safetensors`, `model.safetensors.index.json` with its shards,
`pytorch_model.bin`, `pytorch_model.bin.index.json` with its shards, `model.gguf` (see `gguf.view`). A `.bin` file is a
pickle: only tensors are taken out of it (`torch.load` with `weights_only`), and nothing that it asks to call is called.
"""

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from warpbus.errors import CheckpointError, TensorError
from warpbus.formats.gguf.reading import WEIGHTS as GGUF_WEIGHTS
from warpbus.formats.gguf.reading import ConvertedRows, read_weights
from warpbus.formats.safetensors_io import read_header, shown
from warpbus.formats.stored import ComputedTensor, StoredTensor

_Reader = Callable[[Path], dict[str, StoredTensor]]

_BARE_EMBEDDING = "embed_tokens.weight"

_MAX_PICKLE_BYTES = 2**26  # names and shapes of all tensors; a thousand of them take about 0.1 MB


class Checkpoint:
    """A model directory: its configuration, and its tensors by name.

    Opening it reads the configuration and the headers of all files, so that a missing, truncated or damaged file is
    reported immediately; no tensor is read.

    Args:
        directory: of the model.
        weights: False for a model without weights yet, which will be trained.

    Attributes:
        directory: of the model.
        config: the parsed `config.json`.
        total_bytes: bytes of all tensors together.

    Raises:
        CheckpointError: the directory, its `config.json` or its weights are missing, or a file is damaged.
    """

    def __init__(self, directory: str | Path, *, weights: bool = True) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            found = "is a file" if self.directory.exists() else "there is no such directory"
            raise CheckpointError(
                f"{self.directory}: {found}: expected a directory with config.json and model.safetensors, "
                "or a name on a hub, such as THUDM/chatglm2-6b"
            )
        config = self.load_json("config.json")
        if config is None:
            raise CheckpointError(
                f"{self.directory}: config.json is missing: expected a model directory in Hugging Face's layout"
            )
        self.config: dict[str, Any] = config
        self._tensors = self._find_tensors() if weights else {}
        if _BARE_EMBEDDING in self._tensors:
            self._complete_bare_decoder()
        self.total_bytes = sum(tensor.nbytes for tensor in self._tensors.values())

    @classmethod
    def of_tensors(
        cls, directory: Path, tensors: Mapping[str, StoredTensor], config: Mapping[str, Any] | None = None
    ) -> Self:
        """A checkpoint of these tensors, with this configuration or none; no file is read."""
        self = cls.__new__(cls)
        self.directory, self.config = directory, dict(config or {})
        self._tensors = dict(tensors)
        self.total_bytes = sum(tensor.nbytes for tensor in tensors.values())
        return self

    @property
    def from_gguf(self) -> bool:
        """Whether the tensors are read from a GGUF file."""
        return self.has(ConvertedRows)

    def has(self, kind: type) -> bool:
        """Whether some tensor is stored in this way."""
        return any(isinstance(tensor, kind) for tensor in self._tensors.values())

    @property
    def dequantized_blocks(self) -> list[str]:
        """The tensors that are dequantized from a GGUF file when they are read."""
        stored = self._tensors.items()
        return [name for name, each in stored if isinstance(each, ConvertedRows) and each.is_dequantized]

    def names(self) -> list[str]:
        """The tensors' names, sorted."""
        return sorted(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape; the tensor is not read. Raises TensorError if there is no such tensor."""
        return self.stored(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's dtype; the tensor is not read. Raises TensorError if there is no such tensor."""
        return self.stored(name).dtype

    def nbytes(self, name: str) -> int:
        """A tensor's size in bytes; the tensor is not read. Raises TensorError if there is no such tensor."""
        return self.stored(name).nbytes

    def tensor(self, name: str, *, expected: tuple[int, ...] | None = None) -> Tensor:
        """Read a tensor.

        Args:
            name: as in `names()`.
            expected: the shape that it has to have.

        Returns:
            A contiguous CPU tensor, memory-mapped if possible: pages are read when they are accessed and freed with the
            tensor. Writing to it does not change the file.

        Raises:
            TensorError: if there is no such tensor, or its shape is not `expected`.
            CheckpointError: if its file has changed since the checkpoint was opened.
        """
        stored = self.stored(name)
        if expected is not None and stored.shape != tuple(expected):
            raise TensorError(
                f"{self.directory}: tensor {shown(name)} has shape {list(stored.shape)}, expected {list(expected)}: "
                "check that config.json belongs to these weights"
            )
        return stored.read()

    def chunks(self, name: str) -> Iterator[bytes | memoryview]:
        """The bytes of a tensor in order, at most `CHUNK_BYTES` at a time.

        Raises:
            TensorError: if there is no such tensor.
            CheckpointError: if its file cannot be read, or has changed since the checkpoint was opened.
        """
        return self.stored(name).chunks()

    def load_json(self, filename: str) -> dict[str, Any] | None:
        """Parse a JSON file of the directory, or return `None` if there is none.

        Raises:
            CheckpointError: if it cannot be read or does not hold a JSON object.
        """
        file = self.directory / filename
        return read_object(file) if file.is_file() else None

    def stored(self, name: str) -> StoredTensor:
        """A tensor on disk, which is not read. Raises TensorError if there is no such tensor."""
        try:
            return self._tensors[name]
        except KeyError:
            raise TensorError(
                f"{self.directory}: tensor {shown(name)} is missing: check that the checkpoint is complete "
                "and that config.json belongs to it"
            ) from None

    def _complete_bare_decoder(self) -> None:
        """Name the tensors of a decoder that was saved without its head as those of the whole model are named.

        Embedding models are saved so. Without a head in the file, the embedding takes its place.
        """
        self._tensors = {f"model.{name}": tensor for name, tensor in self._tensors.items()}
        self.config = {**self.config, "tie_word_embeddings": True}

    def _find_tensors(self) -> dict[str, StoredTensor]:
        kinds: tuple[tuple[str, _Reader], ...] = (
            ("model.safetensors", _read_safetensors),
            ("pytorch_model.bin", _read_pickle),
            (GGUF_WEIGHTS, _read_gguf),
        )
        for filename, reader in kinds:
            if (self.directory / filename).is_file():
                return reader(self.directory / filename)
            index = self.load_json(f"{filename}.index.json")
            if index is not None:
                return self._read_shards(f"{filename}.index.json", index, reader)
        raise CheckpointError(
            f"{self.directory}: no weights: expected model.safetensors, model.safetensors.index.json with its shards, "
            "or pytorch_model.bin"
        )

    def _read_shards(self, index_name: str, index: dict[str, Any], reader: _Reader) -> dict[str, StoredTensor]:
        weight_map = shards_by_tensor(str(self.directory / index_name), index)
        shards: dict[str, dict[str, StoredTensor]] = {}
        for shard in sorted(set(weight_map.values())):
            if not (self.directory / shard).is_file():
                raise CheckpointError(f"{self.directory}: {shard}, named by {index_name}, is missing: download it")
            shards[shard] = reader(self.directory / shard)
        for name, shard in weight_map.items():
            if name not in shards[shard]:
                file = self.directory / shard
                raise CheckpointError(f"{file}: tensor {shown(name)}, which {index_name} puts there, is missing")
        return {name: shards[shard][name] for name, shard in weight_map.items()}


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, by name: safetensors, or a pickle if its name ends in `.bin`; none is read.

    Raises:
        CheckpointError: if the file cannot be read or is damaged.
    """
    return _read_pickle(file) if file.suffix == ".bin" else _read_safetensors(file)


def shards_by_tensor(index_name: str, index: Mapping[str, Any]) -> dict[str, str]:
    """The file of each tensor according to an index; all are plain file names in the same directory.

    Raises:
        CheckpointError: the index is malformed. It is untrusted: it must not make us open files elsewhere.
    """
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index_name}: expected an object weight_map of tensor names to file names")
    for shard in set(weight_map.values()):
        if shard in ("", ".", "..") or any(character in shard for character in "/\\\0"):
            raise CheckpointError(f"{index_name}: names the file {shard!a}, which is not a plain file name")
    return weight_map


def _read_safetensors(file: Path) -> dict[str, StoredTensor]:
    return dict(read_header(file))


def _read_gguf(file: Path) -> dict[str, StoredTensor]:
    return dict(read_weights(file))


@dataclass(frozen=True)
class _Pickled(ComputedTensor):
    """A tensor of a `.bin` file. The file is opened again for each tensor, so that its memory map is freed with it."""

    file: Path
    name: str

    def bands(self) -> Iterator[Tensor]:
        """All at once."""
        yield self.read()

    def read(self) -> Tensor:
        """The whole tensor, mapped from the file."""
        tensor = _load_pickle(self.file).get(self.name)
        if tensor is None or tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise CheckpointError(f"{self.file}: changed while it was being read: start again")
        return tensor.contiguous()


def _read_pickle(file: Path) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    limit = file.stat().st_size
    for name, tensor in _load_pickle(file).items():
        nbytes = tensor.numel() * tensor.dtype.itemsize
        if nbytes > limit:  # strides of 0 make any size of a few bytes
            raise CheckpointError(
                f"{file}: tensor {shown(name)} would have {nbytes:,} bytes, the file has {limit:,}: "
                "convert it to safetensors"
            )
        found[name] = _Pickled(tuple(tensor.shape), tensor.dtype, file, name)
    return found


def _check_archive(file: Path) -> None:
    """Refuse archives that expand in memory: PyTorch stores tensors uncompressed, and its pickles are small."""
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError("an archive with compressed entries")
            if entry.filename.endswith(".pkl") and entry.file_size > _MAX_PICKLE_BYTES:
                raise ValueError(f"a pickle of {entry.file_size:,} bytes, more than {_MAX_PICKLE_BYTES:,}")


def _load_pickle(file: Path) -> dict[str, Tensor]:
    try:
        _check_archive(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged or hostile pickle can make the unpickler raise anything
        raise CheckpointError(
            f"{file}: cannot be loaded as tensors alone (nothing in it was executed): it is damaged, written by "
            f"PyTorch before 1.6, or holds other objects: convert it to safetensors ({_first_line(error)})"
        ) from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{file}: expected tensors by name, found {type(loaded).__name__}")
    for name, value in loaded.items():
        if not (isinstance(name, str) and isinstance(value, Tensor) and _is_plain(value)):
            raise CheckpointError(f"{file}: expected a dense tensor under {name!a}: convert it to safetensors")
    return {name: value.detach() for name, value in loaded.items()}


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is dense and contiguous in memory: not sparse, quantized, or without storage."""
    odd = tensor.is_nested or tensor.is_quantized
    return not odd and tensor.layout == torch.strided and tensor.device.type == "cpu"


def read_object(file: Path) -> dict[str, Any]:
    """Parse a JSON file of a model directory; an empty object if there is no such file.

    Raises:
        CheckpointError: if it cannot be read or does not hold a JSON object.
    """
    if not file.is_file():
        return {}
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not JSON ({_first_line(error)}): download it again") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(parsed).__name__}: download it again")
    return parsed


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
