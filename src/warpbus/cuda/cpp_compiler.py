"""The C++ compiler of this machine: for kernels of the CPU, and for CUDA programs that run on it."""

import functools
import os
import shutil

from warpbus.errors import DeviceError

INSTALL = "install g++ or clang++, or let CXX name one"
_COMPILERS = ("c++", "g++", "clang++")


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
