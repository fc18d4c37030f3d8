"""Loads `dispatch.cpp`, which does repeated calls of operators without Python.

Where it cannot be compiled, all calls are done by `dispatch.Operator`, with the same results.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload

from warpbus.cuda.torch_extension import load_module
from warpbus.pool.client.dispatch import Operator
from warpbus.pool.client.session import Session
from warpbus.pool.client.tensors import Remote

_PYTHON_KEY = "PrivateUse2"
"""The dispatch key under which `dispatch.cpp` finds the kernels of Python."""

_source = Path(__file__).with_name("dispatch.cpp")


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
    module = load_module(_source, _source.parents[1], "WARPBUS_POOL_FAST_PATH", logging.getLogger("warpbus.pool"))
    return None if module is None else FastPath(module)
