"""Adapters of a served engine that are loaded and left out while it runs."""

from collections import abc
from pathlib import Path

from warpbus.dist import Group
from warpbus.engine.adapters import cut
from warpbus.engine.engine import Engine
from warpbus.engine.messages import ServedEngine
from warpbus.engine.sequence import Sequence, TextPiece
from warpbus.errors import UsageError
from warpbus.formats import Checkpoint
from warpbus.models import read_config
from warpbus.models.adapters import Lora, Prefix, load_adapter
from warpbus.models.parallel import Part


def use_adapters(
    engine: ServedEngine, model: Path, named: abc.Sequence[tuple[str, str]], group: Group
) -> list[tuple[Sequence, TextPiece]]:
    """Have an engine use some adapters, of which it keeps those that it has; the results of its launched steps.

    Args:
        model: the directory of the engine's model.
        named: (name, directory) of each adapter.
        group: the processes that share the model; each calls this.

    Raises:
        UsageError, DeviceError, CheckpointError, TensorError: as `load_adapter` and `Engine.use_adapters`; nothing has
            changed.
    """
    if not isinstance(engine, Engine):
        raise UsageError("this engine cannot change its adapters")
    adapters = [engine.adapters.get(name) or _load(model, name, path, engine, group) for name, path in named]
    return engine.use_adapters(adapters)


def _load(model: Path, name: str, directory: str, engine: Engine, group: Group) -> Lora | Prefix:
    config = read_config(Checkpoint(model, weights=False))
    adapter = load_adapter(directory, config, name=name, dtype=engine.dtype)
    if group.world == 1:
        return adapter
    return cut(adapter, Part(config, group.rank, group.world, engine.model.config.expert_parallel))
