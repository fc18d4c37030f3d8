"""The demo: a small trained GLM that writes classical Chinese poems, and the data that it is measured on."""

from pathlib import Path

from warpbus.errors import CheckpointError

_HERE = Path(__file__).parent


def model_path() -> Path:
    """The directory of the packaged model `glm-poet`."""
    return _existing(_HERE / "glm-poet")


def data_path(name: str) -> Path:
    """A packaged data file: those that `data/README.md` lists."""
    return _existing(_HERE / "data" / name)


def calibration_path() -> Path:
    """Conversations from the training poems, to calibrate quantization on."""
    return data_path("calibration.jsonl")


def evaluation_paths() -> tuple[Path, Path]:
    """Poems that the packaged model was not trained on, and multiple-choice questions."""
    return data_path("validation.jsonl"), data_path("next-verse.jsonl")


def _existing(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(f"{path}: the packaged demo is incomplete: install warpbus again")
    return path
