"""Kinds of calls, prepared: everything about a call that its signature decides is decided once.

What a call allocates is known before it runs: its definition says so, and is checked here by meta tensors. Only a
dynamic call is charged afterwards. Results are kept as they come if they are what was announced - the dtype,
shape and strides, in a storage of their own of just the right size - and else copied to where they were announced.
"""

import math
from collections.abc import Callable, Sequence, Set
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import DeviceError, ProtocolError
from warpbus.pool.protocol.failures import CallFailure
from warpbus.pool.protocol.geometry import Geometry, contiguous
from warpbus.pool.protocol.inference import flat, infer
from warpbus.pool.protocol.instructions import layout
from warpbus.pool.protocol.operators import operator
from warpbus.pool.protocol.signature import Argument, DevicePlaceholder, Input, New, Number, Output, Signature
from warpbus.pool.tenant.indices import guarded
from warpbus.pool.tenant.shape_checks import check_shapes
from warpbus.pool.tenant.storages import CheckedGeometry, Storages

Values = Sequence[Any]
Build = Callable[[Values], Any]

# They give memory as it is. A lease's new memory may have been another tenant's a moment ago.
_UNWRITTEN = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_permuted", "aten::empty_strided", "aten::new_empty"}
    | {"aten::new_empty_strided"}
)
ALONE = 2
"""Uses of a storage that only one tensor has: the tensor's, and that of the object that asks."""


