"""Finished layers, kept next to the output until the model is complete, so that a run that was cut off can go on.

`OUTPUT.quantization/` holds `run.json`, which says by a hash what decides the result, and a small checkpoint for each
finished layer. Each appears whole or not at all, since `CheckpointWriter` writes it. What was kept for other settings
is removed.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from warpbus.errors import StorageError, WarpbusError
from warpbus.formats import Checkpoint, CheckpointWriter
from warpbus.quantization.report import LayerResult

_RUN, _RESULTS = "run.json", "results.json"


class FinishedLayers:
    """What a run has finished so far.

    Args:
        output: where the model is going to be.
        identity: all that decides the result; what was kept for another identity is removed.

    Raises:
        StorageError: if the directory cannot be written, or is there and not a directory of this kind.
    """

    def __init__(self, output: Path, identity: Mapping[str, Any]) -> None:
        resolved = output.resolve()
        self.directory = resolved.with_name(f"{resolved.name}.quantization")
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        try:
            if self.directory.exists() and self._kept_for() != digest:
                self._discard()
            if not self.directory.exists():
                self.directory.mkdir(parents=True)
                (self.directory / _RUN).write_text(json.dumps({"identity": digest}), encoding="utf-8")
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"{self.directory}: cannot be written: {error.strerror or error}") from error

    def load(self, layer: int) -> tuple[Checkpoint, list[LayerResult]] | None:
        """The tensors and results of a layer, or `None` if it is not finished."""
        directory = self._layer(layer)
        if not directory.is_dir():
            return None
        try:
            checkpoint = Checkpoint(directory)
            rows = (checkpoint.load_json(_RESULTS) or {})["rows"]
            return checkpoint, [LayerResult(**row) for row in rows]
        except (WarpbusError, KeyError, TypeError):
            # Damaged, by a disk or by hand: the layer is done again.
            shutil.rmtree(directory, ignore_errors=True)
            return None

    def save(self, layer: int, tensors: Mapping[str, Tensor], results: list[LayerResult]) -> None:
        """Keep a finished layer. Raises StorageError if it cannot be written."""
        with CheckpointWriter(self._layer(layer)) as writer:
            writer.write_json("config.json", {})
            writer.write_json(_RESULTS, {"rows": [asdict(row) for row in results]})
            for name, tensor in tensors.items():
                writer.add(name, tensor)
            writer.finish()

    def remove(self) -> None:
        """Forget everything."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _layer(self, index: int) -> Path:
        return self.directory / f"layer-{index:05}"

    def _kept_for(self) -> str | None:
        """The hash that the directory belongs to; `None` if it is none of ours."""
        try:
            found = json.loads((self.directory / _RUN).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found.get("identity") if isinstance(found, dict) else None

    def _discard(self) -> None:
        if self._kept_for() is None and any(self.directory.iterdir()):
            raise StorageError(
                f"{self.directory}: is in the way of the finished layers, and holds something else: "
                "move it, or name another output"
            )
        self.remove()
