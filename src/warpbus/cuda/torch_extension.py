"""Modules of C++ that use PyTorch's own libraries, compiled at run time by `host_compiler`.

This machine's compiler compiles each once for each version of PyTorch and Python, into the cache of compiled kernels.
"""

import ctypes
import logging
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from warpbus.cuda.host_compiler import CpuVariant, library_path, load_library, make_library, open_library
from warpbus.errors import DeviceError


def load_module(source: Path, root: Path, switch: str, logger: logging.Logger) -> Any | None:
    """Compile a file of C++ and return what its `make_module` returns.

    Args:
        source: the file.
        root: where its `#include "..."` are looked up.
        switch: an environment variable; 0 switches the module off.
        logger: gets a warning if the module cannot be compiled here.

    Returns:
        The module; None if it is switched off, or not possible here.
    """
    if os.environ.get(switch) == "0":
        return None
    try:
        library = load_library(source, root, _variant())
    except DeviceError as error:
        logger.warning("operators take longer, because %s; %s=0 switches this message off", error, switch)
        return None
    return _module(library)


def compile_module(source: Path, root: Path, switch: str, logger: logging.Logger) -> None:
    """Compile a file of C++ into the cache, to its `module_path`. See `load_module`."""
    if os.environ.get(switch) == "0":
        return
    try:
        make_library(source, root, _variant())
    except (DeviceError, OSError) as error:
        logger.warning("operators take longer, because %s; %s=0 switches this message off", error, switch)


def module_path(source: Path, root: Path, switch: str) -> Path | None:
    """Where `compile_module` puts what it compiles; None if that is switched off, or not possible here."""
    if os.environ.get(switch) == "0":
        return None
    try:
        return library_path(source, root, _variant())
    except (DeviceError, OSError):
        return None


def open_module(path: Path) -> Any | None:
    """What `load_module` returns, of a file that was compiled to this path; None if it is not there yet.

    Raises:
        OSError: it cannot be loaded.
    """
    library = open_library(path)
    return None if library is None else _module(library)


def _module(library: ctypes.CDLL) -> Any:
    make = ctypes.PyDLL(library._name, handle=library._handle).make_module
    make.restype = ctypes.py_object
    return make()


def _variant() -> CpuVariant:
    """The flags of an extension of this PyTorch and this Python."""
    root = Path(torch.__file__).parent
    version = f"torch-{torch.__version__}-{sys.implementation.cache_tag}"
    abi = int(torch.compiled_with_cxx11_abi())
    flags = (
        *("-std=c++20", "-O2", "-fvisibility=hidden", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        *("-isystem", str(root / "include"), "-isystem", sysconfig.get_paths()["include"]),
        *("-Wl,--no-as-needed", f"-L{root / 'lib'}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"),
        f'-DWARPBUS_BUILT_FOR="{version}"',
    )
    return CpuVariant("torch", frozenset(), flags)
