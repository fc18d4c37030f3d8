"""PyTorch's operators on a remote GPU: each call is encoded in a few bytes and returns tensors before it has run.

The hot path of the client. A call's key is everything but the tensors' handles and the numbers; under its key lies what
was found out at the first call of its kind: the number of its definition, the layout of its bytes, its results.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._C._acc import create_empty_tensor as _create
from torch._ops import OpOverload
from torch.nn import Parameter

from warpbus.errors import StateError
from warpbus.pool.client.calls import NUMBER_KINDS, SignatureBuilder, Wrapped, goes_along, number_positions
from warpbus.pool.client.selection import session_for
from warpbus.pool.client.session import Session, current, selected
from warpbus.pool.client.tensors import NAME, Remote, is_remote, new_tensor, set_geometry
from warpbus.pool.protocol.geometry import Geometry
from warpbus.pool.protocol.inference import MEASURED, OutputSizeError, gives_tensors, infer
from warpbus.pool.protocol.instructions import call_packer, call_prefix, layout
from warpbus.pool.protocol.signature import Fixed, New, Output, Same, Signature

# Where PyTorch takes tensors of the CPU beside those of a GPU.
_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})

_NARROWER = {torch.float64: torch.float32, torch.int64: torch.int32}
"""For the dtypes of tensors that PyTorch makes of numbers, others that they give way to."""

_INTEGERS = {int}
_PLAIN = {Tensor, Parameter}

_handle_of = attrgetter("remote.handle")
_kind_of = attrgetter("dtype", "shape")
_storage_of, _stride_of, _offset_of = Tensor.untyped_storage, Tensor.stride, Tensor.storage_offset


class _PreparedCall:
    """Everything that calls with one key have in common."""

    __slots__ = (
        "carried",
        "dtype",
        "generation",
        "nbytes",
        "new",
        "number",
        "outputs",
        "pack",
        "place",
        "shape",
        "single",
    )

    def __init__(self, session: Session, signature: Signature) -> None:
        self.number = session.define(signature)
        self.generation = session.generation
        self.carried = len(signature.inputs), signature.numbers
        self.pack = call_packer(self.number, layout(len(signature.inputs), signature.numbers, signature.results))
        self.outputs = signature.outputs or ()
        self.single = False
        if len(self.outputs) == 1 and isinstance(self.outputs[0], New):
            # One new tensor is what most calls give: what the hot path needs of it lies here.
            self.new = self.outputs[0]
            geometry, self.nbytes = self.new.geometry, self.new.nbytes
            self.shape, self.dtype = geometry.shape, geometry.dtype
            self.place = None if geometry.is_contiguous else geometry
            self.single = True

    def plan(self) -> tuple[bytes, int, str, tuple[Any, ...]]:
        """The data with which `dispatch.cpp` does such calls: the first bytes of the encoded call, the number of
        tensors, the first letters of the kinds of numbers, and the outputs."""
        tensors, numbers = self.carried
        kinds = "".join(kind[0] for kind in numbers)
        return call_prefix(self.number), tensors, kinds, tuple(_planned(output) for output in self.outputs)


_Kinds: TypeAlias = dict[Any, _PreparedCall]

_Call: TypeAlias = tuple[list[Any], list[Tensor], list[int], list[Any]]
"""One call, split into its key and the values that the key leaves out: tensors, their handles, numbers."""


class Operator:
    """An operator's kernel for the device: call it with the arguments that PyTorch's dispatcher gives.

    Args:
        overload: the operator.
        upload: makes a tensor of the device from one of the CPU.

    Attributes:
        kind: of the last call, if its arguments alone decide about the results; None of others.
        positions: for each argument, whether it is a number that may change from call to call.
    """

    def __init__(self, overload: OpOverload, upload: Callable[[Tensor], Tensor]) -> None:
        self.overload = overload
        packet = overload._overloadpacket.__name__
        self._measured = packet in MEASURED
        self._indexed = packet in _INDEXED
        self._upload = upload
        self._is_number = number_positions(overload)
        self.positions = tuple(self._is_number.values())
        self.kind: _PreparedCall | None = None
        self._prepared: tuple[Session | None, _Kinds] = (None, {})
        self._returns = [str(result.type) for result in overload._schema.returns]
        self._single = self._returns == ["Tensor"]
        self._list = self._returns == ["List[Tensor]"]
        self._tensors = gives_tensors(overload)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = current()
        if session.beside:
            chosen = session_for(self.overload.name(), args, kwargs)
            if chosen is not session:
                with selected(chosen):
                    return self(*args, **kwargs)
        with session.lock:
            owner, kinds = self._prepared
            if owner is not session:
                kinds = session.kinds.setdefault(self, {})
                self._prepared = session, kinds
            key: list[Any] = []
            tensors: list[Tensor] = []
            handles: list[int] = []
            numbers: list[Any] = []
            call = (key, tensors, handles, numbers)
            for value, is_number in zip(args, self.positions, strict=False):
                if value.__class__ is Tensor or value.__class__ is Parameter:  # most are: written out for speed
                    try:
                        handles.append(value.untyped_storage().remote.handle)  # type: ignore[attr-defined]
                    except AttributeError:
                        self._take_foreign(call, value)
                    else:
                        tensors.append(value)
                        key += (value.dtype, value.shape, value.stride(), value.storage_offset())
                elif value.__class__ is float and is_number:
                    numbers.append(value)
                    key.append(float)
                else:
                    self._take(call, value, is_number)
            for name, value in kwargs.items():
                key.append(name)
                self._take(call, value, self._is_number[name])
            whole = tuple(key)
            kind = kinds.get(whole)
            if kind is None or kind.generation != session.generation:
                try:
                    kind = self._learn(session, kinds, whole, args, kwargs)
                except OutputSizeError as error:
                    _resize_empty(tensors, error)
                    result = self(*args, **kwargs)
                    self.kind = None  # it is that of a call with other sizes
                    return result
                if kind is None:
                    self.kind = None
                    return self._ask(session, kinds, call, whole, args, kwargs)
            self.kind = kind
            if kind.single:
                remote = session.remote(kind.nbytes)
                if session.index:
                    result = new_tensor(kind.new, remote)
                else:
                    result = _create(kind.shape, kind.dtype)
                    storage: Any = result.untyped_storage()
                    storage.remote = remote
                    if kind.place is not None:
                        set_geometry(result, storage, kind.place)
                session.call(kind.pack(*handles, *numbers, remote.handle))
                return result if self._single else self._shaped([result])
            results: list[Tensor | int | None] = []
            made: list[int] = []
            for output in kind.outputs:
                if isinstance(output, New):
                    remote = session.remote(output.nbytes)
                    made.append(remote.handle)
                    results.append(new_tensor(output, remote))
                else:
                    results.append(_given(output, tensors))
            session.call(kind.pack(*handles, *numbers, *made))
        return results[0] if self._single else self._shaped(results)

    def _take(self, call: _Call, value: Any, is_number: bool) -> None:
        """Add an argument to a call: to its key, or to what its key leaves out."""
        key, tensors, handles, numbers = call
        if isinstance(value, Tensor):
            try:
                handles.append(value.untyped_storage().remote.handle)  # type: ignore[attr-defined]
            except AttributeError:
                self._take_foreign(call, value)
                return
            tensors.append(value)
            key += (value.dtype, value.shape, value.stride(), value.storage_offset())
        elif isinstance(value, list | tuple):
            self._take_list(call, value, is_number)
        elif goes_along(value, is_number):
            numbers.append(value)
            key.append(value.__class__)
        elif isinstance(value, torch.device):
            key.append(NAME)
        else:
            key.append((value.__class__, value))

    def _take_list(self, call: _Call, items: Sequence[Any], is_number: bool) -> None:
        """The same of a list. Those of an optimizer are long: gone through without Python where that can be."""
        key, tensors, handles, _ = call
        kinds = {*map(type, items)}
        if kinds == _INTEGERS and not is_number:
            key.append((*items,))
            return
        key.append(len(items))
        if kinds <= _PLAIN:
            try:
                handles += [*map(_handle_of, map(_storage_of, items))]
            except AttributeError:
                pass  # one is of another device
            else:
                tensors += items
                key += map(_kind_of, items)
                key += map(_stride_of, items)
                key += map(_offset_of, items)
                return
        for item in items:
            self._take(call, item, is_number)

    def _take_foreign(self, call: _Call, value: Tensor) -> None:
        """A tensor of another device: PyTorch takes one of the CPU that has no axes, and some as indices."""
        number = _number(value)
        if number is not None:
            key, _, _, numbers = call
            numbers.append(number)
            key.append(("wrapped", number.__class__))
        elif value.device.type == "cpu" and (value.dim() == 0 or self._indexed):
            self._take(call, self._upload(value), False)
        elif is_remote(value):
            raise StateError(
                f"{self.overload.name()}: a tensor of shape {list(value.shape)} of an earlier connection: "
                "its bytes are gone; make it again with the GPU that is connected now"
            )
        else:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {self.overload.name()} "
                f"got one on {value.device} and one on {current().device}"
            )

    def _learn(self, session: Session, kinds: _Kinds, key: Any, args: Any, kwargs: Any) -> _PreparedCall | None:
        """Infer the results of a new kind of call with meta tensors; None if their shapes depend on values."""
        if self._measured:
            return None
        signature = self._signature(args, kwargs)
        try:
            outputs = infer(signature, session.kind)
        except NotImplementedError:
            # The outputs of an operator without results are known without meta tensors: fused optimizers are such.
            outputs = None if self._returns else ()
        if outputs is None:
            return None
        kind = kinds[key] = _PreparedCall(session, replace(signature, outputs=outputs))
        return kind

    def _ask(self, session: Session, kinds: _Kinds, call: _Call, key: Any, args: Any, kwargs: Any) -> Any:
        """A call whose result shapes depend on values: one round trip."""
        kind = kinds.get((key, "asked"))
        if kind is None or kind.generation != session.generation:
            kind = kinds[key, "asked"] = _PreparedCall(session, self._signature(args, kwargs))
        _, tensors, handles, numbers = call
        remotes = [Remote(0, session.freed) for _ in self._returns]
        session.call(kind.pack(*handles, *numbers, *(remote.handle for remote in remotes)))
        answer: Any = session.ask(["describe", [remote.handle for remote in remotes]])
        if not self._tensors:
            return answer[0]
        outputs = [_described(item) for item in answer]
        if self._measured:
            kinds[key] = _PreparedCall(session, replace(self._signature(args, kwargs), outputs=tuple(outputs)))
        results: list[Tensor | int | None] = []
        for output, remote in zip(outputs, remotes, strict=True):
            if isinstance(output, New):
                remote.nbytes = output.nbytes
                session.count(output.nbytes)
                results.append(new_tensor(output, remote))
            else:
                results.append(_given(output, tensors))
        return results[0] if self._single else self._shaped(results)

    def _shaped(self, results: list[Tensor | int | None]) -> Any:
        """The results in the structure of the operator's schema."""
        if not self._returns:
            return None
        return results if self._list else tuple(results)

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        args, kwargs = self._own(args), {name: self._own(value) for name, value in kwargs.items()}
        return SignatureBuilder(self.overload, self._is_number).signature(args, kwargs)

    def _own(self, value: Any) -> Any:
        """An argument with tensors of the CPU replaced, as `_take_foreign` does it."""
        if isinstance(value, list | tuple):
            return tuple(self._own(item) for item in value)
        if not isinstance(value, Tensor) or is_remote(value):
            return value
        number = _number(value)
        return self._upload(value) if number is None else Wrapped(number)


