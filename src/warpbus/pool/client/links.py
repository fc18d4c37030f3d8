"""Copies between two remote GPUs of this process: the bytes go from one lease's process to the other's.

The first copy between two leases puts them into a group of two, which connects their processes.
"""

import secrets
import threading
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from warpbus.errors import StateError
from warpbus.pool.client.selection import session_of
from warpbus.pool.client.session import Session
from warpbus.pool.client.tensors import remote_of
from warpbus.pool.protocol.group_steps import GROUP_BYTES, ExchangeStep, Region

_SECONDS = 600.0
"""For which one lease waits in a copy until the other has done what it had to do before."""


@dataclass(frozen=True)
class _Link:
    """The group of two leases.

    Attributes:
        group: its id.
        ranks: by session.
        lock: held while a copy is given to both, so that both have all copies in one order.
    """

    group: bytes
    ranks: dict[Session, int]
    lock: threading.Lock = field(default_factory=threading.Lock)


_links: dict[frozenset[Session], _Link] = {}
_lock = threading.Lock()


def copy(source: Tensor, target: Tensor) -> None:
    """Copy between tensors of two devices that have the same dtype, shape and strides, without gaps. Does not wait.

    Raises:
        StateError: the leases are of different pools.
        UsageError: a program is being recorded.
    """
    giver, taker = session_of(source), session_of(target)
    link = _link(giver, taker)
    if not source.numel():
        return
    given = ExchangeStep(link.group, "copy", ((link.ranks[taker], _region(source)),), ())
    taken = ExchangeStep(link.group, "copy", (), ((link.ranks[giver], _region(target)),))
    with link.lock:
        taker.check_step(taken)
        giver.check_step(given)
        try:
            giver.do_step(given)
        finally:  # it may have reported an earlier call that failed: the step was sent nevertheless
            taker.do_step(taken)


def close(session: Session) -> None:
    """End the groups of two that a session is in: it is to be closed, or to move. The next copy makes new ones."""
    with _lock:
        ended = [_links.pop(pair) for pair in list(_links) if session in pair]
    for link in ended:
        for each in link.ranks:
            with suppress(Exception):  # it may be lost, or have an error to tell
                each.ask(["leave", link.group])


def _region(tensor: Tensor) -> Region:
    size = tensor.dtype.itemsize
    return Region(remote_of(tensor).handle, int(tensor.storage_offset()) * size, tensor.numel() * size)


def _link(first: Session, second: Session) -> _Link:
    pair = frozenset((first, second))
    link = _links.get(pair)
    if link is None:
        with _lock:
            link = _links.get(pair)
            if link is None:
                link = _links[pair] = _connected(first, second)
    return link


def _connected(first: Session, second: Session) -> _Link:
    low, high = sorted((first, second), key=lambda session: session.index)
    if low.member is None or high.member is None:
        raise StateError(f"{low.device} and {high.device} cannot be connected: copy by .cpu()")
    link = _Link(secrets.token_bytes(GROUP_BYTES), {low: 0, high: 1})
    try:
        for session, rank in link.ranks.items():
            session.ask(["join", link.group, rank, len(link.ranks), _SECONDS])
        high.member.connect(low.member.lease, low.member.link_key, link.group, 0)
    except BaseException:
        for session in link.ranks:
            with suppress(Exception):
                session.ask(["leave", link.group])
        raise
    return link
