"""Executed by each Python interpreter of a program under `warpbus pool run --remote`, before the program.

It waits for the first import of torch and then makes `cuda` mean the leased GPU. Only the standard library is imported
here, and none of it that Python has not loaded already: programs without torch start as before.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _TorchFinder:
    """Finds torch with the other finders, and gives it a loader that installs the device afterwards."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    """A loader that installs the device when it has executed the module; in all else the loader that it replaces."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            installation = importlib.import_module("warpbus.pool.client.as_cuda.install")
        except ImportError as error:
            # No ImportError: programs that can do without torch would go on, on the CPU.
            raise RuntimeError(
                f"warpbus pool run --remote: {sys.executable} cannot import warpbus ({error}): install "
                "the same version of Warpbus for this Python, or start the program with the Python that has it"
            ) from None
        installation.install()


def _run_the_next() -> None:
    """Execute the sitecustomize of this Python, which this file hides."""
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _TorchFinder())
_run_the_next()
