"""The parts of a checkpoint that is still growing: what `GrowingCheckpoint` has written, and how it is checked."""

import zlib
from pathlib import Path
from typing import Any

from warpbus.errors import CheckpointError
from warpbus.formats.files import read_json
from warpbus.formats.safetensors_io import Entry, read_header

OTHERS = ("run", "order")
"""No names of parts: `run.json` and `order.json` are something else."""


class FinishedParts:
    """The parts that are on the disk, for anyone to read.

    Args:
        output: where the model is going to be.
    """

    def __init__(self, output: str | Path) -> None:
        resolved = Path(output).resolve()
        self.directory = resolved.with_name(f"{resolved.name}.quantization")
        self._sound: dict[str, dict[str, Any]] = {}

    def parts(self) -> list[str]:
        """The names of the parts, sorted; those whose file has not the size it should have are left out."""
        found = sorted(file.stem for file in self.directory.glob("*.json") if file.stem not in OTHERS)
        return [part for part in found if self._recorded(part) is not None]

    def facts(self, part: str) -> Any:
        """What was said about a part when it was committed, or `None` if it is not there or damaged.

        The first call for a part reads its file and compares the checksum.
        """
        record = self._checked(part)
        return None if record is None else record["facts"]

    def read(self, part: str) -> dict[str, Entry]:
        """The tensors of a part by name; none is read yet, see `Entry.read`.

        Raises:
            CheckpointError: if the part is not there or damaged.
        """
        if self._checked(part) is None:
            raise CheckpointError(f"{self.tensors_file(part)}: missing or damaged: run the same command again")
        return read_header(self.tensors_file(part))

    def tensors_file(self, part: str) -> Path:
        """Where the tensors of a part are, once they are."""
        return self.directory / f"{part}.safetensors"

    def facts_file(self, part: str) -> Path:
        """Where the facts of a part are, once they are."""
        return self.directory / f"{part}.json"

    def _recorded(self, part: str) -> dict[str, Any] | None:
        """The record of a part whose file has the size that it should have."""
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
