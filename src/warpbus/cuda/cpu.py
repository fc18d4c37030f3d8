"""The CPU of this machine: its name, its instructions, and the C++ compiler for it. Loads no torch."""

import functools
import os
import platform
import shutil
from pathlib import Path

from warpbus.errors import DeviceError

INSTALL = "install g++ or clang++, or let CXX name one"
_COMPILERS = ("c++", "g++", "clang++")


def cpu_model() -> str:
    """The CPU's name as the system tells it, such as "AMD EPYC 7B13"; its architecture where it tells none."""
    return _fact("model name") or platform.machine()


def cpu_instructions() -> frozenset[str]:
    """The instruction sets of an x86 CPU by the names of Linux, such as "avx2"; empty for others."""
    return frozenset(_fact("flags").split())


@functools.cache
def find_compiler() -> tuple[str, ...]:
    """The command of the C++ compiler: `CXX`, else a common one.

    Raises:
        DeviceError: there is none.
    """
    own = os.environ.get("CXX")
    if own:
        return tuple(own.split())
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if found:
        return (found,)
    raise DeviceError(f"no C++ compiler was found ({', '.join(_COMPILERS)}): {INSTALL}")


def _fact(name: str) -> str:
    """The system's entry for the first core under a name; empty if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in found if key.strip() == name), "")
