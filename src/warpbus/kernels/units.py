"""Compilations of CUDA C++: operators declare them when they are imported, before anything is compiled."""

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


def declared_units() -> list[Unit]:
    """The units of the operators that were imported; see `compilation` for those of all operators."""
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
        for unit in declared_units()
        if unit.label.startswith(tuple(folders))
        and unit.runs_on(arch)
        and dict(unit.macros).get("ELEMENT", element) in (element, "float")
    ]
    for unit in wanted:
        threading.Thread(target=_compile_quietly, args=(unit, arch), name="compile", daemon=True).start()


def _compile_quietly(unit: Unit, arch: str) -> None:
    with suppress(DeviceError):  # who needs the unit compiles it again, and says what is wrong
        unit.compile(arch)
