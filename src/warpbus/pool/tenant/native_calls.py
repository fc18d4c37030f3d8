"""Loads `execution.cpp`, which does most calls of a batch without Python.

Where it is not compiled, all calls are done by `Executor._call`, with the same results.
"""

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpbus.cuda.torch_extension import compile_module, module_path, open_module
from warpbus.pool.protocol.signature import Argument, DevicePlaceholder, Input, Number
from warpbus.pool.tenant.definitions import Definition
from warpbus.pool.tenant.storages import MAX_STORAGES, CheckedGeometry, Storage

if TYPE_CHECKING:
    from warpbus.pool.tenant.execution import Executor

_SWITCH = "WARPBUS_POOL_FAST_PATH"
_NONE, _ONE, _SEVERAL = 0, 1, 2  # results
_source = Path(__file__).with_name("execution.cpp")


class NativeCalls:
    """The functions of `execution.cpp`. `module` is what its `make_module` returned."""

    def __init__(self, module: Any) -> None:
        self._module = module
        module.use(Storage, MAX_STORAGES)

    def run(self, executor: "Executor", batch: memoryview, at: int) -> int:
        """Do the calls of a batch from `at` on. Returns where it stopped: at its end, or where Python is needed."""
        stopped: int = self._module.run(executor, batch, at)
        return stopped

    def plan(self, definition: Definition) -> Any | None:
        """How calls of a definition are done; None if Python does them."""
        known = definition.only is not None or definition.several or definition.quiet
        signature = definition.signature
        if definition.refusal is not None or definition.guarded or not known or "bool" in signature.numbers:
            return None
        function, keywords = definition.schema, dict(signature.keywords)
        arguments: list[tuple[str, Any] | None] = []
        for position, argument in enumerate(function.arguments):
            if position < len(signature.arguments):
                described = _described(signature.arguments[position], definition)
            elif argument.name in keywords:
                described = _described(keywords[argument.name], definition)
            else:
                arguments.append(None)
                continue
            if described is None:
                return None
            arguments.append(described)
        results = _ONE if definition.only is not None else _SEVERAL if definition.several else _NONE
        try:
            return self._module.prepare(
                function.name,
                function.overload_name,
                tuple(arguments),
                tuple(_place(checked, 0) for checked in definition.inputs),
                "".join(kind[0] for kind in signature.numbers),
                tuple(_place(checked, nbytes) for checked, nbytes in definition.news),
                definition.written,
                results,
            )
        except Exception:  # an argument that does not fit: the call in Python raises what there is to say
            return None


def _place(checked: CheckedGeometry, nbytes: int) -> tuple[Any, ...]:
    geometry = checked.geometry
    return checked, geometry.dtype, geometry.shape, geometry.stride, geometry.offset, nbytes


def _described(argument: Argument, definition: Definition) -> tuple[str, Any] | None:
    """An argument as `prepare` takes it; None if that does not know such arguments."""
    if isinstance(argument, Input):
        return "tensor", (argument.index,)
    if isinstance(argument, Number):
        return "number", (argument.index,)
    if isinstance(argument, DevicePlaceholder):
        return "constant", definition.device
    if not isinstance(argument, tuple) or not any(isinstance(item, Input | Number | tuple) for item in argument):
        return "constant", list(argument) if isinstance(argument, tuple) else argument
    if all(item is None or isinstance(item, Input) for item in argument):
        return "tensors", tuple(item.index if isinstance(item, Input) else -1 for item in argument)
    if all(isinstance(item, Number) for item in argument):
        return "numbers", tuple(item.index for item in argument if isinstance(item, Number))
    return None


def compile_native_calls() -> None:
    """Compile `execution.cpp` into the cache, where it is not there yet. The daemon does it, because the processes of
    leases must not write to the cache."""
    compile_module(_source, _source.parents[1], _SWITCH, logging.getLogger("warpbus.pool"))


def native_calls_path() -> Path | None:
    """Where `compile_native_calls` puts the compiled file; None if it is switched off, or there is no compiler.

    It depends on the compiler's version, which a sandboxed process cannot ask for.
    """
    return module_path(_source, _source.parents[1], _SWITCH)


@functools.cache
def load_native_calls() -> NativeCalls | None:
    """Load `execution.cpp`; None if it is not compiled, or switched off."""
    path = native_calls_path()
    return None if path is None else NativeCallsLoader(path).load()


class NativeCallsLoader:
    """Loads `execution.cpp` once it is compiled: the daemon may be compiling it while leases begin.

    Args:
        path: what `native_calls_path` returned to the daemon; None: nothing is loaded.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def load(self) -> NativeCalls | None:
        """The functions; None if they are not there yet, were given before, or cannot be loaded, which is logged."""
        if self._path is None:
            return None
        try:
            module = open_module(self._path)
        except OSError as error:
            logging.getLogger("warpbus.pool").warning("operators take longer, because %s", error)
            self._path = None
            return None
        if module is None:
            return None
        self._path = None
        return NativeCalls(module)
