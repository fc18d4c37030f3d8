"""Adapters as the command line names them: `warpbus chat --adapter DIR`, `warpbus serve --adapter NAME=DIR`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from warpbus.errors import CheckpointError, UsageError

Named = tuple[str, str]
"""An adapter's name and directory."""


def one_adapter(directory: Path) -> Named:
    """An adapter that is called by its directory's name. Raises UsageError where there is no such directory."""
    if not directory.is_dir():
        raise UsageError(f"--adapter {directory}: there is no such directory: give a LoRA's or a prefix's")
    return directory.resolve().name, str(directory)


def adapters_by_model(given: Sequence[str], models: Mapping[str, Path]) -> dict[str, tuple[Named, ...]]:
    """Deal adapters out to the models that are served.

    Args:
        given: NAME=DIR, which goes to the only model that it fits, or MODEL:NAME=DIR.
        models: directories by name.

    Returns:
        the adapters of each model, in the order in which they were given.

    Raises:
        UsageError: one has no name or another's, names no model, has no directory, or fits no model or several.
    """
    found: dict[str, list[Named]] = {name: [] for name in models}
    taken = set(models)
    for text in given:
        label, equals, directory = text.partition("=")
        model = next((model for model in models if label.startswith(f"{model}:")), None)
        name = label if model is None else label.removeprefix(f"{model}:")
        if not equals or not name:
            raise UsageError(f"--adapter {text}: expected NAME=DIR, or MODEL:NAME=DIR where there are several models")
        if name in taken:
            raise UsageError(f"--adapter {text}: something else is called {name}: give it a name of its own")
        if not Path(directory).is_dir():
            raise UsageError(f"--adapter {text}: there is no directory {directory!r}: give a LoRA's or a prefix's")
        taken.add(name)
        # The engine's processes may run elsewhere on this machine.
        found[model or _fitting(text, directory, models)].append((name, str(Path(directory).resolve())))
    return {model: tuple(adapters) for model, adapters in found.items()}


def _fitting(text: str, directory: str, models: Mapping[str, Path]) -> str:
    if len(models) == 1:
        return next(iter(models))
    from warpbus.formats import Checkpoint
    from warpbus.models import read_config
    from warpbus.models.adapters import load_adapter

    fitting, reasons = [], []
    for model, path in models.items():
        config = read_config(Checkpoint(path, weights=False))
        try:
            load_adapter(directory, config)
        except CheckpointError as error:
            reasons.append(f"{model}: {error}")
        else:
            fitting.append(model)
    if not fitting:
        raise UsageError(f"--adapter {text}: it fits none of the models ({'; '.join(reasons)})")
    if len(fitting) > 1:
        raise UsageError(
            f"--adapter {text}: it fits {' and '.join(fitting)}: say which by {fitting[0]}:{text}, for instance"
        )
    return fitting[0]
