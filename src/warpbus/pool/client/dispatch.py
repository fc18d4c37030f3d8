"""PyTorch's operators on `warpbus:0`: each call becomes a few bytes, and gives tensors before it has run.

The hot path of the client. A call's key is everything but the tensors' handles and the numbers; under its key lies what
was found out at the first call of its kind: the number of its definition, the layout of its bytes, its results.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import Parameter

from warpbus.errors import DeviceError
from warpbus.pool.client.calls import NUMBER_KINDS, Reading, Wrapped, goes_along, number_positions
from warpbus.pool.client.session import Session, current
from warpbus.pool.client.tensors import NAME, Remote, new_tensor
from warpbus.pool.protocol.geometry import Geometry
from warpbus.pool.protocol.inference import MEASURED, gives_tensors, infer
from warpbus.pool.protocol.instructions import call_prefix, layout
from warpbus.pool.protocol.signature import Fixed, New, Output, Same, Signature

# Where PyTorch takes tensors of the CPU beside those of a GPU.
_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})


class _Kind:
    """Calls of one key."""

    __slots__ = ("generation", "only", "outputs", "pack", "prefix")

    def __init__(self, session: Session, signature: Signature) -> None:
        self.prefix = call_prefix(session.define(signature))
        self.generation = session.generation
        self.pack = layout(len(signature.inputs), signature.numbers, signature.results).pack
        self.outputs = signature.outputs or ()
        first = self.outputs[0] if len(self.outputs) == 1 else None
        self.only = first if isinstance(first, New) else None


class _Call:
    """One call, taken apart: its key, and what its key leaves out."""

    __slots__ = ("handles", "key", "numbers", "tensors")

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.tensors: list[Tensor] = []
        self.handles: list[int] = []
        self.numbers: list[Any] = []


class Operator:
    """An operator's kernel for the device: call it with the arguments that PyTorch's dispatcher gives.

    Args:
        overload: the operator.
        upload: makes a tensor of the device from one of the CPU.
    """

    def __init__(self, overload: OpOverload, upload: Callable[[Tensor], Tensor]) -> None:
        self.overload = overload
        packet = overload._overloadpacket.__name__
        self._measured = packet in MEASURED
        self._indexed = packet in _INDEXED
        self._upload = upload
        self._is_number = number_positions(overload)
        self._positions = tuple(self._is_number.values())
        self._kinds: dict[Any, _Kind] = {}
        self._session: Session | None = None
        self._returns = [str(result.type) for result in overload._schema.returns]
        self._single = self._returns == ["Tensor"]
        self._list = self._returns == ["List[Tensor]"]
        self._tensors = gives_tensors(overload)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = current()
        with session.lock:
            if self._session is not session:
                self._session, self._kinds = session, {}
            call = _Call()
            key, handles, tensors = call.key, call.handles, call.tensors
            for value, is_number in zip(args, self._positions, strict=False):
                if value.__class__ is Tensor or value.__class__ is Parameter:  # most are: written out for speed
                    try:
                        handles.append(value.untyped_storage().remote.handle)  # type: ignore[attr-defined]
                    except AttributeError:
                        self._take_foreign(call, value)
                    else:
                        tensors.append(value)
                        key += (value.dtype, value.shape, value.stride(), value.storage_offset())
                else:
                    self._take(call, value, is_number)
            for name, value in kwargs.items():
                key.append(name)
                self._take(call, value, self._is_number[name])
            whole = tuple(key)
            kind = self._kinds.get(whole)
            if kind is None or kind.generation != session.generation:
                kind = self._learn(session, whole, args, kwargs)
                if kind is None:
                    return self._ask(session, call, whole, args, kwargs)
            session.statistics.operators += 1
            if kind.only is not None:
                remote = session.remote(kind.only.nbytes)
                result = new_tensor(kind.only, remote)
                session.writer.call(kind.prefix, kind.pack(*handles, *call.numbers, remote.handle))
                session.advance()
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
            session.writer.call(kind.prefix, kind.pack(*handles, *call.numbers, *made))
            session.advance()
        return results[0] if self._single else self._shaped(results)

    def _take(self, call: _Call, value: Any, is_number: bool) -> None:
        """Add an argument to a call: to its key, or to what its key leaves out."""
        if isinstance(value, Tensor):
            try:
                call.handles.append(value.untyped_storage().remote.handle)  # type: ignore[attr-defined]
            except AttributeError:
                self._take_foreign(call, value)
                return
            call.tensors.append(value)
            call.key += (value.dtype, value.shape, value.stride(), value.storage_offset())
        elif goes_along(value, is_number):
            call.numbers.append(value)
            call.key.append(value.__class__)
        elif isinstance(value, list | tuple):
            call.key.append(len(value))
            for item in value:
                self._take(call, item, is_number)
        elif isinstance(value, torch.device):
            call.key.append(NAME)
        else:
            call.key.append((value.__class__, value))

    def _take_foreign(self, call: _Call, value: Tensor) -> None:
        """A tensor of another device: PyTorch takes one of the CPU that has no axes, and some as indices."""
        number = _number(value)
        if number is not None:
            call.numbers.append(number)
            call.key.append(("wrapped", number.__class__))
        elif value.device.type == "cpu" and (value.dim() == 0 or self._indexed):
            self._take(call, self._upload(value), False)
        elif value.device.type == NAME:
            raise DeviceError(
                f"{self.overload.name()}: a tensor of shape {list(value.shape)} of an earlier connection: "
                "its bytes are gone; make it again with the GPU that is connected now"
            )
        else:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {self.overload.name()} "
                f"got one on {value.device} and one on {NAME}:0"
            )

    def _learn(self, session: Session, key: Any, args: Any, kwargs: Any) -> _Kind | None:
        """A call of a new kind: what it gives, by meta tensors; None where it has to run to be known."""
        if self._measured:
            return None
        signature = self._signature(args, kwargs)
        try:
            outputs = infer(signature)
        except NotImplementedError:
            return None
        if outputs is None:
            return None
        kind = self._kinds[key] = _Kind(session, replace(signature, outputs=outputs))
        return kind

    def _ask(self, session: Session, call: _Call, key: Any, args: Any, kwargs: Any) -> Any:
        """A call that has to run to be known: one round trip."""
        kind = self._kinds.get((key, "asked"))
        if kind is None or kind.generation != session.generation:
            kind = self._kinds[key, "asked"] = _Kind(session, self._signature(args, kwargs))
        session.statistics.operators += 1
        remotes = [Remote(0, session.freed) for _ in self._returns]
        operands = (*call.handles, *call.numbers, *(remote.handle for remote in remotes))
        session.writer.call(kind.prefix, kind.pack(*operands))
        answer: Any = session.ask(["describe", [remote.handle for remote in remotes]])
        if not self._tensors:
            return answer[0]
        outputs = [_described(item) for item in answer]
        if self._measured:
            self._kinds[key] = _Kind(session, replace(self._signature(args, kwargs), outputs=tuple(outputs)))
        results: list[Tensor | int | None] = []
        for output, remote in zip(outputs, remotes, strict=True):
            if isinstance(output, New):
                remote.nbytes = output.nbytes
                session.count(output.nbytes)
                results.append(new_tensor(output, remote))
            else:
                results.append(_given(output, call.tensors))
        return results[0] if self._single else self._shaped(results)

    def _shaped(self, results: list[Tensor | int | None]) -> Any:
        """Results as the operator's schema has them."""
        if not self._returns:
            return None
        return results if self._list else tuple(results)

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        args, kwargs = self._own(args), {name: self._own(value) for name, value in kwargs.items()}
        return Reading(self.overload, self._is_number).signature(args, kwargs)

    def _own(self, value: Any) -> Any:
        """An argument with tensors of the CPU replaced, as `_take_foreign` does it."""
        if isinstance(value, list | tuple):
            return tuple(self._own(item) for item in value)
        if not isinstance(value, Tensor) or value.device.type == NAME:
            return value
        number = _number(value)
        return self._upload(value) if number is None else Wrapped(number)


def _number(value: Tensor) -> int | float | bool | None:
    """The number that a tensor of the CPU is, if it may have been one: PyTorch makes such tensors of Python's."""
    if value.device.type != "cpu" or value.dim() or value.dtype not in (torch.float64, torch.int64, torch.bool):
        return None
    number = value.item()
    return number if number.__class__ in NUMBER_KINDS else None


def _given(output: Output, inputs: list[Tensor]) -> Tensor | int | None:
    """A result that is not new."""
    if isinstance(output, Same):
        return inputs[output.index]
    return output.value if isinstance(output, Fixed) else None


def _described(item: Any) -> New | Fixed | None:
    """A result by the tenant's description."""
    if item is None:
        return None
    if isinstance(item, int):
        return Fixed(item)
    dtype, shape, stride, nbytes = item
    return New(Geometry(dtype, tuple(shape), tuple(stride)), nbytes)
