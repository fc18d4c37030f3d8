"""Tensors that are marked as conjugate or as negative: their numbers are not those that their storage holds.

`x.conj()` and its imaginary part are views over the storage of `x`, as on any device. Before most operators PyTorch
itself computes such numbers, and afterwards it writes what an operator in place made of them through the mark. A few
operators get marked tensors, since PyTorch's own kernels know the mark. The pool's do not, and only bytes go there: for
those few this module does what PyTorch does for the others.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from warpbus.pool.client.dispatch import Operator

_KEYS = ("Conjugate", "Negative")
_aten = torch.ops.aten
_C = torch._C

Kernel = Callable[..., Any]


def is_marked(value: Any) -> bool:
    """Whether it is a tensor whose numbers are not those that its storage holds."""
    return isinstance(value, Tensor) and (value.is_conj() or value.is_neg())


def computed(tensor: Tensor) -> Tensor:
    """The numbers of a marked tensor, in a storage of their own; another tensor as it is."""
    # Marking a tensor a second time takes the mark off.
    if tensor.is_conj():
        tensor = _aten.conj_physical(_aten._conj(tensor))
    return _aten.neg(_aten._neg_view(tensor)) if tensor.is_neg() else tensor


def behind(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """The base of a marked view, and the values to write to it so that the view becomes the source."""
    source = computed(source).to(target.dtype)
    if target.is_conj():
        target, source = _aten._conj(target), _aten.conj_physical(source)
    return (_aten._neg_view(target), _aten.neg(source)) if target.is_neg() else (target, source)


def knowing_marks(operator: Operator) -> Kernel:
    """An operator's kernel that takes marked tensors where PyTorch may give it such."""
    name = operator.overload.name()
    if not any(_falls_through(name, key) for key in _KEYS):
        return operator
    return _clone(operator) if name == "aten::clone" else _unmarked(operator)


def _falls_through(name: str, key: str) -> bool:
    return _C._dispatch_has_kernel_for_dispatch_key(name, key) and bool(
        _C._dispatch_kernel_for_dispatch_key_is_fallthrough(name, key)
    )


def _unmarked(operator: Operator) -> Kernel:
    """With the numbers of marked tensors; what is written goes back through the mark. These give one tensor each."""
    arguments = operator.overload._schema.arguments
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
    outputs = {argument.name for argument, writes in zip(arguments, written, strict=True) if writes}
    # Of all products, which want tensors of one dtype: where that is real, a question instead of many.
    only_conjugates = not _falls_through(operator.overload.name(), "Negative")

    def call(*args: Any, **kwargs: Any) -> Any:
        if only_conjugates and not args[0].is_complex():
            return operator(*args, **kwargs)
        if not any(map(is_marked, (*args, *kwargs.values()))):
            return operator(*args, **kwargs)
        plain = [computed(value) if is_marked(value) else value for value in args]
        named = {name: computed(value) if is_marked(value) else value for name, value in kwargs.items()}
        result = operator(*plain, **named)
        targets = [value for value, writes in zip(args, written, strict=False) if writes]
        targets += [value for name, value in kwargs.items() if name in outputs]
        for target in targets:
            if is_marked(target):
                target.copy_(result)
        return targets[0] if targets else result

    return call


def _clone(operator: Operator) -> Kernel:
    """The result is a copy already."""

    def call(source: Tensor, **options: Any) -> Any:
        if not is_marked(source):
            return operator(source, **options)
        layout = options.get("memory_format")
        numbers = computed(source)
        return numbers if layout in (None, torch.preserve_format) else numbers.contiguous(memory_format=layout)

    return call
