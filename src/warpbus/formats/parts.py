"""The finished parts of a run on the disk, as `ResumableCheckpoint` writes them."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from warpbus.errors import CheckpointError
from warpbus.formats.files import read_json, replace_file, sync, write_json
from warpbus.formats.safetensors_io import Entry, read_header, write_file

OTHERS = ("run", "order")
"""Names that parts cannot have, because of `run.json` and `order.json`."""

RUN = "run.json"
"""The identity of the run."""


class FinishedParts:
    """The finished parts on disk.

    Args:
        output: the output of the run.
    """

    def __init__(self, output: str | Path) -> None:
        resolved = Path(output).resolve()
        self.directory = resolved.with_name(f"{resolved.name}.quantization")
        self._sound: dict[str, dict[str, Any]] = {}

    @property
    def begun(self) -> bool:
        """Whether a run was begun, and has not removed its parts yet."""
        return (self.directory / RUN).is_file()

    def parts(self) -> list[str]:
        """The names of the parts, sorted, without those whose file has the wrong size."""
        found = sorted(file.stem for file in self.directory.glob("*.json") if file.stem not in OTHERS)
        return [part for part in found if self._recorded(part) is not None]

    def facts(self, part: str) -> Any:
        """The facts that a part was committed with; None if it is missing or damaged.

        The first call for a part reads its file and compares the checksum.
        """
        record = self._checked(part)
        return None if record is None else record["facts"]

    def read(self, part: str) -> dict[str, Entry]:
        """The tensors of a part by name; none is read yet, see `Entry.read`.

        Raises:
            CheckpointError: the part is missing or damaged.
        """
        if self._checked(part) is None:
            raise CheckpointError(f"{self.tensors_file(part)}: missing or damaged: run the same command again")
        return read_header(self.tensors_file(part))

    def write(self, part: str, tensors: Mapping[str, Tensor], facts: Any = None) -> None:
        """Write a part; an existing one is replaced.

        Args:
            part: its name.
            tensors: contiguous, on the CPU.
            facts: JSON.

        Raises:
            StorageError: it cannot be written; then it is missing.
            OSError: the same, of the directory.
        """
        self._sound.pop(part, None)
        file = self.tensors_file(part)
        checksum: int | None = None

        def write(partial: Path) -> None:
            nonlocal checksum
            checksum = write_file(partial, tensors, checksum=True)

        # A part without facts counts as missing, so tensors and facts always belong together.
        self.facts_file(part).unlink(missing_ok=True)
        replace_file(file, write)
        record = {"bytes": file.stat().st_size, "crc32": checksum, "facts": facts}
        write_json(self.facts_file(part), record)
        sync(self.directory)
        self._sound[part] = record

    def remove(self, part: str) -> None:
        """Remove a part, if it is there. Raises OSError."""
        self._sound.pop(part, None)
        self.facts_file(part).unlink(missing_ok=True)
        self.tensors_file(part).unlink(missing_ok=True)

    def tensors_file(self, part: str) -> Path:
        """The path of the tensors of a part."""
        return self.directory / f"{part}.safetensors"

    def facts_file(self, part: str) -> Path:
        """The path of the facts of a part."""
        return self.directory / f"{part}.json"

    def _recorded(self, part: str) -> dict[str, Any] | None:
        """The record of a part if its file has the right size."""
        record = read_json(self.facts_file(part))
        if not isinstance(record, dict) or not record.keys() >= {"bytes", "crc32", "facts"}:
            return None
        file = self.tensors_file(part)
        return record if file.is_file() and file.stat().st_size == record["bytes"] else None

    def _checked(self, part: str) -> dict[str, Any] | None:
        if part not in self._sound:
            record = self._recorded(part)
            if record is None or _checksum(self.tensors_file(part)) != record["crc32"]:
                return None
            self._sound[part] = record
        return self._sound[part]


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while piece := stream.read(2**20):
            checksum = zlib.crc32(piece, checksum)
    return checksum
