"""`warpbus:0` as the rooms below see it: what is behind it, what the lease has left, how operators are recorded."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from warpbus.cuda.lent import Recorded
from warpbus.pool.client.program import recorded
from warpbus.pool.client.session import current
from warpbus.pool.client.transfers import fetch


class RemoteDevice:
    """The session that is connected, whichever it is; see `warpbus.cuda.lent.LentDevice`."""

    def check(self) -> None:
        current()

    def capability(self) -> tuple[int, int] | None:
        return current().capability

    def free_memory(self) -> int:
        session = current()
        session.flush()  # with what was let go of
        return session.memory - session.used

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        return fetch(tensor)

    def record(self) -> AbstractContextManager[Recorded]:
        return recorded(current())
