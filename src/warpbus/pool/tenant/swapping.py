"""A lease's memory goes to host memory while others need the GPU, and comes back when its client has work for it.

The lease is suspended to main memory (`warpbus.pool.tenant.suspension`) and resumed from there by the same process,
which keeps its client's connection. Until all of it has been written, or read back, the other copy is complete: a
failure on the way leaves the lease where it was. If the process ends, the lease is lost, as in device memory.
"""

import time
from collections.abc import Iterator
from typing import Protocol

import torch

from warpbus.errors import StorageError, WarpbusError
from warpbus.pool.protocol.failures import error_value
from warpbus.pool.protocol.wire import Value
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.suspension import SuspendedInMemory, suspend_to_memory

_REPORT_EVERY = 1.0


class SwappableTenant(Protocol):
    """The process (`warpbus.pool.tenant.server.TenantServer`)."""

    executor: Executor

    def tell(self, event: str, **facts: Value) -> None:
        """Report one of `operations.EVENTS` to the daemon."""

    def tell_client(self, facts: dict[str, Value]) -> None:
        """Send the client a SWAP frame, if it is connected."""

    def step_aside(self) -> None:
        """Let other tenants have the GPU."""

    def lose(self, why: str) -> None:
        """End the lease; its client gets the reason."""


class Swapping:
    """Where the memory of a lease is.

    Args:
        tenant: the process of the lease.
        out: the lease begins without the right to device memory.

    Attributes:
        out: nothing may be executed until the daemon says `swap_in`.
    """

    def __init__(self, tenant: SwappableTenant, *, out: bool) -> None:
        self.out = out
        self._tenant = tenant
        self._saved: SuspendedInMemory | None = None
        self._out_since = time.perf_counter()
        self._wanted: float | None = None
        self._reported = float("-inf")

    @property
    def used(self) -> int:
        """Bytes of the lease's storages, wherever they are."""
        return self._tenant.executor.storages.used if self._saved is None else self._saved.used

    def want(self) -> None:
        """The client has sent work: tell the daemon, once, that the lease has to come back."""
        if self._wanted is None:
            self._wanted = time.perf_counter()
            self._tenant.tell("wanted")

    def unwant(self) -> None:
        """The client that sent the work is gone; what it sends again counts anew."""
        self._wanted = None

    def wait(self, why: str) -> None:
        """Tell the client, which has sent work, what the lease waits for."""
        if self.out and self._wanted is not None:
            self._tenant.tell_client({"state": "waits", "why": why})

    def swap_out(self, limit: int, why: str) -> Iterator[None]:
        """Write the lease to host memory and free the device's, or tell the daemon why not.

        Args:
            limit: bytes of host memory that it may use.
            why: for the client.
        """
        tenant, began = self._tenant, time.perf_counter()
        self._tell("swapping out")
        yield
        tenant.step_aside()
        try:
            tenant.executor.storages.synchronize()
            self._saved = suspend_to_memory(tenant.executor, limit, lambda: self._tell("swapping out"))
        except WarpbusError as error:
            tenant.tell("failed", **error_value(error))
            return
        self._free()
        self.out, self._wanted, self._out_since = True, None, time.perf_counter()
        seconds, nbytes = self._out_since - began, self._saved.nbytes
        tenant.tell("swapped_out", seconds=seconds, bytes=nbytes)
        tenant.tell_client({"state": "out", "seconds": seconds, "bytes": nbytes, "why": why})

    def swap_in(self) -> Iterator[None]:
        """Read the lease back from host memory, or tell the daemon why not: it stays in host memory then."""
        tenant, began = self._tenant, time.perf_counter()
        saved = self._saved
        yield
        if saved is not None:
            try:
                saved.resume(tenant.executor, lambda: self._tell("swapping in"))
            except StorageError as error:
                tenant.lose(str(error))
                return
            except RuntimeError as error:  # the device has no room, or fails; Warpbus's errors are RuntimeErrors too
                self._free()
                tenant.tell("failed", type="DeviceError", message=str(error).partition("\n")[0])
                return
            saved.close()
        self._saved, self.out = None, False
        now = time.perf_counter()
        seconds, nbytes = now - began, 0 if saved is None else saved.nbytes
        tenant.tell("swapped_in", seconds=seconds, bytes=nbytes)
        waited = 0.0 if self._wanted is None else now - self._wanted
        away, self._wanted = began - self._out_since, None
        tenant.tell_client({"state": "in", "seconds": seconds, "bytes": nbytes, "waited": waited, "away": away})

    def _tell(self, phase: str) -> None:
        """Tell the daemon at intervals that the swap goes on: it waits only so long."""
        now = time.perf_counter()
        if now - self._reported >= _REPORT_EVERY:
            self._reported = now
            self._tenant.tell("progress", phase=phase, done=0, total=self.used)

    def _free(self) -> None:
        """Free the device's memory."""
        executor = self._tenant.executor
        executor.clear()
        if executor.device.type == "cuda":
            torch.cuda.empty_cache()
