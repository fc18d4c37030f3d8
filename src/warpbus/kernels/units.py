"""Every compilation of CUDA C++ in the package, known by name before anything is compiled."""

import importlib
import pkgutil
from pathlib import Path

from warpbus.cuda.kernel import Unit

CSRC = Path(__file__).parent / "csrc"
_UNITS: dict[str, Unit] = {}


def unit(source: str, *, needs: str = "sm_80", **macros: object) -> Unit:
    """Declare a compilation.

    Args:
        source: a file, relative to `CSRC`.
        needs: the oldest architecture that it compiles for, or the only one, where it ends with "a".
        macros: what `-D` defines.
    """
    defined = tuple((name, str(value)) for name, value in macros.items())
    declared = Unit(CSRC / source, CSRC, defined, needs)
    return _UNITS.setdefault(declared.label, declared)


def all_units() -> list[Unit]:
    """Everything that any operator declared."""
    operators = importlib.import_module("warpbus.kernels.ops")
    for module in pkgutil.iter_modules(operators.__path__):
        importlib.import_module(f"{operators.__name__}.{module.name}")
    return list(_UNITS.values())
