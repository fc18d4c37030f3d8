"""A tenant's process with slots as on a GPU of its own, in the memory that it shares with other leases, and with
threads for streams. Like GPUs it has them only in a daemon with the option `gpu_links`."""

import os
from typing import NoReturn

from pool_streams import ThreadStream, WaitedStream

from warpbus.pool.protocol.link_memory import SLOT, SLOTS
from warpbus.pool.tenant import device_link, execution, groups, process
from warpbus.pool.tenant.device_link import DeviceLink


class _SharedSlots:
    """Slots where host memory has its own: both processes map them, and nothing else uses them."""

    def __init__(self, memory):
        self._memory = memory
        self.own = memory._outgoing.data_ptr()
        self.handle, self.uuid = b"h" * 64, os.getpid().to_bytes(16, "little")

    def open(self, handle):
        assert handle == self.handle
        return self._memory._incoming.data_ptr()

    def close(self):
        pass

    def free(self):
        pass

    def word(self, page, offset):
        return page.data_ptr() + offset


class _DirectGroups(groups.LeaseGroups):
    def direct(self, memory):
        return DeviceLink(memory, _SharedSlots(memory)) if memory is not None and self._gpu_links else None

    def streams(self):
        return ThreadStream(), WaitedStream()


def main(descriptor: int) -> NoReturn:
    """Serve one lease."""
    device_link.DEVICE_SLOT, device_link.DEVICE_SLOTS = SLOT, SLOTS
    execution.LeaseGroups = _DirectGroups
    process.main(descriptor)
