"""A client whose connection broke: which answers of a machine end its patience, and which do not."""

import socket
import threading
from contextlib import suppress

import pytest
from pool_doors import read_preamble

from warpbus.errors import ConnectionLostError, LeaseLostError, NotListeningError
from warpbus.pool.client import connection as connections
from warpbus.pool.client.connection import Connection
from warpbus.pool.protocol.address import address
from warpbus.pool.protocol.channel import Channel, connect
from warpbus.pool.protocol.failures import error_value
from warpbus.pool.protocol.frames import Kind
from warpbus.pool.protocol.wire import decode, encode

LEASE, KEY = bytes(range(16)), bytes(range(32))
FOR_EVER = 3600.0
WELCOME = {"executed": 0, "device": "cpu", "name": "a CPU", "gpu": "mill/0", "capability": None}
SUSPENDED = error_value(ConnectionLostError("it is suspended"))


class Machine:
    """A port at which each connection is answered by `answer`, which gets the channel and the HELLO; None hangs up."""

    def __init__(self, answer, port=0):
        self.answer = answer
        self.met = 0
        self.answered = threading.Event()  # its thread has sent the answer to the end
        self._listening = socket.create_server(("127.0.0.1", port))
        self.port = self._listening.getsockname()[1]
        self._channels = []
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def address(self):
        return address(f"warpbus://127.0.0.1:{self.port}")

    def kill(self):
        """As the kernel does it: nothing listens, and what was connected is closed."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()

    def cut(self):
        while self._channels:
            self._channels.pop().close()

    def _serve(self):
        with suppress(OSError):
            while True:
                sock, _ = self._listening.accept()
                self.met += 1
                if self.answer is None:
                    sock.close()
                    continue
                with suppress(AssertionError, ConnectionLostError):
                    read_preamble(sock, KEY)
                    channel = Channel(sock)
                    self._channels.append(channel)
                    self.answer(channel, decode(channel.receive(30).payload))
                    self.answered.set()


def welcome(channel, _hello=None):
    channel.send(Kind.WELCOME, 0, encode(WELCOME))


def refuse(channel, _hello):
    channel.send(Kind.REFUSED, 0, encode(SUSPENDED))
    channel.close()


@pytest.fixture
def machine():
    made = Machine(welcome)
    yield made
    with suppress(OSError):
        made.kill()


@pytest.fixture
def client(machine):
    made = Connection(machine.address, LEASE, KEY, patience=FOR_EVER)
    assert machine.answered.wait(30)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(connections, "REFUSED_SECONDS", 0.2)


def after(seconds, work):
    threading.Timer(seconds, work).start()


def break_and_use(client, machine):
    machine.cut()
    with suppress(ConnectionLostError):
        client._channel.receive(30)
    client.watch()


def test_where_nothing_listens_the_lease_is_lost(client, machine):
    machine.kill()
    with pytest.raises(LeaseLostError, match=rf"mill/0 is lost: nothing listens at warpbus://127.0.0.1:{machine.port}"):
        break_and_use(client, machine)


def test_a_port_that_hangs_up_is_tried_again(client, machine):
    """As a port that is forwarded does while there is nothing behind it."""
    machine.answer = None
    after(1.0, lambda: setattr(machine, "answer", welcome))
    break_and_use(client, machine)
    assert machine.met > 3
    assert client.reconnections == 1


def test_a_suspended_lease_may_come_back_with_its_daemon(client, machine):
    machine.answer = refuse
    after(0.3, machine.kill)
    after(1.2, lambda: Machine(welcome, machine.port))
    break_and_use(client, machine)
    assert client.reconnections == 1


def test_the_destination_of_a_move_is_tried_while_its_source_refuses(client, machine):
    claims = []

    def claimed(channel, hello):
        claims.append(hello["claim"])
        (refuse if len(claims) < 6 else welcome)(channel, hello)

    destination = Machine(claimed)
    (channel,) = machine._channels
    channel.send(Kind.MOVED, 0, encode({"address": str(destination.address), "final": False}))
    channel.send(Kind.ACK, 0)
    while client._moving is None:
        client.watch()
    machine.kill()
    break_and_use(client, machine)
    assert claims == [True] * 6
    destination.kill()


def test_only_addresses_that_all_refuse_are_not_listening(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(NotListeningError):
        connect(address(f"warpbus://localhost:{port}"))
    with pytest.raises(NotListeningError):
        connect(address(f"warpbus+unix://{tmp_path / 'none'}"))
    with pytest.raises(ConnectionLostError) as caught:
        connect(address(f"warpbuss://nowhere.invalid:{port}"))
    assert not isinstance(caught.value, NotListeningError)
