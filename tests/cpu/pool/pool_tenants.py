"""The other end of a tenant's process: what a daemon says to it, and clients frame by frame."""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress

import torch

from warpbus.errors import ConnectionLostError
from warpbus.pool.protocol import process_messages
from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.frames import PROTOCOL, Kind
from warpbus.pool.protocol.instructions import Writer
from warpbus.pool.protocol.operations import EVENTS
from warpbus.pool.protocol.wire import decode, encode

KEY = bytes(range(32))
HELLO = {"protocol": PROTOCOL, "torch": str(torch.__version__), "key": KEY, "claim": False}
SETUP = {
    "lease": "ab" * 16,
    "key": KEY,
    "tenant": "somebody",
    "gpu": "mill/0",
    "name": "a CPU",
    "device": "cpu",
    "memory": 1 << 20,
    "share": 1.0,
    "queue_file": None,
    "threads": 1,
    "environment": {},
    "migration_token": None,
    "saved": None,
    "priority": 0,
    "movable": True,
    "content": None,
    "sandbox": True,
    "native_calls": None,
    "gpu_links": False,
    "swapped_out": False,
}


class Daemon:
    """The other end of a tenant's process."""

    def __init__(self, **changes):
        self.end, other = process_messages.pair()
        with other:
            code = f"load('warpbus.pool.tenant.process').main({other.fileno()})"  # as a daemon starts it
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"from warpbus.dist.interpreters import load; {code}"],
                pass_fds=[other.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.end.settimeout(150)
        process_messages.send(self.end, "setup", {**SETUP, **changes})

    def tell(self, operation, **arguments):
        """Send it a request."""
        process_messages.send(self.end, operation, arguments)

    def hear(self, *events):
        """The next of these events that it reports."""
        while True:
            said, _ = process_messages.receive(self.end, EVENTS)
            if said.operation in events:
                return said

    def socket(self):
        """A connection that the process has got."""
        mine, other = socket.socketpair()
        with other:
            process_messages.send(self.end, "client", {}, other)
        return mine

    def client(self, **changes):
        """One that has said HELLO, and the answer."""
        channel = Channel(self.socket(), "the tenant")
        channel.send(Kind.HELLO, 0, encode({**HELLO, **changes}))
        return channel, channel.receive(90)

    def close(self):
        self.end.close()
        assert self.process.wait(90) is not None


@contextmanager
def started(**changes):
    daemon = Daemon(**changes)
    try:
        yield daemon
    finally:
        daemon.close()


def write(fill):
    """A batch's payload."""
    writer = Writer()
    fill(writer)
    return bytes(writer.take())


def acknowledged(channel, number):
    while (frame := channel.receive(90)).kind is not Kind.ACK or frame.number < number:
        assert frame.kind is Kind.ACK
    return frame.number


def ask(channel, *question):
    channel.send(Kind.ASK, 77, encode(list(question)))
    while (frame := channel.receive(90)).number != 77:
        assert frame.kind in (Kind.ACK, Kind.ERROR)
    return frame.kind, bytes(frame.payload) if frame.kind is Kind.DATA else decode(frame.payload)


def ended(channel):
    with suppress(ConnectionLostError):
        while channel.receive(90) is not None:
            pass
        return False
    return True
