"""Models as the command line names them."""

from pathlib import Path

from warpbus.demo import model_path

DEMO = "demo"


def model_directory(name: str) -> Path:
    """The directory that an argument means: `demo` is the packaged glm-poet, all else is a path."""
    return model_path() if name == DEMO else Path(name)
