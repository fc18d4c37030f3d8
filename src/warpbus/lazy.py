"""Public names of packages that are imported on first use: `import warpbus` and the command line load no torch."""

import importlib
from collections.abc import Callable
from typing import Any


def lazy_names(package: str, **modules: tuple[str, ...]) -> Callable[[str], Any]:
    """The `__getattr__` of a package (PEP 562) whose public names are imported on first use.

    Args:
        package: its `__name__`.
        modules: the names of each module of the package. No public name may equal that of a module, which would hide
            it.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)

    return find
