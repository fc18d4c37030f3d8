"""Reads and checks the finished parts that `GrowingCheckpoint` has written."""

import zlib
from pathlib import Path
from typing import Any

from warpbus.errors import CheckpointError
from warpbus.formats.files import read_json
from warpbus.formats.safetensors_io import Entry, read_header

OTHERS = ("run", "order")
"""Names that parts cannot have, because of `run.json` and `order.json`."""


class FinishedParts:
    """The finished parts on disk.

    Args:
        output: the output of the run.
    """

    def __init__(self, output: str | Path) -> None:
        resolved = Path(output).resolve()
        self.directory = resolved.with_name(f"{resolved.name}.quantization")
        self._sound: dict[str, dict[str, Any]] = {}

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
