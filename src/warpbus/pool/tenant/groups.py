"""The groups that a lease is in, and the memory that it shares with other leases for them."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from warpbus.cuda.signal_stream import SignalStream
from warpbus.errors import DeviceError, StateError
from warpbus.pool.protocol import link_memory
from warpbus.pool.protocol.group_steps import MAX_GROUPS, GroupPlace
from warpbus.pool.protocol.link_memory import LinkMemory
from warpbus.pool.tenant.device_link import DeviceLink, GpuSlots
from warpbus.pool.tenant.lease_group import LeaseGroup
from warpbus.pool.tenant.pending_steps import StepFailure, StepStream, StepTimes
from warpbus.pool.tenant.storages import Storages

_MOST_MEMORIES = 16
"""Other leases with which a lease shares memory, 32 MiB each of the host and, with `gpu_links`, 32 MiB of its GPU; with
more it exchanges bytes over sockets."""

_AHEAD = 0.005
"""Seconds that a rank may be ahead of others. A GPU takes in about a thousand launches; a process that launches more
waits in the driver until the GPU goes on, and hears neither the daemon nor its client."""


class LeaseGroups:
    """All groups of a lease.

    Args:
        storages: of the lease.
        gpu_links: connections to leases on other GPUs of the machine may have slots on both GPUs.

    Attributes:
        attend: see `LeaseGroup`.
        times: of all steps.
    """

    def __init__(self, storages: Storages, *, gpu_links: bool = False) -> None:
        self.attend: Callable[[], None] = lambda: None
        self.times = StepTimes()
        self._storages = storages
        self._gpu_links = gpu_links
        self._groups: dict[bytes, LeaseGroup] = {}
        self._memories: weakref.WeakSet[LinkMemory] = weakref.WeakSet()
        self._ended: list[DeviceLink] = []  # whose slots the other process may still have open
        self._failures: list[StepFailure] = []  # of groups that were left

    def __len__(self) -> int:
        return len(self._groups)

    def join(self, membership: GroupPlace) -> None:
        """Be in a group from now on. Nothing happens if the lease is in it: a question may come twice.

        Raises:
            StateError: the lease has another place in it, or is in too many.
        """
        found = self._groups.get(membership.group)
        if found is not None and found.membership == membership:
            return
        if found is not None or len(self._groups) >= MAX_GROUPS:
            raise StateError(f"the lease is in this group already, or in {MAX_GROUPS} others: leave one first")
        self._groups[membership.group] = LeaseGroup(membership, self._storages, lambda: self.attend(), self.times)

    def memory(self, descriptors: Sequence[int], *, connects: bool) -> LinkMemory | None:
        """Memory for a connection, of the daemon's descriptors; None if there are none.

        Raises:
            DeviceError: it cannot be had, so that a socket has to do; the descriptors are closed.
        """
        if len(descriptors) != link_memory.DESCRIPTORS:
            link_memory.close(descriptors)
            return None
        self._free()
        if len(self._memories) >= _MOST_MEMORIES:
            link_memory.close(descriptors)
            raise DeviceError(f"the lease shares memory with {_MOST_MEMORIES} other leases, which is the limit")
        memory = LinkMemory(descriptors, self._storages.device, connects=connects)
        self._memories.add(memory)
        return memory

    def direct(self, memory: LinkMemory | None) -> DeviceLink | None:
        """Slots on the GPU for a connection that has memory; None on a CPU, or without `gpu_links`.

        Raises:
            DeviceError: the GPU cannot share memory; the connection's memory does without.
        """
        device = self._storages.device
        if memory is None or not self._gpu_links or device.type != "cuda":
            return None
        return DeviceLink(memory, GpuSlots(device))

    def streams(self) -> tuple[StepStream, StepStream]:
        """Two streams of the GPU."""
        return SignalStream(self._storages.device), SignalStream(self._storages.device)

    def discard(self, direct: DeviceLink | None) -> None:
        """Close the slots of a connection, and free them when the other process has closed them, too."""
        if direct is not None:
            with suppress(DeviceError):  # the GPU has failed
                direct.close()
            if direct not in self._ended:
                self._ended.append(direct)
            self._free()

    def leave(self, group: bytes) -> None:
        """Leave a group. Nothing happens if the lease is not in it."""
        found = self._groups.get(group)
        if found is not None:
            found.drain()
            self._close(found)
            for direct in found.unlink():
                self.discard(direct)
            if (failure := found.watch.failure()) is not None:
                self._failures.append(failure)

    def leave_all(self) -> None:
        """Leave all groups at once: the lease ends."""
        for found in list(self._groups.values()):
            self._close(found)

    def failure(self) -> StepFailure | None:
        """A step that was launched and has failed; each once. All messages whose bytes are here are checked."""
        for group in self._groups.values():
            group.announcements.check()
            if group.watch.failed:
                return group.watch.failure()
        return self._failures.pop(0) if self._failures else None

    def keep_pace(self, seconds: float = _AHEAD) -> None:
        """Wait for ranks that have not come to a step that was launched here so many seconds ago, or earlier."""
        for group in self._groups.values():
            group.keep_pace(seconds)

    def _close(self, found: LeaseGroup) -> None:
        self._groups.pop(found.membership.group, None)
        found.close(f"rank {found.membership.rank} has left it")

    def _free(self) -> None:
        with suppress(DeviceError):
            self._ended = [each for each in self._ended if not each.free()]

    def get(self, group: bytes) -> LeaseGroup:
        """A group that the lease is in. Raises StateError if it is not."""
        found = self._groups.get(group)
        if found is None:
            raise StateError("the lease is not in this group: its client has to join first")
        return found