class Definition:
    """A signature, ready to be called.

    Args:
        encoded: the signature as it came.
        storages: where its tensors will be.

    Attributes:
        layout: the layout of a call's data.
        schema: of the operator.
        device: where it runs.
        inputs: the checked geometries of its tensors; so many handles begin a call's operands.
        numbers: how many of them follow.
        news: its new results, in order; the rest of the operands are their handles.
        charge: bytes that they are charged with together.
        only: the place of the one new result that is all it gives, or None: most calls are so.
        several: it gives a sequence of new tensors, which usually are as announced.
        quiet: it gives nothing new, and what it writes keeps its size.
        dynamic: its results are known only after it ran.
        written: indices of tensors that it writes.
        guarded: the values of its tensors are checked before it runs.
        refusal: why it can never be called, or None.
        plan: how `execution.cpp` does such calls; None if Python does them.

    Raises:
        ProtocolError: the signature is malformed.
        DeviceError: the pool does not run this operator.
    """

    def __init__(self, encoded: bytes, storages: Storages) -> None:
        signature = Signature.decode(encoded)
        self.encoded = encoded
        self.signature = signature
        self.operator = signature.operator
        self.layout: Struct = layout(len(signature.inputs), signature.numbers, signature.results)
        self.inputs = tuple(storages.checked(geometry) for geometry in signature.inputs)
        self.numbers = len(signature.numbers)
        self.carried = len(self.inputs) + self.numbers
        self.dynamic = signature.outputs is None
        outputs = signature.outputs or ()
        self.news = tuple((storages.checked(o.geometry), o.nbytes) for o in outputs if isinstance(o, New))
        self.charge = sum(nbytes for _, nbytes in self.news)
        self.written = signature.written
        function = operator(signature.operator)
        self.function = guarded(function) if storages.device.type == "cpu" else function._op
        self._zero = signature.operator.partition(".")[0] in _UNWRITTEN
        self.device = storages.device
        self.schema = function._schema
        self._fill(signature)
        self.refusal: Exception | None = None
        self._verified = False
        try:
            self._verify(function)
            if storages.device.type == "cpu":
                check_shapes(function, signature)
        except Exception as error:  # whatever PyTorch raises for such arguments: it is what the call would raise
            self.refusal = error
        # The results of such a call are not checked closely: an `out=` that could change its size has to be, and
        # numbers that may be marked as conjugate.
        looked_at = self._zero or (self.written and not self._verified)
        looked_at = looked_at or any(place.geometry.dtype.is_complex or not _dense(place, n) for place, n in self.news)
        plain = bool(self.inputs) and 0 < len(outputs) == len(self.news) and not looked_at
        returns = [str(each.type) for each in function._schema.returns]
        self.only: CheckedGeometry | None = self.news[0][0] if plain and returns == ["Tensor"] else None
        tuples = len(returns) > 1 and set(returns) == {"Tensor"}
        self.several = plain and (tuples or returns == ["List[Tensor]"])
        self.quiet = self._verified and not self.dynamic and not self.news
        self.guarded = self.function is not function._op
        self.plan: Any = None

    def run(self, values: Values) -> Any:
        """Call the operator; `values` are the tensors, then the numbers."""
        if self._straight:
            return self.function(*values, **self._keywords)
        arguments = self._template.copy()
        for position, index in self._direct:
            arguments[position] = values[index]
        if self._built:
            for position, build in self._built:
                arguments[position] = build(values)
        if self._keywords_built:
            built = {name: build(values) for name, build in self._keywords_built}
            return self.function(*arguments, **self._keywords, **built)
        return self.function(*arguments, **self._keywords)

    def fresh(self, result: Any, values: Values) -> list[Tensor]:
        """The new results among what `run` gave, each at its place in a storage of its own, of the announced bytes.

        Raises:
            ProtocolError: it gave something else than was announced.
        """
        results = flat(result)
        outputs = self.signature.outputs or ()
        if len(results) != len(outputs):
            raise ProtocolError(f"{self.operator} gave {len(results)} results where {len(outputs)} were announced")
        known = {*map(id, values)}
        fresh = []
        for tensor, output in zip(results, outputs, strict=True):
            if isinstance(output, New):
                fresh.append(self.conformed(tensor, output.geometry, output.nbytes, known))
                known.add(id(tensor))
        return fresh

    def conformed(self, tensor: Tensor | int | None, geometry: Geometry, nbytes: int, known: Set[int]) -> Tensor:
        """A result where it was announced: itself, or a copy. Those whose `id` is `known` it must not be."""
        if not isinstance(tensor, Tensor) or tensor.shape != geometry.shape or tensor.dtype is not geometry.dtype:
            given = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else "no tensor"
            raise ProtocolError(f"{self.operator} gave {given} where {geometry.dtype} {geometry.shape} was announced")
        if self._zero:
            tensor = torch.zeros_like(tensor)
        if tensor.stride() == geometry.stride and owns(tensor, nbytes, known) and tensor.device == self.device:
            return tensor
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
        place = torch.empty(0, dtype=geometry.dtype, device=self.device)
        place.set_(memory, 0, geometry.shape, geometry.stride)
        return place.copy_(tensor)

    def check_written(self, tensors: Sequence[Tensor]) -> None:
        """After a call whose definition could not be checked: raises DeviceError if `out=` has changed a size."""
        if self._verified:
            return
        for index in self.written:
            geometry = self.inputs[index].geometry
            if tensors[index].shape != geometry.shape or tensors[index].stride() != geometry.stride:
                raise DeviceError(f"{self.operator} made a tensor that it writes another size; give it the right one")

    def poison_resized(self, handles: Sequence[int], storages: Storages, failure: CallFailure) -> None:
        """After a call that failed: memory that it has made more of than is charged is let go of."""
        if self._verified:
            return
        for index in self.written:
            storage, checked = storages.live.get(handles[index]), self.inputs[index]
            view = None if storage is None else storage.views.get(checked)
            if view is not None and (view.shape != checked.geometry.shape or view.stride() != checked.geometry.stride):
                storages.poison(handles[index], failure)

    def _verify(self, function: torch._ops.OpOverload) -> None:
        """Check that the announced outputs are those of meta tensors, and that no device is named."""
        schema = function._schema.arguments
        devices = {argument.name for argument in schema if "Device" in str(argument.type)}
        named = [(argument.name, value) for argument, value in zip(schema, self.signature.arguments, strict=False)]
        for name, value in (*named, *self.signature.keywords):
            if name in devices and not (value is None or isinstance(value, DevicePlaceholder)):
                raise ProtocolError(
                    f"{self.operator}: {name}={value!r:.40}: a client does not choose the tenant's device"
                )
        announced = self.signature.outputs
        for output in announced or ():
            if isinstance(output, New) and output.geometry.offset:
                raise ProtocolError(f"{self.operator}: a new result begins at the start of its storage")
        try:
            inferred = infer(self.signature, self.device.type)
        except NotImplementedError:
            return  # nothing is known before: what it gives is compared, and copied where it should be
        if announced is None:
            return
        if inferred is None:
            raise ProtocolError(f"{self.operator}: what it gives is known only after it ran, and yet was announced")
        if [_outline(output) for output in inferred] != [_outline(output) for output in announced]:
            raise ProtocolError(
                f"{self.operator} gives {[_outline(output) for output in inferred]}, and not "
                f"{[_outline(output) for output in announced]} as was announced"
            )
        self._verified = True

    def _fill(self, signature: Signature) -> None:
        self._template: list[Any] = []
        self._direct: list[tuple[int, int]] = []
        self._built: list[tuple[int, Build]] = []
        self._keywords: dict[str, Any] = {}
        self._keywords_built: list[tuple[str, Build]] = []
        for position, argument in enumerate(signature.arguments):
            made = self._prepared(argument)
            self._template.append(None if callable(made) else made)
            if isinstance(argument, Input):
                self._direct.append((position, argument.index))
            elif isinstance(argument, Number) and argument.kind != "bool":
                self._direct.append((position, len(self.inputs) + argument.index))
            elif callable(made):
                self._built.append((position, made))
        for name, argument in signature.keywords:
            made = self._prepared(argument)
            if callable(made):
                self._keywords_built.append((name, made))
            else:
                self._keywords[name] = made
        # The arguments are the values as they come: most calls' are.
        self._straight = not self._keywords_built and self._direct == [(at, at) for at in range(len(self._template))]

    def _prepared(self, argument: Argument) -> Any:
        """An argument as the operator takes it, or a function that makes it of a call's values."""
        if isinstance(argument, Input):
            index = argument.index
            return lambda values: values[index]
        if isinstance(argument, Number):
            at = len(self.inputs) + argument.index
            return (lambda values: bool(values[at])) if argument.kind == "bool" else (lambda values: values[at])
        if isinstance(argument, DevicePlaceholder):
            return self.device
        if isinstance(argument, tuple):
            at = argument[0].index if argument and isinstance(argument[0], Input) else 0
            if argument and argument == tuple(Input(at + place) for place in range(len(argument))):
                end = at + len(argument)
                return lambda values: values[at:end]  # the long lists of an optimizer
            items = [self._prepared(item) for item in argument]
            if not any(callable(item) for item in items):
                return items
            return lambda values: [item(values) if callable(item) else item for item in items]
        return argument


