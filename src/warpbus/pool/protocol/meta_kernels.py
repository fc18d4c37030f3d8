"""Lets PyTorch's meta kernels run without importing its compiler.

Many meta kernels are Python functions that `torch._disable_dynamo` has wrapped: the first call of one imports
torch._dynamo, which takes 0.6 s and 40 MB in each client and in each tenant process. The wrapper keeps the function
that it calls as an attribute of the wrapped function, and imports nothing if the attribute is there. A PyTorch that
keeps it elsewhere imports its compiler as before.
"""

import functools
from types import CellType
from typing import Any

from torch._compile import _disable_dynamo
from torch._decomp import global_decomposition_table

_WRAPPER = getattr(_disable_dynamo(lambda: None), "__code__", None)


@functools.cache
def skip_compiler() -> None:
    """Let all meta kernels be called directly. The compiler does not trace them: it records the operators instead."""
    seen: set[int] = set()
    for table in global_decomposition_table.values():
        for kernel in table.values():
            _unwrap(kernel, seen)


def _unwrap(function: Any, seen: set[int]) -> None:
    """Set the attribute for each wrapper among a function and those that it closes over."""
    if id(function) in seen:
        return
    seen.add(id(function))
    for inner in filter(callable, map(_content, getattr(function, "__closure__", None) or ())):
        if function.__code__ is _WRAPPER:
            setattr(inner, "__dynamo_disable", inner)
        _unwrap(inner, seen)


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None
