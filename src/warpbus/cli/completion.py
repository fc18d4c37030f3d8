"""Values that the shell completes: of options with a fixed choice, and names of models."""

from collections.abc import Callable
from pathlib import Path

MODELS = ("demo",)


def one_of(*values: str) -> Callable[[str], list[str]]:
    """The completion of an option that takes one of these values."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


def complete_model(incomplete: str) -> list[str]:
    """The packaged model, and directories: those with a config.json as they are, others with a slash to go on."""
    parent = Path(incomplete or ".") if incomplete.endswith("/") or not incomplete else Path(incomplete).parent
    try:
        inside = sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        inside = []
    names = [f"{path}" if (path / "config.json").is_file() else f"{path}/" for path in inside]
    return [name for name in (*MODELS, *names) if name.startswith(incomplete)]
