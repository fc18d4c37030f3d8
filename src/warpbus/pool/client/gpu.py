"""`connect`: a share of a GPU of the pool as a device of this process.

gpu = warpbus.pool.connect("warpbus://localhost:7700", memory="8GB", share=0.25)
model.to(gpu.device)
gpu.migrate("host/1")
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

from torch import Tensor

from warpbus.errors import ConnectionLostError, LeaseLostError, WarpbusError
from warpbus.pool.client import links
from warpbus.pool.client.checkpoints import load
from warpbus.pool.client.connection import Connection
from warpbus.pool.client.device import let_gradients_flow, register
from warpbus.pool.client.group_member import GroupMember
from warpbus.pool.client.program import Program, recorded
from warpbus.pool.client.session import FORKED, Session, SessionStatistics, leave, use
from warpbus.pool.client.swap_history import SwapHistory
from warpbus.pool.protocol import address as addresses
from warpbus.pool.protocol.control_channel import ControlChannel
from warpbus.pool.protocol.preamble import link_key
from warpbus.pool.quota import Quota

TOKEN = "WARPBUS_POOL_TOKEN"

# Without a word from the pool. Each of its own waits during a migration is shorter, the longest is for a process to
# start, so a daemon that is silent for longer has stopped.
_SECONDS_OF_SILENCE = 300.0
_SECONDS_TO_RELEASE = 60.0


def connect(
    where: str,
    *,
    memory: str | int,
    share: float = 1.0,
    priority: int = 0,
    on: str | None = None,
    token: str | None = None,
    queued: Callable[[int, str], None] | None = None,
) -> "Gpu":
    """Lease a part of a GPU as a device of this process: `warpbus:0`, the next lease `warpbus:1` and so on.

    Args:
        where: a pool's address: "warpbus://localhost:7700", "warpbuss://host:7700" (TLS) or "warpbus+unix:///path".
        memory: the quota, in bytes or as "8GB".
        share: the fraction of the GPU's compute, above 0 and at most 1.
        priority: leases with a higher priority leave the queue first; 0 is the default.
        on: a GPU ("host/1") or a host; None lets the pool choose.
        token: a token of the pool's `--tokens` file; by default the variable WARPBUS_POOL_TOKEN.
        queued: called with the place in the queue and the reason while the lease waits.

    Raises:
        UsageError: an argument is wrong, or no GPU of the pool is large enough.
        ConnectionLostError: no pool responds at the address.
        TokenError, AuthorizationError: the pool does not accept the token, or its certificate is not trusted.
        DeviceError: the process of the lease did not start.
    """
    quota = Quota.parse(memory, share)
    register()  # takes seconds at first: a lease that is granted waits for its client only so long
    control = ControlChannel(addresses.address(where), token or os.environ.get(TOKEN))
    asked = {
        "memory": quota.memory,
        "share": quota.share,
        "priority": priority,
        "on": on,
        "movable": True,
    }
    try:
        granted = control.ask(
            "lease", asked, None if queued is None else lambda said: queued(said["queued"], said["why"])
        )
        return Gpu(control, granted, quota)
    except BaseException:
        control.close()
        raise


class Gpu:
    """A lease of a part of a GPU.

    Attributes:
        device: the PyTorch device, for `tensor.to(...)`, `torch.zeros(..., device=...)` and so on.
        quota: the memory and share of the lease.
        lease: its id, as `warpbus pool status` shows it.
    """

    def __init__(self, control: ControlChannel, grant: dict[str, Any], quota: Quota) -> None:
        self._control = control
        self.lease: str = grant["lease"]
        self.quota = quota
        other = grant.get("address")  # of another machine, which knows nothing of the files of this one
        where = replace(addresses.address(other), ca=control.to.ca) if other else control.to
        self._connection = Connection(where, bytes.fromhex(self.lease), grant["key"])
        self._closed = False
        welcome = self._connection.welcome
        member = GroupMember(control.ask, self.lease, link_key(grant["key"]))
        self.session = Session(self._connection, quota.memory, welcome.device, welcome.capability, member=member)
        use(self.session)
        self.device = self.session.device
        _gpus.add(self)
        let_gradients_flow(self.device)

    @property
    def name(self) -> str:
        """The name of the GPU in the pool, such as "host/1"."""
        return self._connection.welcome.gpu

    @property
    def model(self) -> str:
        """The model of the GPU, such as "NVIDIA H100 80GB HBM3"."""
        return self._connection.welcome.name

    @property
    def patience(self) -> float:
        """Seconds for which a lost connection is retried before the lease counts as lost."""
        return self._connection.patience

    @patience.setter
    def patience(self, seconds: float) -> None:
        self._connection.patience = seconds

    @property
    def reconnections(self) -> int:
        """The number of reconnections, including those of migrations."""
        return self._connection.reconnections

    @property
    def swaps(self) -> SwapHistory:
        """The times when the lease was in host memory and the durations of its return, as far as this process knows.
        Each return is also logged as a warning of the logger `warpbus.pool`."""
        return self._connection.swaps

    @property
    def statistics(self) -> SessionStatistics:
        """The number of operators, batches, round trips and bytes since the connection was opened."""
        return self.session.statistics

    def synchronize(self) -> None:
        """Wait until all calls have been executed. Raises the error of the first call that failed."""
        self.session.ask(["sync"])

    def usage(self) -> dict[str, Any]:
        """The tenant's counters, such as bytes in use."""
        return self.session.ask(["usage"])  # type: ignore[return-value]

    def migrate(self, to: str, progress: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        """Migrate the lease to another GPU ("host/1") or host while the program runs; its tensors stay valid.

        Returns:
            `moved` (where to), `seconds`, `pause` (seconds without execution) and `bytes`.

        Raises:
            LeaseLostError: the lease ended during the migration.
            ConnectionLostError: the pool's daemon is gone, or silent for 300 s. It is not known whether the lease
                migrated; its tensors can be used, wherever it is.
            StateError: the lease is in a process group: destroy the group first.
            WarpbusError: the migration failed, and the lease continues on its old GPU.
        """
        links.close(self.session)
        self.session.flush()
        arguments = {"lease": self.lease, "to": to}
        try:
            # A client whose source died has to claim its lease at the destination: the pool waits for that.
            moved = self._control.ask(
                "migrate", arguments, progress, timeout=_SECONDS_OF_SILENCE, watch=self.session.watch
            )
        except (LeaseLostError, ConnectionLostError):
            self._control.close()  # its answer may still come; there is nothing more to ask
            raise
        self.synchronize()  # follows the lease
        return moved

    def checkpoints(self) -> list[dict[str, Any]]:
        """The checkpoints that the pool's machines offer: dicts of `host`, `name`, `files` and `nbytes`."""
        found: list[dict[str, Any]] = self._control.ask("checkpoints")["checkpoints"]
        return found

    def load_checkpoint(self, name: str, pattern: str = "*") -> dict[str, Tensor]:
        """Load tensors of a checkpoint that the machine of this lease offers (`warpbus pool serve --checkpoints`).

        The data is read from that machine's disk and does not pass through this process.

        Args:
            name: the name of the checkpoint.
            pattern: an `fnmatch` pattern of tensor names, such as "model.layers.0.*".

        Returns:
            The tensors on this device, by name, in the checkpoint's dtypes. With them,
            `model.load_state_dict(tensors, assign=True)` fills a model that is on the device or on "meta".

        Raises:
            UsageError: the machine offers no such checkpoint, or no tensor matches the pattern.
            torch.OutOfMemoryError: the tensors do not fit into the lease; nothing was loaded.
            CheckpointError: a file is damaged.
        """
        self._control.ask("load_checkpoint", {"lease": self.lease, "checkpoint": name})
        return load(self.session, name, pattern)

    def record(self) -> AbstractContextManager[Program]:
        """Record the operators in a block as a program; see `recorded`."""
        return recorded(self.session)

    def close(self) -> None:
        """Release the lease. Its tensors are lost."""
        if self._closed:
            return
        self._closed = True
        links.close(self.session)
        leave(self.session)
        self._connection.close()
        self._release()

    def _leave_to_parent(self) -> None:
        self._closed = True  # the lease is the parent's to give back
        self._control.abandon(FORKED)

    def _release(self) -> None:
        with self._control, suppress(WarpbusError):  # what a client leaves behind is reclaimed in any case
            self._control.ask("release", {"lease": self.lease}, timeout=_SECONDS_TO_RELEASE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_gpus: WeakSet[Gpu] = WeakSet()


def _leave_all_to_parent() -> None:
    for gpu in _gpus:
        gpu._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
