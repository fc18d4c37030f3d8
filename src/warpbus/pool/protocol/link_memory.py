"""Memory that the processes of two leases on one machine share, for the bytes that they send each other in a group.

The daemon makes it together with the connection; its `LinkMemories` limits how much there is. Each direction has a ring
of slots; the connection says how many bytes are in the next slot, and a semaphore (eventfd) counts the slots that may
be filled. Each process also has a page that only it and its GPU write: `tenant.device_link` says what is in it.
"""

import fcntl
import mmap
import os
import select
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from warpbus.errors import DeviceError

SLOT = 4 << 20
"""Bytes of a slot."""
SLOTS = 4
"""Of each direction."""
DESCRIPTORS = 3
"""The memory, and the semaphore of each direction, of the process that connects first."""

PAGE = 4096
"""Bytes of the page that a process writes and the other one reads."""

SIZE = 2 * (SLOTS * SLOT + PAGE)
"""Bytes of the memory of two leases."""


def create() -> tuple[list[int], int]:
    """Make the memory. Its pages are allocated when they are first used, or pinned.

    Returns:
        The descriptors for both processes, and one for `in_use`.

    Raises:
        DeviceError: the system does not provide it.
    """
    made: list[int] = []
    try:
        memory = os.memfd_create("warpbus-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        made.append(memory)
        os.ftruncate(memory, SIZE)
        # Where one process could shrink it, the other one would die of SIGBUS.
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        flags = os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC
        made += [os.eventfd(SLOTS, flags) for _ in range(2)]
        # Descriptors that other processes get, and what they map, are of the same open file, which has the lock.
        fcntl.flock(memory, fcntl.LOCK_SH)
        return made, os.open(f"/proc/self/fd/{memory}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        close(made)
        raise DeviceError(f"memory for two leases to share cannot be created: {error}") from None


def in_use(watch: int) -> bool:
    """Whether a process has a descriptor of the memory, or has mapped it.

    Args:
        watch: the last descriptor of `create`. The memory is allocated until it is closed, too.
    """
    try:
        fcntl.flock(watch, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def close(descriptors: Sequence[int]) -> None:
    """Close descriptors that nothing was made of."""
    for each in descriptors:
        os.close(each)


class LinkMemory:
    """One process's view of the memory. One thread may send and another one receive.

    Args:
        descriptors: of `create`; they become its own.
        connects: whether this process connects, or lets the other one in.
        device: of the lease. For a GPU the memory is pinned.

    Attributes:
        own_page, other_page: uint8 `[PAGE]`: what this process and the other one tell. The other one may change its own
            at any time if it is hostile. They are zero at first.

    Raises:
        DeviceError: it cannot be mapped or pinned; the descriptors are closed.
    """

    def __init__(self, descriptors: Sequence[int], device: torch.device, *, connects: bool) -> None:
        memory, *semaphores = descriptors
        try:
            mapped = mmap.mmap(memory, SIZE)
        except (OSError, ValueError) as error:
            close(descriptors)
            raise DeviceError(f"memory that two leases share cannot be mapped: {error}") from None
        os.close(memory)
        # The view keeps the mapping; it is unpinned before.
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        pinned = None
        if device.type == "cuda":
            code = _pin(whole)
            if code != 0:
                close(semaphores)
                raise DeviceError(f"memory that two leases share cannot be pinned: CUDA error {code}")
            pinned = whole.data_ptr()
        weakref.finalize(self, _release, whole, pinned, semaphores)
        slots, pages = whole.split([2 * SLOTS * SLOT, 2 * PAGE])
        sides = [(*slots.split(SLOTS * SLOT), *pages.split(PAGE))[at::2] for at in range(2)]
        (self._outgoing, self.own_page), (self._incoming, self.other_page) = sides if connects else sides[::-1]
        self._may_fill, self._emptied = semaphores if connects else semaphores[::-1]
        self._filled = self._taken = 0

    def to_fill(self, seconds: float) -> Tensor | None:
        """The next slot to fill and announce, uint8 `[SLOT]`; None if none is empty for so long."""
        waiting = select.poll()
        waiting.register(self._may_fill, select.POLLIN)
        try:
            if not waiting.poll(1000 * seconds):
                return None
            os.eventfd_read(self._may_fill)
        except BlockingIOError:
            return None
        slot = _slot(self._outgoing, self._filled)
        self._filled += 1
        return slot

    def filled(self) -> Tensor:
        """The next slot that the other process has announced, uint8 `[SLOT]`; its bytes may change at any time if
        that process is hostile. To be given back by `empty`."""
        slot = _slot(self._incoming, self._taken)
        self._taken += 1
        return slot

    def empty(self) -> None:
        """Give back the oldest slot of `filled`."""
        os.eventfd_write(self._emptied, 1)


def _slot(side: Tensor, number: int) -> Tensor:
    start = number % SLOTS * SLOT
    return side[start : start + SLOT]


def _pin(whole: Tensor) -> int:
    """Pin memory. Returns CUDA's error code.

    CUDA also keeps an error for the thread that has met it, whose next kernel launch would report it as its own. So a
    thread that launches nothing pins the memory.
    """
    codes: list[int] = []
    register = torch.cuda.cudart().cudaHostRegister
    thread = threading.Thread(target=lambda: codes.append(int(register(whole.data_ptr(), whole.nbytes, 0))))
    thread.start()
    thread.join()
    return codes[0]


def _release(whole: Tensor, pinned: int | None, semaphores: Sequence[int]) -> None:
    if pinned is not None:
        torch.cuda.cudart().cudaHostUnregister(pinned)
    close(semaphores)