def owns(tensor: Tensor, nbytes: int, known: Set[int]) -> bool:
    """Whether a tensor is all of a storage of so many bytes that nothing else uses, and its `id` not among `known`.

    The bytes have to be its numbers: those of a tensor that PyTorch marks as conjugate, or as negative, are not."""
    storage = tensor.untyped_storage()
    return (
        storage.nbytes() == nbytes
        and torch._C._storage_Use_Count(storage._cdata) == ALONE
        and id(tensor) not in known
        and not (tensor.is_conj() or tensor.is_neg())
    )


def standing_alone(tensor: Tensor, known: Values) -> tuple[Tensor, Geometry]:
    """A result of a call that did not say what it gives, in a storage of its own, and where it lies in it."""
    geometry = Geometry(tensor.dtype, tuple(tensor.shape), tensor.stride())
    if not owns(tensor, geometry.extent, {*map(id, known)}):
        geometry = contiguous(tensor.dtype, geometry.shape)
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor, geometry


def _dense(place: CheckedGeometry, nbytes: int) -> bool:
    """Every byte of the storage belongs to an element: an operator that fills the tensor fills it all."""
    return math.prod(place.geometry.shape) * place.geometry.dtype.itemsize == nbytes


def _outline(output: Output) -> Any:
    """The properties on which two versions of PyTorch agree: strides may differ, and bytes follow from them."""
    return (output.geometry.dtype, output.geometry.shape) if isinstance(output, New) else output
