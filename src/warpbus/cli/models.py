"""Models as the command line names them."""

from pathlib import Path

from warpbus.cli.progress import download_bar
from warpbus.demo import model_path

DEMO = "demo"


def model_directory(name: str | Path) -> Path:
    """The directory that an argument means: `demo` is the packaged glm-poet, a name on a hub is downloaded unless it is
    on the disk, all else is a path.

    Raises:
        WarpbusError: what keeps a model from being downloaded, see `formats.hub.find_model`.
    """
    if name == DEMO:
        return model_path()
    if Path(name).exists():
        return Path(name)
    from warpbus.formats.hub import find_model

    with download_bar(str(name)) as show:
        return find_model(str(name), progress=show)


def model_name(name: str) -> str:
    """What to call the model of an argument: the directory's name, or the name on its hub without its owner."""
    if name == DEMO:
        return model_path().name
    if not Path(name).exists():
        from warpbus.formats.hub import parse_name

        found = parse_name(name)
        if found is not None:
            return found.short
    return Path(name).resolve().name
