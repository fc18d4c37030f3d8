"""All compilations of CUDA C++ in the package."""

import importlib
import pkgutil

from warpbus.cuda.kernel import Unit
from warpbus.kernels import ops
from warpbus.kernels.units import declared_units


def all_units() -> list[Unit]:
    """The units of all operators, which this imports."""
    for module in pkgutil.iter_modules(ops.__path__):
        importlib.import_module(f"{ops.__name__}.{module.name}")
    return declared_units()