def _number(value: Tensor) -> int | float | bool | None:
    """The number that PyTorch has made this tensor of the CPU of; None of tensors that were such from the beginning.

    Only the latter decide about the dtype of a result without axes."""
    if value.device.type != "cpu" or value.dim() or value.dtype not in _NARROWER:
        return None
    if torch.result_type(value, torch.empty((), dtype=_NARROWER[value.dtype])) is value.dtype:
        return None
    number = value.item()
    return number if number.__class__ in NUMBER_KINDS else None


def _resize_empty(tensors: list[Tensor], error: OutputSizeError) -> None:
    """Give tensors of `out=` without elements the size of the result. Raises the error if others would change."""
    if any(tensors[index].numel() for index in error.shapes):
        raise error
    for index, shape in error.shapes.items():
        tensors[index].resize_(shape)


def _planned(output: Output) -> tuple[Any, ...]:
    """An output as `dispatch.cpp` reads it."""
    if isinstance(output, New):
        geometry = output.geometry
        return 0, output.nbytes, geometry.dtype, geometry.shape, geometry.stride, geometry.is_contiguous
    if isinstance(output, Same):
        return 1, output.index
    return (3, output.value) if isinstance(output, Fixed) else (2, 0)


def _given(output: Output, inputs: list[Tensor]) -> Tensor | int | None:
    """A result that is not new."""
    if isinstance(output, Same):
        return inputs[output.index]
    return output.value if isinstance(output, Fixed) else None


def _described(item: Any) -> New | Fixed | None:
    """The tensor of a result that the tenant described."""
    if item is None:
        return None
    if isinstance(item, int):
        return Fixed(item)
    dtype, shape, stride, nbytes = item
    return New(Geometry(dtype, tuple(shape), tuple(stride)), nbytes)
