"""The processes of tenants, on the daemon's side: start, keep spares, send messages, end.

Importing torch takes seconds, so spare processes have imported it before there is a lease for them. A process gets
one end of a socket pair (`warpbus.pool.protocol.process_messages`) and exits when the daemon closes its end; if the
daemon is killed, the kernel ends the process. Each process has a directory of its own, which is removed with it, and
little access to the rest of the machine (`warpbus.pool.tenant.sandbox`). The requests that it gets and the events that
it reports are listed in `warpbus.pool.protocol.operations`.
"""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from warpbus.errors import ConnectionLostError, PeerTimeoutError, WarpbusError
from warpbus.pool.protocol import process_messages
from warpbus.pool.protocol.messages import Request, encode_request
from warpbus.pool.protocol.operations import EVENTS
from warpbus.pool.tenant.sandbox import Confinement

Confine: TypeAlias = Callable[[Path], Confinement | None]

_SECONDS_TO_TAKE = 5.0
_SECONDS_TO_LEAVE = 5.0
# Secrets of whoever started the daemon are none of the tenants' business.
_SECRETS = ("WARPBUS_POOL_TOKEN", "WARPBUS_API_KEY")


class TenantProcess:
    """One process. It has to be made in the event loop, in a thread that lives as long as the daemon.

    Args:
        program: the module whose `main` it runs, with the descriptor of its end.
        directory: where its own directory is made.
        confine: its permissions on the machine, given its own directory; None for all of it.

    Attributes:
        directory: its own, for its uploads, its state when it is suspended, and temporary files.
        said: its messages, in order, and None once it is gone.
    """

    def __init__(self, program: str, directory: Path, confine: Confine) -> None:
        mine, other = process_messages.pair()
        mine.setblocking(False)
        self.directory = Path(tempfile.mkdtemp(dir=directory))
        confinement = confine(self.directory)
        enter = "" if confinement is None else f"sandbox.enter(sandbox.Confinement.decode({confinement.encode()!r})); "
        code = (
            f"import sys; sys.path = {sys.path!r}; from warpbus.dist.interpreters import end_with, load; "
            f"from warpbus.pool.tenant import sandbox; {enter}"
            f"end_with({os.getpid()}); load({program!r}).main({other.fileno()})"
        )
        environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
        environment |= {"TMPDIR": str(self.directory), "CUDA_CACHE_PATH": str(self.directory / "cuda")}
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env=environment,
                process_group=0,  # Ctrl-C is for the daemon
            )
        self.said: asyncio.Queue[Request | None] = asyncio.Queue()
        self._socket: socket.socket | None = mine
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(mine, self._receive)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is still connected."""
        return self._socket is not None

    async def tell(self, operation: str, arguments: Mapping[str, Any], *descriptors: int) -> None:
        """Send it a request, perhaps with descriptors, of which it gets copies.

        Raises:
            PoolError: it is gone, or takes nothing in.
        """
        packet = encode_request(operation, arguments)
        end = self._loop.time() + _SECONDS_TO_TAKE
        while self._socket is not None:
            try:
                socket.send_fds(self._socket, [packet], descriptors)
                return
            except BlockingIOError:
                if self._loop.time() > end:
                    raise PeerTimeoutError(f"the tenant's process {self.pid} is too busy to take a message") from None
                await asyncio.sleep(0.01)
            except OSError:
                self._hang_up()
        raise ConnectionLostError(f"the tenant's process {self.pid} is gone")

    async def end(self) -> str:
        """Let it go: it ends when its socket closes, or is killed. Its directory is removed.

        Returns:
            How it ended, in words.
        """
        self._hang_up()
        for _ in range(round(_SECONDS_TO_LEAVE / 0.02)):
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.02)
        self.kill()
        # A process that waits for its GPU in the kernel may need a while even to be killed.
        code = await asyncio.to_thread(self._process.wait)
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)
        if code >= 0:
            return f"ended with exit code {code}"
        name = {known.value: known.name for known in signal.Signals}.get(-code, "unknown")
        return f"was killed by signal {-code} ({name})"

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self._hang_up()
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            said, descriptors = process_messages.receive(self._socket, EVENTS)
        except WarpbusError:
            self._hang_up()
            return
        for each in descriptors:
            os.close(each)
        self.said.put_nowait(said)

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None
            self.said.put_nowait(None)


class Spares:
    """Processes that wait for a lease.

    Args:
        count: how many are kept ready.
        program, directory, confine: see `TenantProcess`.
    """

    def __init__(self, count: int, program: str, directory: Path, confine: Confine) -> None:
        self._count = count
        self._start = partial(TenantProcess, program, directory, confine)
        self._waiting: list[TenantProcess] = []

    def fill(self) -> None:
        """Start as many as are missing."""
        self._waiting = [each for each in self._waiting if each.alive]
        self._waiting += [self._start() for _ in range(self._count - len(self._waiting))]

    def take(self) -> TenantProcess:
        """A process, the one that has had the longest time to load. Call `fill` when it has got its work."""
        while self._waiting:
            process = self._waiting.pop(0)
            if process.alive:
                return process
        return self._start()

    async def close(self) -> None:
        """End those that wait."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.kill()
        await asyncio.gather(*(each.end() for each in waiting))
