"""Loads tensors of a checkpoint that the pool's side has: only their names and shapes come here."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpbus.errors import ProtocolError, UsageError
from warpbus.pool.client.session import Session
from warpbus.pool.client.tensors import Remote, new_tensor
from warpbus.pool.protocol.geometry import contiguous
from warpbus.pool.protocol.signature import New

# Of one question: its answer comes when they are loaded.
_MOST_TENSORS = 256
_MOST_BYTES = 256 << 20


class _Described(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


def load(session: Session, name: str, pattern: str) -> dict[str, Tensor]:
    """See `Gpu.load_checkpoint`."""
    chosen = [each for each in _described(session, name) if fnmatchcase(each.name, pattern)]
    if not chosen:
        raise UsageError(f"the checkpoint {name} has no tensor {pattern!r}: give another pattern")
    total = sum(each.nbytes for each in chosen)
    session.flush()
    if session.used + total > session.memory:
        raise torch.OutOfMemoryError(
            f"{len(chosen)} tensors of {name} have {total} bytes; {session.used} of the lease's {session.memory} bytes "
            f"are in use, {session.memory - session.used} are free"
        )
    tensors: dict[str, Tensor] = {}
    for group in _groups(chosen):
        remotes = [session.remote(each.nbytes) for each in group]
        pairs = [[each.name, remote.handle] for each, remote in zip(group, remotes, strict=True)]
        session.ask(["load", name, pairs])  # type: ignore[list-item]
        tensors |= {each.name: _tensor(each, remote) for each, remote in zip(group, remotes, strict=True)}
    return tensors


def _described(session: Session, name: str) -> list[_Described]:
    """All tensors of a checkpoint."""
    found: list[_Described] = []
    while True:
        answer: Any = session.ask(["checkpoint", name, len(found)])
        if not answer:
            return found
        for each in answer:
            match each:
                case [str(tensor), torch.dtype() as dtype, list(shape), int(nbytes)] if (
                    all(type(size) is int and size >= 0 for size in shape) and nbytes == prod(shape) * dtype.itemsize
                ):
                    found.append(_Described(tensor, dtype, tuple(shape), nbytes))
                case _:
                    raise ProtocolError(f"the pool describes a tensor as {each!r:.80}: use one version of Warpbus")


def _groups(chosen: list[_Described]) -> Iterator[list[_Described]]:
    """Tensors that are asked for together."""
    group: list[_Described] = []
    nbytes = 0
    for each in chosen:
        if group and (len(group) >= _MOST_TENSORS or nbytes + each.nbytes > _MOST_BYTES):
            yield group
            group, nbytes = [], 0
        group.append(each)
        nbytes += each.nbytes
    yield group


def _tensor(described: _Described, remote: Remote) -> Tensor:
    return new_tensor(New(contiguous(described.dtype, described.shape), described.nbytes), remote)
