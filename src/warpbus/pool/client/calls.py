"""Builds the signature of an operator's call from its arguments."""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from warpbus.pool.client.tensors import geometry_of
from warpbus.pool.protocol.geometry import Geometry
from warpbus.pool.protocol.inference import WITHOUT_DROPOUT
from warpbus.pool.protocol.signature import Argument, DevicePlaceholder, Input, Number, NumberKind, Signature

NUMBER_KINDS: dict[type, NumberKind] = {int: "int", float: "float", bool: "bool"}

# PyTorch gives the 2.0 of `x * 2.0` in place of a tensor.
_NUMBER_TYPES = frozenset({"number", "Optional[number]", "List[number]", "float", "Optional[float]", "Tensor"})

# Their numbers decide about the shape of the result, or whether there is one.
_DEFINED_BY_NUMBERS = frozenset({"arange", "geometric", "geometric_", "histc", "range"}) | WITHOUT_DROPOUT


def number_positions(overload: OpOverload) -> dict[str, bool]:
    """For each argument of an operator, whether it is a number that may change from call to call."""
    defined = overload._overloadpacket.__name__ in _DEFINED_BY_NUMBERS
    return {a.name: not defined and str(a.type) in _NUMBER_TYPES for a in overload._schema.arguments}


def goes_along(value: Any, is_number: bool) -> bool:
    """Whether a value that is no tensor is sent with each call, instead of being part of the definition."""
    if not is_number or value.__class__ not in NUMBER_KINDS:
        return False
    return value.__class__ is not int or -(1 << 63) <= value < 1 << 63


class SignatureBuilder:
    """Builds the signature of one call; a scalar tensor of the CPU becomes a number."""

    def __init__(self, overload: OpOverload, numbers: dict[str, bool]) -> None:
        self._operator = overload.name()
        self._is_number = numbers
        self._inputs: list[Geometry] = []
        self._numbers: list[NumberKind] = []

    def signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        """The call's kind, without outputs."""
        arguments = tuple(self._argument(v, n) for v, n in zip(args, self._is_number.values(), strict=False))
        keywords = tuple((name, self._argument(value, self._is_number[name])) for name, value in kwargs.items())
        return Signature(self._operator, arguments, keywords, tuple(self._inputs), tuple(self._numbers))

    def _argument(self, value: Any, is_number: bool) -> Argument:
        if isinstance(value, Tensor):
            self._inputs.append(geometry_of(value))
            return Input(len(self._inputs) - 1)
        if isinstance(value, Wrapped):
            return self._number(value.number)
        if goes_along(value, is_number):
            return self._number(value)
        if isinstance(value, list | tuple):
            return tuple(self._argument(item, is_number) for item in value)
        if isinstance(value, torch.device):
            return DevicePlaceholder()
        return value  # all other values of PyTorch's dispatcher are plain

    def _number(self, value: Any) -> Number:
        self._numbers.append(NUMBER_KINDS[value.__class__])
        return Number(self._numbers[-1], len(self._numbers) - 1)


class Wrapped:
    """A tensor that PyTorch has made of a number of Python's, and that counts as one where dtypes are promoted."""

    __slots__ = ("number",)

    def __init__(self, number: Any) -> None:
        self.number = number
