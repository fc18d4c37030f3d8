"""The parameters of a kernel: declared once by name and C type, checked and packed for a launch as C lays them out."""

import operator
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from warpbus.cuda.memory_size import rounded_up

_POINTER = ("Q", 8, 8)
# The code of `struct`, bytes and alignment of what is no pointer; the maps are those of csrc/common/ptx.cuh.
_VALUES = {
    "int": ("i", 4, 4),
    "unsigned int": ("I", 4, 4),
    "long long": ("q", 8, 8),
    "float": ("f", 4, 4),
    "TensorMap": ("128s", 128, 64),
    "TileMaps": ("256s", 256, 64),
}


class Parameters:
    """The parameters of a kernel in the order of its signature.

    Args:
        signature: C types and names as the kernel has them, `"const ELEMENT* x, ELEMENT* out, long long size"`, without
            `__restrict__`, `__grid_constant__` and namespaces. A type is a pointer, int, unsigned int, long long,
            float, TensorMap, TileMaps, or one of `structs`.
        structs: the fields of each struct that is passed by value, written like `signature`. A launch gives the fields
            by their own names, so no name may occur twice.

    Attributes:
        types: the C type of each parameter by its name.
        structs: the C type of each field by its name, for each struct by its name.
        layout: offset and size of each parameter, bytes.
        offsets: the offsets alone.

    Raises:
        ValueError: a type is unknown, or a name occurs twice.
    """

    def __init__(self, signature: str, **structs: str):
        self.types = _declared(signature)
        self.structs = {name: _declared(fields) for name, fields in structs.items()}
        self._names: list[str] = []
        self._codes: list[str] = []
        self.layout: list[tuple[int, int]] = []
        parts, end = ["<"], 0
        for name, kind in self.types.items():
            fields = self.structs.get(kind, {name: kind})
            sizes = [_value(field) for field in fields.values()]
            alignment = max(aligned for _, _, aligned in sizes)
            begin = rounded_up(end, alignment)
            parts.append(f"{begin - end}x")
            end = begin
            for code, size, aligned in sizes:
                parts.append(f"{rounded_up(end, aligned) - end}x{code}")
                end = rounded_up(end, aligned) + size
                self._codes.append(code)
            parts.append(f"{rounded_up(end, alignment) - end}x")
            end = rounded_up(end, alignment)
            self._names += fields
            self.layout.append((begin, end - begin))
        if len(set(self._names)) < len(self._names):
            raise ValueError(f"a parameter or field occurs twice in ({', '.join(self._names)}): give each its own name")
        self.offsets = tuple(offset for offset, _ in self.layout)
        first, *others = self._names
        # With one name alone, `itemgetter` gives no tuple.
        self._ordered: Callable[[Mapping[str, Any]], tuple[Any, ...]] = (
            operator.itemgetter(*self._names) if others else lambda arguments: (arguments[first],)
        )
        self._packer = struct.Struct("".join(parts))
        self._pointers = [place for place, code in enumerate(self._codes) if code == _POINTER[0]]
        self._maps = [(place, int(code[:-1])) for place, code in enumerate(self._codes) if code.endswith("s")]

    def pack(self, arguments: Mapping[str, Any]) -> tuple[bytes, Tensor | None]:
        """All arguments in one buffer, each at its offset; and the first tensor among them.

        Args:
            arguments: by the names of parameters and fields: a tensor or `None` (null) for a pointer, `bytes` for a
                map, else a number.

        Raises:
            ValueError: one is missing, unknown, or does not fit its type.
        """
        first = None
        try:
            values = list(self._ordered(arguments))
            for place in self._pointers:
                tensor = values[place]
                if tensor is None:
                    values[place] = 0
                    continue
                if first is None:
                    first = tensor
                values[place] = tensor.data_ptr()
            packed = self._packer.pack(*values)
        except (KeyError, AttributeError, struct.error):
            raise ValueError(self._mistake(arguments)) from None
        # `struct` cuts and fills bytes of another length, and arguments that nothing reads do not disturb it.
        if len(arguments) != len(values):
            raise ValueError(self._mistake(arguments))
        for place, size in self._maps:
            if len(values[place]) != size:
                raise ValueError(self._mistake(arguments))
        return packed, first

    def _mistake(self, arguments: Mapping[str, Any]) -> str:
        """The error of arguments that cannot be packed."""
        missing = [name for name in self._names if name not in arguments]
        unknown = [name for name in arguments if name not in self._names]
        if missing or unknown:
            return f"missing arguments: {', '.join(missing) or 'none'}, unknown ones: {', '.join(unknown) or 'none'}"
        wrong = [
            f"{name} = {type(arguments[name]).__name__} {arguments[name]!r:.40}"
            for name, code in zip(self._names, self._codes, strict=True)
            if not _fits(arguments[name], code)
        ]
        return f"an argument does not fit its parameter: {', '.join(wrong)}"


def _declared(signature: str) -> dict[str, str]:
    """The types by name of `"const float* x, int n"`."""
    found: dict[str, str] = {}
    for each in signature.split(","):
        match = re.fullmatch(r"(.+?[ *])(\w+)", each.strip())
        if match is None:
            raise ValueError(f"{each.strip()!r} is no parameter: write a C type and a name")
        if match[2] in found:
            raise ValueError(f"{match[2]} occurs twice in ({signature}): give each parameter its own name")
        found[match[2]] = match[1].strip()
    return found


def _value(kind: str) -> tuple[str, int, int]:
    """The code of `struct`, bytes and alignment of a C type."""
    if kind.endswith("*"):
        return _POINTER
    if kind not in _VALUES:
        raise ValueError(f"the C type {kind!r} is not known: use a pointer, {', '.join(_VALUES)} or a declared struct")
    return _VALUES[kind]


def _fits(value: Any, code: str) -> bool:
    if code == _POINTER[0]:
        return value is None or isinstance(value, Tensor)
    if code.endswith("s"):
        return isinstance(value, bytes) and len(value) == int(code[:-1])
    try:
        struct.pack(code, value)
    except struct.error:
        return False
    return True
