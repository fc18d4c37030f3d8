"""Every compilation of CUDA C++ in the package, known by name before anything is compiled."""

import importlib
import pkgutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from warpbus.cuda.kernel import Unit
from warpbus.errors import DeviceError

CSRC = Path(__file__).parent / "csrc"
_UNITS: dict[str, Unit] = {}


def unit(source: str, *, needs: str = "sm_80", **macros: object) -> Unit:
    """Declare a compilation.

    Args:
        source: a file, relative to `CSRC`.
        needs: the oldest architecture that it compiles for; the only one if it ends with "a".
        macros: names and values for `-D`.
    """
    defined = tuple((name, str(value)) for name, value in macros.items())
    declared = Unit(CSRC / source, CSRC, defined, needs)
    return _UNITS.setdefault(declared.label, declared)


def all_units() -> list[Unit]:
    """All units that operators have declared."""
    operators = importlib.import_module("warpbus.kernels.ops")
    for module in pkgutil.iter_modules(operators.__path__):
        importlib.import_module(f"{operators.__name__}.{module.name}")
    return list(_UNITS.values())


def compile_ahead(folders: Sequence[str], arch: str, element: str) -> None:
    """Compile declared units in the background, so that they are in the cache when they are first needed.

    Args:
        folders: the beginnings of their labels, such as "gptq/" or "step/norm".
        arch: of the GPU that needs them.
        element: an element type; of units that have one, those for this type and for float are compiled.
    """
    wanted = [
        unit
        for unit in _UNITS.values()
        if unit.label.startswith(tuple(folders))
        and unit.runs_on(arch)
        and dict(unit.macros).get("ELEMENT", element) in (element, "float")
    ]
    for unit in wanted:
        threading.Thread(target=_compile_quietly, args=(unit, arch), name="compile", daemon=True).start()


def _compile_quietly(unit: Unit, arch: str) -> None:
    with suppress(DeviceError):  # who needs the unit compiles it again, and says what is wrong
        unit.compile(arch)
