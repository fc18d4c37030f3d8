"""A tenant's process that cannot pin the memory that it shares with other leases, as on a GPU without room for that."""

from typing import NoReturn

from warpbus.errors import DeviceError
from warpbus.pool.protocol import link_memory
from warpbus.pool.tenant import groups, process


class _Unpinned(link_memory.LinkMemory):
    def __init__(self, descriptors, *_, **__):
        link_memory.close(descriptors)
        raise DeviceError("memory that two leases share cannot be pinned: CUDA error 2")


def main(descriptor: int) -> NoReturn:
    """Serve one lease."""
    groups.LinkMemory = _Unpinned
    process.main(descriptor)
