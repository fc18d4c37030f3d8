"""Models as the command line names them."""

from difflib import get_close_matches
from functools import partial
from pathlib import Path

from warpbus.cli.progress import download_bar
from warpbus.demo import model_path
from warpbus.dist.interpreters import permanent_objects
from warpbus.errors import CheckpointError

DEMO = "demo"


def model_directory(name: str | Path, *, processes: int = 1, expert_parallel: bool = False) -> Path:
    """The directory that an argument means: `demo` is the packaged glm-poet, a name on a hub is downloaded unless it is
    on the disk, all else is a path.

    Args:
        processes: that are to share the model.
        expert_parallel: they share out whole experts.

    Raises:
        CheckpointError: there is no such directory, but one of a similar name. Otherwise the path is returned.
        WarpbusError: the model cannot be downloaded, see `formats.hub.find_model`; or its config.json is not supported.
    """
    if name == DEMO:
        return model_path()
    if name != "" and Path(name).is_dir():
        return Path(name)
    with permanent_objects():
        from warpbus.formats.hub import find_model
        from warpbus.models import check_loadable

    check = partial(check_loadable, processes=processes, expert_parallel=expert_parallel)
    with download_bar(str(name)) as show:
        found = find_model(str(name), progress=show, check=check)
    if not found.exists():
        near = get_close_matches(str(name), [DEMO, *(path.name for path in Path().iterdir() if path.is_dir())], n=1)
        if near:
            raise CheckpointError(f"{name}: there is no such model: did you mean {near[0]}?")
    return found


def is_here(name: str) -> bool:
    """Whether an argument means a directory, for which no cache and no hub is looked at."""
    return name == DEMO or (name != "" and Path(name).exists())


def model_name(name: str) -> str:
    """The name for the model of an argument: the directory's name, or the name on its hub without its owner."""
    if name == DEMO:
        return model_path().name
    if not is_here(name):
        from warpbus.formats.hub import parse_name

        found = parse_name(name)
        if found is not None:
            return found.short
    return Path(name).resolve().name
