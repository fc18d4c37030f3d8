"""`warpbus pool dashboard`: a process of its own, which asks a daemon over its control connection."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import httpx
import pytest
from typer.testing import CliRunner

from warpbus.cli.pool import pool
from warpbus.errors import ConnectionLostError, UsageError
from warpbus.pool.protocol import wire
from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.frames import Kind
from warpbus.pool.protocol.preamble import LEASE_BYTES, MAGIC

STATUS = {"now": 5.0, "gpus": [], "leases": [], "queue": [], "events": []}
QUIET = {name: value for name, value in os.environ.items() if not name.startswith("WARPBUS_")}


class FakeDaemon:
    """Answers what a daemon is asked by the dashboard; `tokens` are those it was shown."""

    def __init__(self, port=0):
        self.tokens = []
        self.listening = socket.create_server(("127.0.0.1", port))
        self.port = self.listening.getsockname()[1]
        self.connections = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                connection, _ = self.listening.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection):
        assert connection.recv(len(MAGIC) + LEASE_BYTES, socket.MSG_WAITALL) == MAGIC + bytes(LEASE_BYTES)
        channel = Channel(connection)
        self.connections.append(channel)
        hello = wire.decode(channel.receive(10).payload)
        self.tokens.append(hello["token"])
        welcome = {"tenant": "local", "role": "admin", "tokens": False, "host": "mill"}
        channel.send(Kind.WELCOME, 0, wire.encode(welcome))
        with suppress(ConnectionLostError):
            while (frame := channel.receive(60)) is not None:
                assert wire.decode(frame.payload) == {"operation": "status", "arguments": {}}
                channel.send(Kind.ANSWER, frame.number, wire.encode({"result": STATUS}))

    def close(self):
        # Who waits in accept notices a socket that is shut down, not one that is closed.
        self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        for channel in self.connections:
            channel.close()


@contextmanager
def shown(*arguments, **variables):
    command = [sys.executable, "-m", "warpbus", "pool", "dashboard", "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**QUIET, **variables})
    try:
        ready = re.match(r"ready at (\S+): look there", process.stderr.readline())
        yield ready[1]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0


def until(reached, seconds=90.0):
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_it_shows_a_pool_and_finds_it_again():
    daemon = FakeDaemon()
    with shown("--address", f"warpbus://127.0.0.1:{daemon.port}", WARPBUS_POOL_TOKEN="a-token-of-a-tenant") as url:
        client = httpx.Client(base_url=url)
        until(lambda: client.get("/api/status").status_code == 200)
        assert client.get("/api/status").json() == STATUS
        assert "pool.js" in client.get("/").text
        assert daemon.tokens == ["a-token-of-a-tenant"]
        daemon.close()
        until(lambda: client.get("/api/status").status_code == 503)
        assert f"127.0.0.1:{daemon.port}" in client.get("/api/status").json()["error"]["message"]
        again = FakeDaemon(daemon.port)
        until(lambda: client.get("/api/status").status_code == 200)
        again.close()


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (["--address", "warpbus://127.0.0.1:1"], ConnectionLostError, "127.0.0.1:1"),
        (["--address", "http://mill:7700"], UsageError, "warpbus://"),
        (["--host", "0.0.0.0"], UsageError, "--api-key"),
    ],
)
def test_what_cannot_work_is_refused_before_it_listens(arguments, error, said):
    result = CliRunner().invoke(pool, ["dashboard", *arguments], env={"WARPBUS_POOL": None})
    assert isinstance(result.exception, error)
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)
