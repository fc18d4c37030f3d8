"""The remote devices for lower layers: its capability, free memory, asynchronous reads and recording."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from warpbus.cuda.remote import Recorded
from warpbus.pool.client.program import recorded
from warpbus.pool.client.session import current
from warpbus.pool.client.transfers import fetch


class RemoteDevice:
    """The device of the current session; implements `warpbus.cuda.remote.RemoteBackend`."""

    def check(self) -> None:
        current()

    def capability(self) -> tuple[int, int] | None:
        return current().capability

    def free_memory(self) -> int:
        session = current()
        session.flush()  # so that freed storages count
        return session.memory - session.used

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        return fetch(tensor)

    def record(self) -> AbstractContextManager[Recorded]:
        return recorded(current())
