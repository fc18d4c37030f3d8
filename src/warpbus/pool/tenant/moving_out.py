"""The work of a tenant's process, between batches, when its lease is to leave it: for another process, or a file."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Protocol

from warpbus.errors import DeviceError, PoolError, StateError, WarpbusError
from warpbus.pool.protocol.address import address
from warpbus.pool.protocol.channel import HANDSHAKE_SECONDS, begin, context_for
from warpbus.pool.protocol.failures import error_value
from warpbus.pool.protocol.operations import COPYING_REST
from warpbus.pool.protocol.sockets import Tls
from warpbus.pool.protocol.wire import Value
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.migration_source import MigrationSource, SourceState
from warpbus.pool.tenant.suspension import suspend

SUSPENDED = "the lease is suspended: resume it with `warpbus pool resume-lease`"

_REPORT_EVERY = 0.1
_NAP = 0.001


class MovableTenant(Protocol):
    """The process (`warpbus.pool.tenant.server.TenantServer`)."""

    executor: Executor
    over: DeviceError | PoolError | None

    def tell(self, event: str, **facts: Value) -> None:
        """Report one of `operations.EVENTS` to the daemon."""

    def rest_work(self) -> None:
        """Until the client sends something, or a millisecond is over, do nothing: the other side is at work."""

    def step_aside(self) -> None:
        """Let other tenants have the GPU."""

    def warn_client(self, address: str, *, final: bool) -> None:
        """Tell the client where the lease moves to."""

    def hang_up(self) -> None:
        """End the client's connection; it comes back, and asks here first."""


def migrate(
    tenant: MovableTenant, to: str, sock: socket.socket, tls: Tls | None, migration_token: bytes, lease_id: bytes
) -> Iterator[None]:
    """Move the lease to the process that waits for it at `to`, where the daemon has connected `sock`: this process may
    not connect to anything. The lease executes between two pieces of this, but for the last one. If it does not come
    about, the daemon is informed and everything is as before."""
    source: MigrationSource | None = None
    warned = False
    try:
        tenant.step_aside()
        where = address(to)
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        arguments = (sock, where, lease_id, migration_token, context_for(where, tls), deadline)
        with ThreadPoolExecutor(1, "migration") as thread:  # the other side may be slow to answer
            opening = thread.submit(begin, *arguments)
            while not opening.done():
                wait([opening], _NAP)
                yield
        channel = opening.result()
        channel.before_waiting = tenant.step_aside
        source = MigrationSource(tenant.executor, channel, migration_token=migration_token)
        source.ask()
        while not source.is_accepted(_NAP):
            yield
        reported = -_REPORT_EVERY
        content = tenant.executor.content
        while True:
            progress = source.copy_ahead()
            if time.monotonic() - reported >= _REPORT_EVERY:
                reported = time.monotonic()
                tenant.tell("progress", phase="copying ahead", done=progress.copied, total=progress.total)
            if progress.stop_reason:
                if content is None or not content.awaited:
                    break
                time.sleep(_NAP)  # the destination may not have it
            if progress.waits:
                tenant.rest_work()
            yield
        tenant.tell("progress", phase=COPYING_REST, done=progress.copied, total=progress.total)
        tenant.warn_client(to, final=False)
        warned = True
        tenant.step_aside()
        report = source.finish()
    except WarpbusError as error:
        sock.close()
        if source is not None and source.state is SourceState.MOVED:
            raise  # nobody knows better than the destination and the client
        if warned:  # a client that connects again forgets earlier notices
            tenant.hang_up()
        tenant.tell("failed", **error_value(error))
        return
    tenant.warn_client(to, final=True)
    copied = report.ahead + report.paused
    tenant.tell("moved", seconds=report.seconds, pause=report.pause, bytes=copied, path=report.path)


def save(tenant: MovableTenant, path: Path) -> Iterator[None]:
    """Write the lease to a file, and execute nothing more; or tell the daemon why not, and go on."""
    began = time.perf_counter()
    tenant.tell("progress", phase="writing", done=0, total=tenant.executor.storages.used)
    yield
    tenant.step_aside()
    try:
        nbytes = suspend(tenant.executor, path)
    except WarpbusError as error:
        tenant.tell("failed", **error_value(error))
        return
    tenant.over = StateError(SUSPENDED)
    tenant.tell("suspended", seconds=time.perf_counter() - began, bytes=nbytes)
