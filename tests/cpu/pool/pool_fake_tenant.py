"""A tenant's process without torch, so that it starts at once: it welcomes clients, moves, is saved, and holds nothing.

The last digit of its lease's memory says what it does wrong.
"""

import os
import signal
import socket
import sys
import threading
import time
import types
from pathlib import Path

REFUSES_TO_MOVE, DIES_BEFORE, DIES_AFTER, NEVER_READY, DIES_EARLY, LOSES_THE_OTHER = 1, 2, 3, 4, 5, 6


class _Torch(types.ModuleType):
    """All that the pool's protocol wants of torch: names."""

    dtype, layout, memory_format = (
        type(name, (), {"__init__": lambda self, _: None}) for name in ("dtype", "la", "me")
    )

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        found = self.dtype(name)
        setattr(self, name, found)
        return found


def main(descriptor: int) -> None:
    """Serve one lease."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = _Torch("torch")
    from warpbus.pool.protocol import process_messages
    from warpbus.pool.protocol.address import address
    from warpbus.pool.protocol.channel import Channel, begin, context_for
    from warpbus.pool.protocol.frames import Kind
    from warpbus.pool.protocol.operations import COPYING_REST, TENANT
    from warpbus.pool.protocol.sockets import Tls
    from warpbus.pool.protocol.wire import decode, encode

    end = socket.socket(fileno=descriptor)
    channels: list[Channel] = []
    try:
        (_, setup), _ = process_messages.receive(end, TENANT)
    except RuntimeError:  # it was a spare one
        return
    wrong = setup["memory"] % 10
    connected = 0

    def attend(sock: socket.socket) -> None:
        nonlocal connected
        channel = Channel(sock)
        channels.append(channel)
        hello = decode(channel.receive(90).payload)
        if "migration_token" in hello:
            assert hello["migration_token"] == setup["migration_token"]
            channel.send(Kind.STATE, 0, b"prepared")
            if channel.receive(90) is not None:
                process_messages.send(end, "arrived", {})
            return
        assert hello["key"] == setup["key"]
        connected += 1
        process_messages.send(end, "clients", {"connected": connected, "memory": 7})
        facts = {"pid": os.getpid(), "gpu": setup["gpu"], "saved": setup["saved"] is not None}
        channel.send(Kind.WELCOME, 0, encode(facts))
        try:
            while channel.receive() is not None:
                pass
        except OSError:
            pass
        except RuntimeError:  # it has gone
            pass
        connected -= 1
        process_messages.send(end, "clients", {"connected": connected, "memory": 7})

    def move(order: dict, sock: socket.socket) -> None:
        process_messages.send(end, "progress", {"phase": "copying", "done": 1, "total": 2})
        if wrong in (REFUSES_TO_MOVE, LOSES_THE_OTHER):
            kind = "DeviceError" if wrong == REFUSES_TO_MOVE else "ConnectionLostError"
            process_messages.send(end, "failed", {"type": kind, "message": "it does not want to"})
            return
        if wrong == DIES_EARLY:
            os.kill(os.getpid(), signal.SIGKILL)
        to, tls = address(order["to"]), order["ca"] and Tls(Path(order["ca"]))
        channel = begin(
            sock, to, order["lease_id"], order["migration_token"], context_for(to, tls), time.monotonic() + 90
        )
        channel.send(Kind.HELLO, 0, encode({"migration_token": order["migration_token"]}))
        assert channel.receive(90).kind is Kind.STATE
        process_messages.send(end, "progress", {"phase": COPYING_REST, "done": 2, "total": 2})
        if wrong == DIES_BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        channel.send(Kind.STATE, 1, b"commit")
        if wrong == DIES_AFTER:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        process_messages.send(end, "moved", {"seconds": 0.5, "pause": 0.01, "bytes": 123})

    if wrong == NEVER_READY:
        process_messages.send(end, "failed", {"type": "DeviceError", "message": "the GPU is on fire"})
    else:
        process_messages.send(end, "ready", {})
    while True:
        try:
            (operation, order), descriptors = process_messages.receive(end, TENANT)
        except RuntimeError:
            os._exit(0)
        sockets = [socket.socket(fileno=each) for each in descriptors]
        if operation == "client":
            threading.Thread(target=attend, args=(sockets[0],), daemon=True).start()
        elif operation == "migrate":
            threading.Thread(target=move, args=(order, sockets[0]), daemon=True).start()
        elif operation == "suspend":
            Path(order["path"]).write_text("state")
            process_messages.send(end, "suspended", {"seconds": 0.1, "bytes": 5})
        elif operation == "end":
            for channel in channels:
                channel.close()
            os._exit(0)
