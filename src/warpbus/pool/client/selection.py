"""Chooses the remote GPU of a call: that of its tensors, else the one of a `device` argument."""

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from warpbus.pool.client.session import Session, current, selected, session_at
from warpbus.pool.client.tensors import NAME, is_remote

Kernel: TypeAlias = Any  # a callable; for functions in tables of several signatures mypy has only the type "function"


def session_of(tensor: Tensor) -> Session:
    """The session of a tensor's device. Raises StateError if its connection was closed."""
    return session_at(tensor.get_device())


def session_for(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Session:
    """The session that a call with these arguments is for.

    Raises:
        RuntimeError: the tensors are on several devices.
        StateError: the connection of their device was closed.
    """
    index = wanted = None
    for value in _flat((*args, *kwargs.values())):
        if isinstance(value, torch.device):
            wanted = value.index if value.type == NAME else wanted
        elif not is_remote(value):
            continue
        elif index is None:
            index = value.get_device()
        elif index != value.get_device():
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {name} got one on {NAME}:{index} and one on "
                f'{NAME}:{value.get_device()}: copy one of them by .to("{NAME}:{index}")'
            )
    if index is None:
        return current() if wanted is None else session_at(wanted)
    return session_at(index)


def _flat(values: Any) -> Iterator[Tensor | torch.device]:
    for value in values:
        if isinstance(value, Tensor | torch.device):
            yield value
        elif isinstance(value, list | tuple):
            yield from _flat(value)


def choosing(name: str, kernel: Kernel) -> Kernel:
    """A kernel that runs with the session selected that its arguments are for."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not current().beside:
            return kernel(*args, **kwargs)
        with selected(session_for(name, args, kwargs)):
            return kernel(*args, **kwargs)

    return call
