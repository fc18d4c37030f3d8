"""`connect`: a share of a GPU of the pool as a device of this process.

gpu = warpbus.pool.connect("warpbus://localhost:7700", memory="8GB", share=0.25)
model.to(gpu.device)
gpu.migrate("host/1")
"""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from warpbus.errors import ConnectionLost, DeviceError
from warpbus.pool import address as addresses
from warpbus.pool.address import Address
from warpbus.pool.channel import Channel
from warpbus.pool.channel import connect as open_channel
from warpbus.pool.connection import PROTOCOL, Connection, exception
from warpbus.pool.device import register
from warpbus.pool.failures import Failure
from warpbus.pool.frames import Kind
from warpbus.pool.program import Program, recorded
from warpbus.pool.quota import Quota
from warpbus.pool.session import Session, Statistics, use
from warpbus.pool.wire import Value, decode, encode

TOKEN = "WARPBUS_POOL_TOKEN"


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
    """Lease a share of a GPU, and make it the device `warpbus:0` of this process.

    Args:
        where: a pool's address: "warpbus://localhost:7700", "warpbuss://host:7700" (TLS) or "warpbus+unix:///path".
        memory: the quota, in bytes or as "8GB".
        share: of the GPU's compute, above 0 and up to 1.
        priority: a higher one waits before lower ones; 0 is usual.
        on: a GPU ("host/1") or a host; None lets the pool choose.
        token: what the pool's `--tokens` file gives; by default the variable WARPBUS_POOL_TOKEN.
        queued: told the place in the queue and why, while there is no room.

    Raises:
        UsageError: an argument is wrong, or no GPU of the pool could ever give that much.
        ConnectionLost: no pool answers at the address.
        DeviceError: the pool refuses, or this process has a remote GPU already.
    """
    quota = Quota.parse(memory, share)
    daemon = Daemon(addresses.address(where), token or os.environ.get(TOKEN))
    asked: dict[str, Value] = {
        "do": "lease",
        "memory": quota.memory,
        "share": quota.share,
        "priority": priority,
        "on": on,
        "movable": True,
    }
    try:
        for answer in daemon.ask(asked):
            if "lease" in answer:
                return Gpu(daemon, answer, quota)
            if queued is not None:
                queued(answer["queued"], answer["why"])
    except BaseException:
        daemon.close()
        raise
    raise ConnectionLost(f"{where} ended the talk without a lease")


class Daemon:
    """A control connection to a machine's daemon."""

    def __init__(self, where: Address, token: str | None) -> None:
        self.where = where
        self._channel: Channel = open_channel(where)
        self._asked = itertools.count(1)
        self._channel.send(Kind.HELLO, 0, encode({"protocol": PROTOCOL, "token": token}))
        frame = self._channel.receive(timeout=30.0)
        if frame is None:
            raise ConnectionLost(f"{where} does not answer")
        value: Any = decode(frame.payload)
        if frame.kind is not Kind.WELCOME:
            self._channel.close()
            raise exception(Failure(value["type"], value["message"], "", 0))
        self.host = str(value["host"])

    def ask(self, question: dict[str, Value]) -> Iterator[dict[str, Any]]:
        """The answers to a question, as they come."""
        number = next(self._asked)
        self._channel.send(Kind.ASK, number, encode(question))
        while True:
            frame = self._channel.receive()
            if frame is None or frame.number != number:
                continue
            value: Any = decode(frame.payload)
            if frame.kind is Kind.ERROR:
                raise exception(Failure(value["type"], value["message"], "", 0))
            yield value

    def answer(self, question: dict[str, Value]) -> dict[str, Any]:
        """The first answer."""
        return next(self.ask(question))

    def close(self) -> None:
        self._channel.close()


class Gpu:
    """A leased share of a GPU.

    Attributes:
        device: of PyTorch, for `tensor.to(...)`, `torch.zeros(..., device=...)` and the like.
        quota: what the lease grants.
        lease: its id, as `warpbus pool status` shows it.
    """

    def __init__(self, daemon: Daemon, grant: dict[str, Any], quota: Quota) -> None:
        self._daemon = daemon
        self.lease: str = grant["lease"]
        self.quota = quota
        self.device = register()
        other = grant.get("address")  # of another machine, which knows nothing of the files of this one
        where = replace(addresses.address(other), ca=daemon.where.ca) if other else daemon.where
        self._connection = Connection(where, bytes.fromhex(self.lease), grant["key"])
        self._closed = False
        welcome = self._connection.welcome
        self.session = Session(self._connection, quota.memory, welcome.device, welcome.capability)
        try:
            use(self.session)
        except DeviceError:
            self._connection.close()
            self._release()
            raise

    @property
    def name(self) -> str:
        """Where it is now, such as "host/1"."""
        return self._connection.welcome.gpu

    @property
    def model(self) -> str:
        """What it is, such as "NVIDIA H100 80GB HBM3"."""
        return self._connection.welcome.name

    @property
    def statistics(self) -> Statistics:
        """Operators, batches, round trips and bytes since the connection was made."""
        return self.session.statistics

    def synchronize(self) -> None:
        """Wait until everything asked for is done; raises what went wrong on the way."""
        self.session.ask(["sync"])

    def usage(self) -> dict[str, Any]:
        """Bytes used and the like, as the tenant counts them."""
        return self.session.ask(["usage"])  # type: ignore[return-value]

    def migrate(self, to: str, progress: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        """Move to another GPU ("host/1") or host while the program goes on; its tensors stay valid.

        Returns:
            `moved` (where to), `seconds`, `pause` (seconds without execution) and `bytes`.
        """
        self.session.flush()
        for answer in self._daemon.ask({"do": "migrate", "lease": self.lease, "to": to}):
            if "moved" in answer:
                self.synchronize()  # follows the lease
                return answer
            if progress is not None:
                progress(answer)
        raise ConnectionLost("the pool ended the talk before the move was done")

    def record(self) -> AbstractContextManager[Program]:
        """A program of the operators in a block; see `recorded`."""
        return recorded(self.session)

    def close(self) -> None:
        """Give the lease back; tensors on it are gone."""
        if self._closed:
            return
        self._closed = True
        use(None)
        self._connection.close()
        self._release()

    def _release(self) -> None:
        with suppress(ConnectionLost):  # the pool takes it back by itself when its client is gone
            self._daemon.answer({"do": "release", "lease": self.lease})
        self._daemon.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
