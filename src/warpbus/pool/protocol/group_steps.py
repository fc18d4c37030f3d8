"""The steps of a collective operation of a group of leases: the payload of a GROUP instruction.

A group is a number of leases, each with a rank, whose processes have a connection to each other. Two kinds of steps are
all that copies and collective operations consist of:

    exchange   each rank sends bytes of its storages to others, and receives bytes of theirs
    reduce     each rank sends every other rank a share, and combines the shares that it receives with its own

A step is encoded as [group, label, kind, ...] in the encoding of `wire`; regions are [handle, offset, bytes].
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, TypeAlias, get_args

import torch

from warpbus.errors import ProtocolError
from warpbus.pool.protocol.wire import decode, encode

GROUP_BYTES = 16
MAX_RANKS = 1024
MAX_GROUPS = 64
"""The most groups that a lease is in."""
MAX_SECONDS = 86_400.0

_MAX_LABEL = 64
_MAX_REGIONS = 1 << 14

Combination: TypeAlias = Literal["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]


class Region(NamedTuple):
    """Bytes of a storage."""

    handle: int
    offset: int
    nbytes: int


Transfers: TypeAlias = tuple[tuple[int, Region], ...]
"""Messages: ranks with the bytes that go there or come from there. A rank may stand there several times."""


@dataclass(frozen=True)
class ExchangeStep:
    """Bytes that go to other ranks and come from them.

    Attributes:
        group: its id, 16 bytes.
        label: the operation, such as "all_gather"; all ranks have to call the same.
        sends, receives: see `Transfers`.
    """

    group: bytes
    label: str
    sends: Transfers
    receives: Transfers

    @property
    def written(self) -> list[int]:
        """The handles of the storages that it writes."""
        return [region.handle for _, region in self.receives if region.nbytes]

    @property
    def regions(self) -> list[Region]:
        """All that it reads and writes."""
        return [region for _, region in (*self.sends, *self.receives)]

    def encode(self) -> bytes:
        """The payload of the instruction."""
        sides = [[[rank, *region] for rank, region in side] for side in (self.sends, self.receives)]
        return encode([self.group, self.label, "exchange", *sides])


@dataclass(frozen=True)
class ReduceStep:
    """Shares that are combined: by rank r those that all ranks have for r, in the order of the ranks.

    Attributes:
        group, label: as in `ExchangeStep`.
        combination: how two elements become one.
        dtype: of the elements.
        shares: of this rank, one for each rank; without bytes if a rank gets none.
        result: the data for this rank's storages, of the size of its own share.
    """

    group: bytes
    label: str
    combination: Combination
    dtype: torch.dtype
    shares: tuple[Region, ...]
    result: Region

    @property
    def written(self) -> list[int]:
        """The handles of the storages that it writes."""
        return [self.result.handle] if self.result.nbytes else []

    @property
    def regions(self) -> list[Region]:
        """All that it reads and writes."""
        return [*self.shares, self.result]

    def encode(self) -> bytes:
        """The payload of the instruction."""
        shares = [[*share] for share in self.shares]
        return encode([self.group, self.label, "reduce", self.combination, self.dtype, shares, [*self.result]])


def decode_step(payload: bytes | memoryview) -> ExchangeStep | ReduceStep:
    """The step of a GROUP instruction. Raises ProtocolError if it is malformed."""
    match decode(payload):
        case [bytes(group), str(label), "exchange", list(sends), list(receives)]:
            _check(group, label, len(sends) + len(receives))
            return ExchangeStep(group, label, _transfers(sends), _transfers(receives))
        case [
            bytes(group),
            str(label),
            "reduce",
            str(combination),
            torch.dtype() as dtype,
            list(shares),
            list(result),
        ] if combination in get_args(Combination):
            _check(group, label, len(shares))
            regions = tuple(_region(share) for share in shares)
            whole = _region(result)
            if any(each.nbytes % dtype.itemsize or each.offset % dtype.itemsize for each in (*regions, whole)):
                raise ProtocolError(f"a share that is not of whole elements of {dtype}")
            return ReduceStep(group, label, combination, dtype, regions, whole)  # type: ignore[arg-type]
    raise ProtocolError("a step of a group of leases is malformed")


class GroupPlace(NamedTuple):
    """A lease's place in a group.

    Attributes:
        group: the id of the group.
        rank: of the lease.
        size: the number of ranks.
        seconds: for which the lease waits for others in one step.
    """

    group: bytes
    rank: int
    size: int
    seconds: float

    @classmethod
    def read(cls, values: list[Any]) -> Self:
        """From the values of a question. Raises ProtocolError if they are malformed."""
        match values:
            case [bytes(group), int(rank), int(size), int() | float() as seconds] if (
                len(group) == GROUP_BYTES and 0 <= rank < size <= MAX_RANKS and 0 < seconds <= MAX_SECONDS
            ):
                return cls(group, rank, size, float(seconds))
        raise ProtocolError(
            f"a group's id has {GROUP_BYTES} bytes, its size is at most {MAX_RANKS}, and the rank is below the size"
        )


def _check(group: bytes, label: str, regions: int) -> None:
    if len(group) != GROUP_BYTES or len(label) > _MAX_LABEL or regions > _MAX_REGIONS:
        raise ProtocolError(f"a step of a group of leases: at most {_MAX_REGIONS} regions, and a short label")


def _transfers(values: list[Any]) -> Transfers:
    found = []
    for value in values:
        match value:
            case [int(rank), *region] if 0 <= rank < MAX_RANKS:
                found.append((rank, _region(region)))
            case _:
                raise ProtocolError("a transfer is a rank with a region")
    return tuple(found)


def _region(value: Any) -> Region:
    match value:
        case [int(handle), int(offset), int(nbytes)] if min(handle, offset, nbytes) >= 0:
            return Region(handle, offset, nbytes)
    raise ProtocolError("a region is a handle, an offset and a number of bytes, none below 0")
