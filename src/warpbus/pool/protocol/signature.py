"""A kind of call: an operator with the geometry of its tensors and everything else but the numbers.

A program calls the same operators with the same shapes over and over, so that a kind of call is described once on a
connection, checked once on either side, and then named by its number: a call costs a few bytes and no parsing.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch

from warpbus.errors import ProtocolError
from warpbus.pool.protocol.geometry import MAX_DIMENSIONS, Geometry
from warpbus.pool.protocol.operators import operator as allowed
from warpbus.pool.protocol.wire import decode, encode

NumberKind = Literal["int", "float", "bool"]
NUMBER_KINDS: tuple[NumberKind, ...] = ("int", "float", "bool")
MAX_TENSORS = 1 << 16
MAX_DEPTH = 4
MAX_NAME = 200


# The one allowed operator that writes what its schema does not say.
_UNDECLARED = {"aten::native_batch_norm": ("running_mean", "running_var")}


@dataclass(frozen=True, slots=True)
class Input:
    """The `index`-th tensor of a call stands here."""

    index: int


@dataclass(frozen=True, slots=True)
class Number:
    """The `index`-th number of a call stands here: learning rates change at every step and define nothing."""

    kind: NumberKind
    index: int


@dataclass(frozen=True, slots=True)
class DevicePlaceholder:
    """The tenant's device stands here: a client does not know which one that is."""


Argument: TypeAlias = (
    "bool | int | float | complex | str | torch.dtype | torch.layout | torch.memory_format | Input | Number"
    " | DevicePlaceholder | tuple[Argument, ...] | None"
)


@dataclass(frozen=True, slots=True)
class New:
    """A result in a storage of its own, `nbytes` long."""

    geometry: Geometry
    nbytes: int


@dataclass(frozen=True, slots=True)
class Same:
    """A result that is the `index`-th input: operators in place, and `out=`."""

    index: int


@dataclass(frozen=True, slots=True)
class Fixed:
    """A result that is no tensor and follows from the kind of call: some kernels give lengths back."""

    value: int


Output: TypeAlias = New | Same | Fixed | None


@dataclass(frozen=True)
class Signature:
    """A kind of call.

    Args:
        operator: its full name, such as "aten::add.Tensor".
        arguments: the positional ones.
        keywords: the others, by name.
        inputs: geometries of the tensors, in the order of `Input.index`.
        numbers: kinds of the numbers, in the order of `Number.index`.
        outputs: the results in order, lists flattened; None for a tensor that is not there. None altogether: known
            only after the call ran, as with `nonzero`, or no tensors.
    """

    operator: str
    arguments: tuple[Argument, ...]
    keywords: tuple[tuple[str, Argument], ...]
    inputs: tuple[Geometry, ...]
    numbers: tuple[NumberKind, ...]
    outputs: tuple[Output, ...] | None = None

    @property
    def results(self) -> int:
        """The number of result handles in a call of this kind."""
        if self.outputs is None:
            return len(allowed(self.operator)._schema.returns)
        return sum(isinstance(output, New) for output in self.outputs)

    @cached_property
    def written(self) -> tuple[int, ...]:
        """Indices of the inputs that the operator writes, by its schema, or in spite of it."""
        schema = allowed(self.operator)._schema.arguments
        undeclared = _UNDECLARED.get(self.operator, ())
        keywords = dict(self.keywords)
        found: set[int] = set()
        for position, argument in enumerate(schema):
            declared = argument.alias_info is not None and argument.alias_info.is_write
            if not declared and argument.name not in undeclared:
                continue
            if position < len(self.arguments):
                _inputs(self.arguments[position], found)
            elif argument.name in keywords:
                _inputs(keywords[argument.name], found)
        return tuple(sorted(found))

    def encode(self) -> bytes:
        """As bytes of `warpbus.pool.protocol.wire`."""
        return encode(
            [
                self.operator,
                [_plain(argument) for argument in self.arguments],
                [[name, _plain(argument)] for name, argument in self.keywords],
                [_flat(geometry) for geometry in self.inputs],
                list(self.numbers),
                None if self.outputs is None else [_plain_output(output) for output in self.outputs],
            ]
        )

    @staticmethod
    def decode(data: bytes | memoryview) -> "Signature":
        """From what `encode` gave.

        Raises:
            ProtocolError: the bytes are no signature, or its parts contradict each other.
            DeviceError: the pool does not run this operator.
        """
        value: Any = decode(data)
        try:
            operator, arguments, keywords, inputs, numbers, outputs = value
            signature = Signature(
                operator=_name(operator),
                arguments=tuple(_argument(argument) for argument in _list(arguments)),
                keywords=tuple((_name(name), _argument(argument)) for name, argument in _list(keywords)),
                inputs=tuple(_geometry(geometry) for geometry in _list(inputs)),
                numbers=tuple(NUMBER_KINDS[NUMBER_KINDS.index(kind)] for kind in _list(numbers)),
                outputs=None if outputs is None else tuple(_output(output) for output in _list(outputs)),
            )
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"the definition of a call is malformed: {error}") from None
        allowed(signature.operator)
        _check(signature)
        return signature


