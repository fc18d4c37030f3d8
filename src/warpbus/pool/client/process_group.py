"""`torch.distributed` over leases: the backend "warpbus", whose collective operations run between leases' processes.

    gpu = warpbus.pool.connect(...)                       # in each rank's process
    torch.distributed.init_process_group("warpbus")
    model = DistributedDataParallel(model.to(gpu.device))

An operation is one instruction in the order of all others of the lease, so no rank's program waits for it; its bytes
go from one lease's process to the others', and never through a rank's program.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from warpbus.errors import ProtocolError, UsageError
from warpbus.pool.client.selection import session_of
from warpbus.pool.client.session import Session, session_at
from warpbus.pool.client.tensors import NAME, is_remote, remote_of
from warpbus.pool.protocol.group_steps import (
    GROUP_BYTES,
    MAX_SECONDS,
    Combination,
    ExchangeStep,
    ReduceStep,
    Region,
    Transfers,
)
from warpbus.pool.protocol.wire import decode, encode

_WHOLE_BYTES = 1 << 15
"""Up to this size each rank combines all of a tensor by itself, which takes one step in place of two."""

_SECONDS_TO_MEET = 60.0

_NOTHING = Region(0, 0, 0)


def register_backend() -> None:
    """Make the backend known to `torch.distributed`, which has no collective operations if it is not available."""
    dist.Backend.register_backend(NAME, PoolProcessGroup, devices=[NAME])


class PoolWork(dist.Work):
    """An operation that was given to the lease. What is called later is executed later, so that nothing waits for it.

    Args:
        results: tensors that it writes.
        finish: called once by the first `wait`.
    """

    def __init__(self, results: list[Tensor], finish: Any = None) -> None:
        super().__init__()
        self._results = results
        self._finish = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        return self._finish is None

    def is_success(self) -> bool:
        return self._finish is None

    def result(self) -> list[Tensor]:
        return self._results

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._results)
        return future


_ProcessGroup: Any = dist.ProcessGroup  # its methods have overloads that PyTorch does not call


class PoolProcessGroup(_ProcessGroup):
    """A process group of leases, one for each rank: the current device of each rank's process when it is made.

    Ranks find each other by the store, which gets each lease's id and link key. Tensors of the CPU are copied to the
    device for an operation and back.

    Args:
        store: where ranks meet.
        rank: of this process.
        size: the number of ranks.
        timeout: for which a lease waits for the others in one operation.

    Raises:
        StateError: no remote GPU is connected, or the leases are not of one pool.
        WarpbusError: the leases' processes cannot be connected.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._session = session_at(None)
        self._pending = _Pending()
        self._group = _joined(self._session, store, rank, size, _seconds(timeout))
        self._left = False
        self._name = ""

    def getBackendName(self) -> str:  # noqa: N802, the name is PyTorch's
        return NAME

    def name(self) -> str:
        return NAME

    def getRank(self) -> int:  # noqa: N802
        return self._rank

    def getSize(self) -> int:  # noqa: N802
        return self._size

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def shutdown(self) -> None:
        """Leave the group: the others' later operations fail."""
        if not self._left:
            self._left = True
            self._flush()
            self._session.ask(["leave", self._group])

    abort = shutdown

    def set_timeout(self, timeout: timedelta) -> None:
        raise UsageError("the timeout of a group of leases is given to init_process_group or new_group")

    # Reductions

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> PoolWork:
        for tensor in tensors:
            with self._placed("all_reduce", [tensor], [tensor]) as ((flat,), _):
                self._all_reduce("all_reduce", flat, _combination(opts))
        return PoolWork(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> PoolWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> PoolWork:
        for tensor in tensors:
            with self._placed("reduce", [tensor], [tensor] if self._rank == opts.rootRank else []) as ((flat,), _):
                shares = [_NOTHING] * self._size
                shares[opts.rootRank] = _region(flat)
                self._reduce("reduce", _combination(opts), flat.dtype, shares, shares[self._rank])
        return PoolWork(tensors)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> PoolWork:
        for output, parts in zip(outputs, inputs, strict=True):
            with self._placed("reduce_scatter", parts, [output]) as (sent, (result,)):
                shares = [_region(each) for each in sent]
                self._reduce("reduce_scatter", _combination(opts), result.dtype, shares, _region(result))
        return PoolWork(outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> PoolWork:
        return self.reduce_scatter([output], [_split(input, self._size)], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> PoolWork:
        return self.reduce_scatter(outputs, [_split(each, self._size) for each in inputs], opts)

    # Copies

    def broadcast(self, tensors: list[Tensor], opts: Any) -> PoolWork:
        root, me = opts.rootRank, self._rank
        for tensor in tensors:
            with self._placed("broadcast", [tensor], [] if root == me else [tensor]) as ((flat,), _):
                region = _region(flat)
                sends = tuple((rank, region) for rank in range(self._size) if rank != me) if root == me else ()
                self._exchange("broadcast", sends, () if root == me else ((root, region),))
        return PoolWork(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> PoolWork:
        for parts, tensor in zip(outputs, inputs, strict=True):
            with self._placed("all_gather", [tensor], parts) as ((flat,), found):
                self._all_gather("all_gather", flat, found)
        return PoolWork([part for parts in outputs for part in parts])

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> PoolWork:
        # One list of tensors for each rank here.
        return self.allgather([list(parts) for parts in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> PoolWork:
        return self.allgather([_split(output, self._size)], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> PoolWork:
        return self.allgather([_split(each, self._size) for each in outputs], inputs, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> PoolWork:
        root, me = opts.rootRank, self._rank
        (tensor,) = inputs
        parts = outputs[0] if root == me else []
        with self._placed("gather", [tensor], parts) as ((flat,), found):
            if root == me:
                _copy(found[me], flat)
            receives = tuple((rank, _region(each)) for rank, each in enumerate(found) if rank != me)
            self._exchange("gather", () if root == me else ((root, _region(flat)),), receives)
        return PoolWork(parts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> PoolWork:
        root, me = opts.rootRank, self._rank
        (tensor,) = outputs
        with self._placed("scatter", inputs[0] if root == me else [], [tensor]) as (sent, (found,)):
            if root == me:
                _copy(found, sent[me])
            sends = tuple((rank, _region(each)) for rank, each in enumerate(sent) if rank != me)
            self._exchange("scatter", sends, () if root == me else ((root, _region(found)),))
        return PoolWork(outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> PoolWork:
        me = self._rank
        with self._placed("all_to_all", inputs, outputs) as (sent, found):
            _copy(found[me], sent[me])
            sends = tuple((rank, _region(each)) for rank, each in enumerate(sent) if rank != me)
            receives = tuple((rank, _region(each)) for rank, each in enumerate(found) if rank != me)
            self._exchange("all_to_all", sends, receives)
        return PoolWork(outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> PoolWork:
        parts = [
            list(each.split(sizes)) if sizes else _split(each, self._size)
            for each, sizes in ((output, output_sizes), (input, input_sizes))
        ]
        return self.alltoall(parts[0], parts[1], opts)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> PoolWork:
        """The transfer begins with the first `wait` or other operation, together with all others that were called
        before: ranks that send to each other do not wait for each other."""
        for flat in [self._on_device("send", tensor) for tensor in tensors]:
            self._pending.sends.append((to, _region(flat)))
            self._pending.kept.append(flat)
        return PoolWork([], self._flush)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> PoolWork:
        """See `send`. Transfers between two ranks come in the order of the calls, whatever their tags are."""
        for tensor in tensors:
            flat = self._on_device("recv", tensor)
            self._pending.receives.append((source, _region(flat)))
            self._pending.kept.append(flat)
            if flat is not tensor:
                self._pending.back.append((tensor, flat))
        return PoolWork(tensors, self._flush)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> PoolWork:
        raise UsageError("recv: a group of leases does not receive from any rank: name the source")

    def barrier(self, opts: Any = None) -> PoolWork:
        """Wait until the leases of all ranks have executed all earlier calls."""
        others = tuple((rank, _NOTHING) for rank in range(self._size) if rank != self._rank)
        self._exchange("barrier", others, others)
        return PoolWork([], lambda: self._session.ask(["sync"]))

    # The names of these in PyTorch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _all_reduce(self, label: str, flat: Tensor, combination: Combination) -> None:
        whole = _region(flat)
        # Two ranks send each other as many bytes if each combines the whole tensor, and do not wait for a second step.
        if whole.nbytes <= _WHOLE_BYTES or self._size <= 2:
            self._reduce(label, combination, flat.dtype, [whole] * self._size, whole)
            return
        # Each rank combines one part, and gives it to the others.
        parts = [_region(part) for part in flat.view(-1).tensor_split(self._size)]
        own = parts[self._rank]
        self._reduce(label, combination, flat.dtype, parts, own)
        others = [rank for rank in range(self._size) if rank != self._rank]
        sends = tuple((rank, own) for rank in others)
        self._exchange(label, sends, tuple((rank, parts[rank]) for rank in others))

    def _all_gather(self, label: str, flat: Tensor, found: Sequence[Tensor]) -> None:
        own, others = _region(flat), [rank for rank in range(self._size) if rank != self._rank]
        _copy(found[self._rank], flat)
        sends = tuple((rank, own) for rank in others)
        self._exchange(label, sends, tuple((rank, _region(found[rank])) for rank in others))

    def _reduce(
        self, label: str, combination: Combination, dtype: torch.dtype, shares: Sequence[Region], result: Region
    ) -> None:
        if combination == "avg" and not (dtype.is_floating_point or dtype.is_complex):
            raise UsageError(f"{label}: an average of {dtype}: use ReduceOp.SUM, and divide")
        self._session.do_step(ReduceStep(self._group, label, combination, dtype, tuple(shares), result))

    def _exchange(self, label: str, sends: Transfers, receives: Transfers) -> None:
        self._flush()
        self._session.do_step(ExchangeStep(self._group, label, sends, receives))

    def _flush(self) -> None:
        """Do the transfers of `send` and `recv` that have not begun."""
        pending, self._pending = self._pending, _Pending()
        if pending.sends or pending.receives:
            self._session.do_step(ExchangeStep(self._group, "send", tuple(pending.sends), tuple(pending.receives)))
        for tensor, flat in pending.back:
            tensor.copy_(flat)

    @contextmanager
    def _placed(
        self, label: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Inputs and outputs as contiguous tensors of the device; what the block does to outputs is copied back."""
        self._flush()
        with torch.no_grad():
            known = {id(tensor): self._on_device(label, tensor) for tensor in (*inputs, *outputs)}
            yield [known[id(tensor)] for tensor in inputs], [known[id(tensor)] for tensor in outputs]
            for tensor in outputs:
                if known[id(tensor)] is not tensor:
                    tensor.copy_(known[id(tensor)])

    def _on_device(self, label: str, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            raise UsageError(f"{label}: a tensor of the layout {tensor.layout}: give a dense one")
        if is_remote(tensor) and session_of(tensor) is not self._session:
            raise UsageError(
                f"{label}: a tensor on {tensor.device}, but this rank of the group is {self._session.device}: "
                f'copy it by .to("{self._session.device}"), or call torch.warpbus.set_device before init_process_group'
            )
        placed = tensor if is_remote(tensor) else tensor.to(self._session.device)
        return placed.resolve_conj().resolve_neg().contiguous()


@dataclass
class _Pending:
    """Transfers that were called and have not begun.

    Attributes:
        sends, receives: see `ExchangeStep`.
        kept: tensors that they read or write.
        back: tensors to which others are copied afterwards.
    """

    sends: list[tuple[int, Region]] = field(default_factory=list)
    receives: list[tuple[int, Region]] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    back: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def _region(flat: Tensor) -> Region:
    size = flat.dtype.itemsize
    return Region(remote_of(flat).handle, int(flat.storage_offset()) * size, flat.numel() * size)


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy between contiguous tensors of one size, which may be the same one."""
    if _region(target) != _region(source):
        target.view(-1).copy_(source.view(-1))


def _split(tensor: Tensor, parts: int) -> list[Tensor]:
    """Equal parts of a tensor, one after the other in its memory."""
    if not tensor.is_contiguous() or tensor.numel() % parts:
        raise UsageError(
            f"a tensor of shape {[*tensor.shape]} is to be divided among {parts} ranks: give a contiguous one whose "
            "number of elements is a multiple"
        )
    return list(tensor.view(parts, -1).unbind())


def _combination(opts: Any) -> Combination:
    wanted = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for name in get_args(Combination):
        if wanted == getattr(dist.ReduceOp, name.upper()):
            found: Combination = name
            return found
    raise UsageError(
        f"the reduction {wanted} does not run in a group of leases: scale the tensors, and use ReduceOp.SUM"
    )


def _seconds(timeout: timedelta) -> float:
    return min(max(timeout.total_seconds(), 1.0), MAX_SECONDS)


def _joined(session: Session, store: Any, rank: int, size: int, seconds: float) -> bytes:
    """Join a group with the other ranks, whose leases connect to each other; returns its id."""
    member = session.member
    if member is None:
        raise UsageError(f"{session.device} cannot be in a group of leases: connect by warpbus.pool.connect")
    if rank == 0:
        store.set("group", secrets.token_bytes(GROUP_BYTES))
    group = bytes(store.get("group"))
    session.ask(["join", group, rank, size, seconds])
    try:
        store.set(f"member/{rank}", encode([member.lease, member.link_key]))
        for other in range(rank):
            match decode(store.get(f"member/{other}")):
                case [str(lease), bytes(key)]:
                    member.connect(lease, key, group, other)
                case _:
                    raise ProtocolError(f"rank {other} is no lease of a pool: give all ranks one backend")
        store.set(f"connected/{rank}", b"1")
        meeting = timedelta(seconds=max(seconds, _SECONDS_TO_MEET))
        store.wait([f"connected/{other}" for other in range(size)], meeting)
    except BaseException:
        session.ask(["leave", group])
        raise
    return group
