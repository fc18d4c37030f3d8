"""Loads `dispatch.cpp`, which does repeated calls of operators without Python.

This machine's compiler compiles it once for each version of PyTorch and Python, into the cache of `warpbus.cuda.jit`.
Where that cannot be, all calls are done by `dispatch.Operator`, with the same results.
"""

import ctypes
import logging
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload

from warpbus.cuda.host_compiler import CpuVariant, load_library
from warpbus.errors import DeviceError
from warpbus.pool.client.dispatch import Operator
from warpbus.pool.client.session import Session
from warpbus.pool.client.tensors import Remote

_SWITCH = "WARPBUS_POOL_FAST_PATH"
_PYTHON_KEY = "PrivateUse2"
"""The dispatch key under which `dispatch.cpp` finds the kernels of Python."""

_source = Path(__file__).with_name("dispatch.cpp")
_log = logging.getLogger("warpbus.pool")


class FastPath:
    """The kernels of `dispatch.cpp`. `module` is what its `make_module` returned."""

    def __init__(self, module: Any) -> None:
        self._module = module
        module.register_guard()

    def register(self, library: torch.library.Library, overload: OpOverload, operator: Operator, kernel: Any) -> None:
        """Register an operator's kernel: `kernel`, and for repeated calls what `operator` has learned in it."""
        namespace, _, name = overload.name().partition("::")
        library.impl(name, kernel, _PYTHON_KEY)
        self._module.register(namespace, name, operator, operator.positions)

    def register_view(self, overload: OpOverload) -> None:
        """Register the kernel of a view."""
        self._module.register_view(overload.name().partition("::")[2])

    def use(self, session: Session | None) -> None:
        """Do calls for this session; None leaves all calls to Python."""
        if session is None:
            self._module.leave()
            return
        lock = session.lock
        self._module.use(session, session.memory, lock.acquire, lock.release, session.call, session.freed, Remote)


def load_fast_path() -> FastPath | None:
    """Compile and load `dispatch.cpp`; None if that is switched off, or not possible here, which is logged."""
    if os.environ.get(_SWITCH) == "0":
        return None
    try:
        library = load_library(_source, _source.parent, _variant())
    except DeviceError as error:
        _log.warning("operators take the client longer, because %s; %s=0 switches this message off", error, _SWITCH)
        return None
    make = ctypes.PyDLL(library._name, handle=library._handle).make_module
    make.restype = ctypes.py_object
    return FastPath(make())


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