def _check(signature: Signature) -> None:
    """Every input and number stands somewhere, once, and nothing else is named."""
    inputs: list[Input] = []
    numbers: list[Number] = []
    for argument in (*signature.arguments, *(value for _, value in signature.keywords)):
        _leaves(argument, inputs, numbers)
    if [at.index for at in inputs] != list(range(len(signature.inputs))):
        raise ProtocolError(f"a call of {signature.operator} names tensors that it does not carry")
    if [(at.kind, at.index) for at in numbers] != [(kind, at) for at, kind in enumerate(signature.numbers)]:
        raise ProtocolError(f"a call of {signature.operator} names numbers that it does not carry")
    _check_numbers(signature)
    for output in signature.outputs or ():
        if isinstance(output, Same) and not 0 <= output.index < len(signature.inputs):
            raise ProtocolError(f"a call of {signature.operator} gives a tensor that it does not carry")
        if isinstance(output, New):
            output.geometry.check(output.nbytes)
    if max(len(signature.inputs), len(signature.numbers), len(signature.outputs or ())) > MAX_TENSORS:
        raise ProtocolError(f"a call of {signature.operator} carries more than {MAX_TENSORS} tensors")


def _check_numbers(signature: Signature) -> None:
    """No size, axis or flag changes from call to call: the checks of a kind of call would not hold for its calls."""
    if not signature.numbers:
        return
    types = {each.name: str(each.type) for each in allowed(signature.operator)._schema.arguments}
    for name, argument in (*zip(types, signature.arguments, strict=False), *signature.keywords):
        numbers: list[Number] = []
        _leaves(argument, [], numbers)
        kind = types.get(name, "")
        if numbers and ("int" in kind or "bool" in kind):
            raise ProtocolError(f"a call of {signature.operator}: {name} belongs to the definition, not to each call")


def _leaves(argument: Argument, inputs: list[Input], numbers: list[Number]) -> None:
    if isinstance(argument, Input):
        inputs.append(argument)
    elif isinstance(argument, Number):
        numbers.append(argument)
    elif isinstance(argument, tuple):
        for item in argument:
            _leaves(item, inputs, numbers)


def _inputs(argument: Argument, found: set[int]) -> None:
    leaves: list[Input] = []
    _leaves(argument, leaves, [])
    found.update(leaf.index for leaf in leaves)


# Wire values: tensors, numbers and the device are marked dictionaries, everything else stands for itself.


def _plain(argument: Argument) -> Any:
    if isinstance(argument, Input):
        return {"input": argument.index}
    if isinstance(argument, Number):
        return {"number": argument.kind, "index": argument.index}
    if isinstance(argument, DevicePlaceholder):
        return {"device": None}
    if isinstance(argument, tuple):
        return [_plain(item) for item in argument]
    return argument


def _argument(value: Any, depth: int = 0) -> Argument:
    if isinstance(value, list | tuple):
        if depth == MAX_DEPTH:
            raise ValueError("lists of lists of lists")
        return tuple(_argument(item, depth + 1) for item in value)
    if isinstance(value, dict):
        if set(value) == {"input"}:
            return Input(_whole(value["input"]))
        if set(value) == {"number", "index"}:
            return Number(NUMBER_KINDS[NUMBER_KINDS.index(value["number"])], _whole(value["index"]))
        if set(value) == {"device"}:
            return DevicePlaceholder()
        raise ValueError(f"an argument with the keys {sorted(value)[:4]!r:.80}")
    if isinstance(value, bytes):
        raise ValueError("an argument of bytes")
    return value


def _flat(geometry: Geometry) -> list[Any]:
    return [geometry.dtype, list(geometry.shape), list(geometry.stride), geometry.offset]


def _geometry(value: Any) -> Geometry:
    dtype, shape, stride, offset = _list(value)
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a geometry without a dtype")
    # Before anything is computed of them: products of very many sizes would take very long.
    axes = max(len(_list(shape)), len(_list(stride)))
    if axes > MAX_DIMENSIONS:
        raise ValueError(f"a tensor of {axes} axes, above {MAX_DIMENSIONS}")
    geometry = Geometry(
        dtype, tuple(_whole(n) for n in _list(shape)), tuple(_whole(n) for n in _list(stride)), _whole(offset)
    )
    geometry.check(1 << 48)
    return geometry


def _plain_output(output: Output) -> Any:
    if isinstance(output, New):
        return [*_flat(output.geometry), output.nbytes]
    if isinstance(output, Fixed):
        return {"fixed": output.value}
    return output.index if isinstance(output, Same) else None


def _output(value: Any) -> Output:
    if value is None:
        return None
    if isinstance(value, int):
        return Same(_whole(value))
    if isinstance(value, dict) and set(value) == {"fixed"}:
        return Fixed(_whole(value["fixed"]))
    *geometry, nbytes = _list(value)
    return New(_geometry(geometry), _whole(nbytes))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a list, found {type(value).__name__}")
    return list(value)


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME or not value.isprintable():
        raise ValueError(f"expected the name of an operator or an argument, found {value!r:.40}")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a whole number, found {value!r:.40}")
    return value
