"""Channels: frames come as they were sent, over all transports, and every way to lose the other side has its line."""

import contextlib
import datetime
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_doors import read_preamble, serve_tls

from warpbus.errors import AuthorizationError, ConnectionLostError, ProtocolError, UsageError
from warpbus.pool.protocol import channel as channel_module
from warpbus.pool.protocol.address import Address
from warpbus.pool.protocol.channel import Channel, connect
from warpbus.pool.protocol.frames import HEADER, MAX_FRAME, MAX_HELLO, Kind
from warpbus.pool.protocol.preamble import MAGIC, Proof
from warpbus.pool.protocol.sockets import Tls

LEASE, KEY = bytes(range(1, 17)), bytes(range(100, 132))


@contextlib.contextmanager
def listening(family=socket.AF_INET, where=("127.0.0.1", 0)):
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.bind(where)
        sock.listen()
        sock.settimeout(90)
        yield sock


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Files of an authority, of another one, and of a server's certificates: good, too old, another host's."""
    directory = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")
    trustme.CA().cert_pem.write_to_path(directory / "other.pem")
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    issued = {
        "good": authority.issue_cert("localhost", "127.0.0.1"),
        "expired": authority.issue_cert(
            "localhost", "127.0.0.1", not_before=yesterday - datetime.timedelta(days=1), not_after=yesterday
        ),
        "elsewhere": authority.issue_cert("gpu-host.example", "10.1.2.3"),
    }
    for name, certificate in issued.items():
        certificate.cert_chain_pems[0].write_to_path(directory / f"{name}.pem")
        certificate.private_key_pem.write_to_path(directory / f"{name}.key")
    return directory


class Peer(threading.Thread):
    """Runs a function on what a listening socket accepts; `result` has what it returned or raised."""

    def __init__(self, listener, function):
        super().__init__(daemon=True)
        self.listener, self.function, self.result = listener, function, None
        self.start()

    def run(self):
        try:
            sock, _ = self.listener.accept()
            self.result = self.function(sock)
        except Exception as error:
            self.result = error

    def join(self):
        super().join(90)
        assert not self.is_alive()
        return self.result


@contextlib.contextmanager
def connected(transport, certificates=None, tmp_path=None):
    """Both ends of a connection, made as client and server make it: the client's, the server's."""
    with listening(socket.AF_UNIX, str(tmp_path / "pool")) if transport == "unix" else listening() as listener:

        def serve(sock):
            assert read_preamble(sock, KEY) == LEASE
            if transport == "tls":
                return serve_tls(sock, certificates / "good.pem", certificates / "good.key")
            return Channel(sock)

        peer = Peer(listener, serve)
        name = listener.getsockname()
        address = Address("unix", path=name) if transport == "unix" else Address(transport, "127.0.0.1", name[1])
        client = connect(address, LEASE, KEY, Tls(certificates / "ca.pem") if certificates else None)
        server = peer.join()
        assert isinstance(server, Channel), server
        try:
            yield client, server
        finally:
            client.close()
            server.close()


@pytest.fixture(params=["plain", "tls", "unix"])
def ends(request, certificates, tmp_path):
    with connected(request.param, certificates, tmp_path) as found:
        yield SimpleNamespace(client=found[0], server=found[1])


def pair():
    left, right = socket.socketpair()
    return Channel(left, "left"), Channel(right, "right")


def raw():
    """A channel, and the socket of a peer that sends what it likes."""
    left, right = socket.socketpair()
    return Channel(left, "the peer"), right


def send_without_end(channel):
    while True:
        channel.send(Kind.DATA, 0, bytes(2**20))


def background(function, *arguments):
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def test_frames_come_as_they_were_sent(ends):
    sizes = [0, 1, 100, 2048, 2**14, 2**16 - 17, 2**16 - 16, 2**16 - 15, 2**16, 300_000, 2**22, MAX_FRAME, 3]
    sent = [os.urandom(size) for size in sizes]

    def send(channel):
        for number, data in enumerate(sent):
            middle = len(data) // 2
            channel.send(Kind.DATA, 2**64 - 1 - number, data[:middle], bytearray(data[middle:]), memoryview(b""))

    threads = [background(send, ends.client), background(send, ends.server)]
    got = {ends.client: [], ends.server: []}

    def receive(channel):
        for _ in sizes:
            got[channel].append(channel.receive(90))

    threads += [background(receive, channel) for channel in got]
    for thread in threads:
        thread.join(90)
    for frames in got.values():
        assert [frame.kind for frame in frames] == [Kind.DATA] * len(sizes)
        assert [frame.number for frame in frames] == [2**64 - 1 - number for number in range(len(sizes))]
        assert [bytes(frame.payload) for frame in frames] == sent
    assert ends.client.receive(0) is None


def test_frames_are_sent_with_the_one_that_follows():
    left, right = pair()
    large = os.urandom(100_000)
    left.send(Kind.BATCH, 1, b"one", more=True)
    left.send(Kind.BATCH, 2, large, b"", more=True)
    assert right.receive(0.02) is None
    assert not right.pending()
    left.send(Kind.READ, 3, b"three")
    found = [right.receive(90) for _ in range(3)]
    expected = [(Kind.BATCH, 1, b"one"), (Kind.BATCH, 2, large), (Kind.READ, 3, b"three")]
    assert [(frame.kind, frame.number, bytes(frame.payload)) for frame in found] == expected


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(Kind), st.integers(0, 2**64 - 1), st.lists(st.binary(max_size=200)))),
    st.booleans(),
)
def test_any_frames(frames, together):
    left, right = pair()
    for index, (kind, number, parts) in enumerate(frames, 1):
        left.send(kind, number, *parts, more=together and index < len(frames))
    for kind, number, parts in frames:
        frame = right.receive(90)
        assert (frame.kind, frame.number, bytes(frame.payload)) == (kind, number, b"".join(parts))
    assert not right.pending()
    left.close()
    right.close()


def test_what_came_stays_as_it_is(ends):
    """A small payload does not change when the next comes to the place where it was read."""
    for number in range(3):
        ends.client.send(Kind.BATCH, number, bytes([number]) * 5000)
    frames = [ends.server.receive(90) for _ in range(3)]
    ends.client.send(Kind.BATCH, 3, b"x" * 60_000)
    ends.server.receive(90)
    assert [bytes(frame.payload) for frame in frames] == [bytes([number]) * 5000 for number in range(3)]


def test_buffers_of_many_kinds_and_numbers():
    left, right = pair()
    parts = [bytes([index % 256]) * (20_000 if index % 7 == 0 else index % 50) for index in range(1500)]
    thread = background(left.send, Kind.DATA, 1, *parts)
    assert bytes(right.receive(90).payload) == b"".join(parts)
    thread.join(60)
    numbers = memoryview(b"\x01\x00\x02\x00" * 4).cast("h", (2, 4))
    left.send(Kind.DATA, 2, numbers)
    assert bytes(right.receive(90).payload) == numbers.tobytes()


def test_pending_knows_what_was_read_already(ends):
    assert not ends.server.pending()
    for number in range(5):
        ends.client.send(Kind.ASK, number, b"?" * 1000)
    assert select.select([ends.server], [], [], 5)[0]
    for number in range(5):
        # What the first reading brought does not show at the socket any more.
        deadline = time.monotonic() + 60
        while not ends.server.pending():
            assert time.monotonic() < deadline
        assert ends.server.receive(90).number == number
    assert not ends.server.pending()
    assert ends.server.receive(0.01) is None


def test_pending_knows_what_tls_holds(certificates):
    with connected("tls", certificates) as (client, server):
        # Larger than the channel reads of a record at once, were its buffer nearly full.
        client.send(Kind.DATA, 1, bytes(60_000))
        client.send(Kind.DATA, 2, bytes(14_000))
        assert server.receive(90).number == 1
        deadline = time.monotonic() + 60
        while not server.pending():
            assert time.monotonic() < deadline
        assert server.receive(90).number == 2
        assert not server.pending()


def test_time_is_kept():
    left, right = pair()
    began = time.monotonic()
    assert right.receive(0.1) is None
    assert right.receive(0) is None
    assert 0.05 < time.monotonic() - began < 5
    left.send(Kind.BYE)
    assert right.receive(0).kind is Kind.BYE


@pytest.mark.parametrize("size", [1000, 100_000])
def test_half_a_frame_is_kept_until_the_rest_comes(size):
    channel, peer = raw()
    data = HEADER.pack(size, Kind.DATA, 7) + bytes(range(250)) * (size // 250)
    for cut in (5, 16, 500, len(data)):
        peer.sendall(data[:cut])
        data = data[cut:]
        if data:
            assert channel.receive(0.02) is None
    assert channel.receive(90).number == 7


def test_a_peer_that_stops_in_the_middle_of_a_frame_is_lost(monkeypatch):
    monkeypatch.setattr(channel_module, "STALL_SECONDS", 0.1)
    channel, peer = raw()
    assert channel.receive(0.3) is None  # silence between frames is no harm
    peer.sendall(HEADER.pack(100, Kind.DATA, 7))
    with pytest.raises(ConnectionLostError, match="the peer sent nothing for 0 s in the middle of a frame"):
        channel.receive()
    assert peer.recv(1) == b""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the peer closed the connection$"),
        (b"\x00", "closed the connection in the middle of a frame"),
        (HEADER.pack(1, Kind.ASK, 0), "in the middle of a frame"),
        (HEADER.pack(10**6, Kind.ASK, 0) + bytes(70_000), "in the middle of a frame"),
        (HEADER.pack(MAX_FRAME + 1, Kind.ASK, 0), f"announced a frame of {MAX_FRAME + 1} bytes: at most {MAX_FRAME}"),
        (HEADER.pack(2**32 - 1, Kind.DATA, 0), "announced a frame of 4294967295 bytes"),
        (HEADER.pack(0, 0, 0), "unknown kind 0"),
        (HEADER.pack(0, 15, 0), "unknown kind 15"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "unknown kind 47"),
    ],
)
def test_nonsense_is_reported(data, message):
    channel, peer = raw()
    peer.sendall(data)
    peer.shutdown(socket.SHUT_WR)
    for _ in range(2):  # and reported again
        with pytest.raises(ConnectionLostError, match=message) as caught:
            channel.receive(90)
        assert "\n" not in str(caught.value)
    assert peer.recv(1) == b""
    assert channel.pending()
    with pytest.raises(ConnectionLostError, match=message):
        channel.send(Kind.BYE)


def test_frames_before_nonsense_still_come():
    channel, peer = raw()
    peer.sendall(HEADER.pack(2, Kind.ASK, 1) + b"ok" + HEADER.pack(0, 99, 0))
    assert bytes(channel.receive(90).payload) == b"ok"
    assert channel.pending()
    with pytest.raises(ConnectionLostError, match="unknown kind 99"):
        channel.receive(90)


def test_too_much_is_not_sent():
    left, right = pair()
    with pytest.raises(ProtocolError, match=f"at most {MAX_FRAME}") as caught:
        left.send(Kind.DATA, 1, bytes(MAX_FRAME), b"x")
    assert not isinstance(caught.value, ConnectionLostError)
    left.send(Kind.BYE, 2)
    assert right.receive(90).number == 2


def test_what_was_sent_before_the_end_is_received(ends):
    ends.server.send(Kind.MOVED, 0, b"there")
    ends.server.close()
    with pytest.raises(ConnectionLostError, match=r"broke|closed"):
        send_without_end(ends.client)
    with pytest.raises(ConnectionLostError, match=r"broke|closed"):
        ends.client.send(Kind.BATCH)
    assert bytes(ends.client.receive(90).payload) == b"there"
    with pytest.raises(ConnectionLostError):
        ends.client.receive(90)


def test_closing_wakes_who_waits(ends):
    found = []

    def wait():
        with pytest.raises(ConnectionLostError) as caught:
            ends.client.receive()
        found.append(str(caught.value))

    def fill():
        with pytest.raises(ConnectionLostError) as caught:
            send_without_end(ends.client)
        found.append(str(caught.value))

    threads = [background(wait), background(fill)]
    time.sleep(0.1)
    ends.client.close()
    for thread in threads:
        thread.join(60)
    assert [text.endswith("is closed") for text in found] == [True, True]
    ends.client.close()


PROGRAM = """
import socket, sys
from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.frames import Kind, HEADER
sock = socket.socket(fileno=int(sys.argv[1]))
Channel(sock).send(Kind.ANSWER, 1, b"alive")
sock.setblocking(True)
sock.sendall(HEADER.pack(1000000, Kind.DATA, 2) + bytes(300000))
print("half", flush=True)
sys.stdin.read()
"""


def test_a_peer_killed_in_a_frame():
    left, right = socket.socketpair()
    channel = Channel(left, "the tenant")
    command = [sys.executable, "-c", PROGRAM, str(right.fileno())]
    with subprocess.Popen(
        command, pass_fds=[right.fileno()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        right.close()
        assert bytes(channel.receive(60).payload) == b"alive"
        assert process.stdout.readline() == "half\n"
        assert channel.receive(0.05) is None
        process.send_signal(signal.SIGKILL)
        with pytest.raises(ConnectionLostError, match="the tenant closed the connection in the middle of a frame"):
            channel.receive(90)


class Interruption(BaseException):
    """As KeyboardInterrupt."""


@contextlib.contextmanager
def interrupting(seconds):
    def interrupt(*_):
        raise Interruption

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(Interruption):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_wait_loses_nothing():
    channel, peer = raw()
    peer.sendall(HEADER.pack(4, Kind.ANSWER, 7) + b"ab")
    with interrupting(0.05):
        channel.receive()
    peer.sendall(b"cd")
    assert bytes(channel.receive(90).payload) == b"abcd"


def test_half_a_frame_sent_is_the_end():
    channel, peer = raw()
    with interrupting(0.05):
        channel.send(Kind.DATA, 1, bytes(MAX_FRAME))
    with pytest.raises(ConnectionLostError, match="given up halfway"):
        channel.send(Kind.BYE)
    with pytest.raises(ConnectionLostError, match="given up halfway"):
        channel.receive()
    peer.settimeout(90)
    while peer.recv(2**20):
        pass


def test_a_lost_part_of_a_frame_is_the_end():
    channel, peer = raw()
    peer.sendall(HEADER.pack(4, Kind.ANSWER, 7) + b"abcd")

    class Broken:
        def recv_into(self, target):
            raise Interruption

        def __getattr__(self, name):
            return getattr(sock, name)

    sock, channel._sock = channel._sock, Broken()
    with pytest.raises(Interruption):
        channel.receive(1)
    channel._sock = sock
    with pytest.raises(ConnectionLostError, match="given up halfway"):
        channel.receive(1)


@pytest.mark.parametrize(
    ("certificate", "ca", "host", "message"),
    [
        ("good", "other", "127.0.0.1", "unable to get local issuer certificate"),
        ("good", None, "127.0.0.1", "unable to get local issuer certificate"),
        ("expired", "ca", "127.0.0.1", "certificate has expired"),
        ("elsewhere", "ca", "127.0.0.1", "another name .IP address mismatch"),
        ("elsewhere", "ca", "localhost", "another name .Hostname mismatch"),
    ],
)
def test_certificates_that_are_not_trusted(certificates, certificate, ca, host, message):
    with listening() as listener:

        def serve(sock):
            read_preamble(sock)
            return serve_tls(sock, certificates / f"{certificate}.pem", certificates / f"{certificate}.key").receive(90)

        peer = Peer(listener, serve)
        address = Address("tls", host, listener.getsockname()[1])
        with pytest.raises(AuthorizationError, match=message) as caught:
            connect(address, LEASE, tls=Tls(certificates / f"{ca}.pem") if ca else None)
        assert not isinstance(caught.value, ConnectionLostError)  # another try would not help
        assert str(address) in str(caught.value)
        assert isinstance(peer.join(), ConnectionLostError)


@pytest.mark.parametrize("named_by", ["tls", "address"])
def test_tls_is_new_enough(certificates, named_by):
    with listening() as listener:

        def serve(sock):
            read_preamble(sock)
            return serve_tls(sock, certificates / "good.pem", certificates / "good.key")

        peer = Peer(listener, serve)
        ca = certificates / "ca.pem"
        address = Address("tls", "localhost", listener.getsockname()[1], ca=ca if named_by == "address" else None)
        channel = connect(address, tls=Tls(ca) if named_by == "tls" else None)
        assert channel._sock.version() in ("TLSv1.2", "TLSv1.3")
        assert peer.join().peer.startswith("127.0.0.1 port ")


def test_tls_that_is_too_old_is_refused(certificates):
    with listening() as listener:
        peer = Peer(listener, lambda sock: serve_tls(sock, certificates / "good.pem", certificates / "good.key"))
        context = ssl.create_default_context(cafile=certificates / "ca.pem")
        context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        with socket.create_connection(listener.getsockname()) as sock, pytest.raises(ssl.SSLError):
            context.wrap_socket(sock, server_hostname="localhost")
        assert isinstance(peer.join(), ConnectionLostError)


def test_tls_that_breaks(certificates):
    with connected("tls", certificates) as (client, server):
        socket.socket.send(client._sock, b"\x17\x03\x03\x00\x20" + bytes(32))  # a record that nobody encrypted
        with pytest.raises(ConnectionLostError, match=r"TLS with .* broke"):
            server.receive(90)


def test_plain_meets_tls(certificates):
    with listening() as listener:
        peer = Peer(listener, lambda sock: serve_tls(sock, certificates / "good.pem", certificates / "good.key"))
        with contextlib.closing(Channel(socket.create_connection(listener.getsockname()))) as channel:
            channel.send(Kind.HELLO, 0, b"who is there?")
            with pytest.raises(ConnectionLostError):
                channel.receive(90)
        assert isinstance(peer.join(), ConnectionLostError)
        peer = Peer(listener, lambda sock: (read_preamble(sock), Channel(sock).receive(90)))
        with pytest.raises(ConnectionLostError, match="did not finish a TLS handshake"):
            connect(Address("tls", "127.0.0.1", listener.getsockname()[1]), LEASE)
        assert "unknown kind" in str(peer.join())


def test_silence_at_the_beginning_holds_nothing(certificates):
    with listening() as listener, socket.create_connection(listener.getsockname()):
        silent, _ = listener.accept()
        with pytest.raises(ConnectionLostError, match="TLS handshake"):
            serve_tls(silent, certificates / "good.pem", certificates / "good.key", 0.05)
        address = Address("tls", "127.0.0.1", listener.getsockname()[1])
        with pytest.raises(ConnectionLostError, match=r"does not take the connection \(.*timed out"):
            connect(address, LEASE, timeout=0.2)
        with pytest.raises(ConnectionLostError, match=r"did not finish a TLS handshake \(.*timed out"):
            connect(address, timeout=0.2)


def test_a_client_proves_its_key_without_showing_it():
    with listening() as listener:
        peer = Peer(listener, lambda sock: (sock.recv(100), sock.sendall(bytes(32)), sock.recv(100)))
        channel = connect(Address("plain", "127.0.0.1", listener.getsockname()[1]), LEASE, KEY)
        begun, _, mac = peer.join()
        channel.close()
    assert begun == MAGIC + LEASE
    assert KEY not in mac
    assert Proof(LEASE, bytes(32), mac).shows(KEY)
    assert not Proof(LEASE, bytes(32), mac).shows(KEY[::-1])  # another key
    assert not Proof(LEASE, bytes(31) + b"1", mac).shows(KEY)  # said again to another nonce
    assert not Proof(LEASE[::-1], bytes(32), mac).shows(KEY)  # for another lease


def test_a_frame_is_no_larger_than_is_asked_for():
    left, right = socket.socketpair()
    sender, channel = Channel(left, "them"), Channel(right, "them")
    sender.send(Kind.HELLO, 0, bytes(MAX_HELLO))
    assert len(channel.receive(90, most=MAX_HELLO).payload) == MAX_HELLO
    sender.send(Kind.HELLO, 0, bytes(MAX_HELLO + 1))
    with pytest.raises(ConnectionLostError, match=f"announced a frame of {MAX_HELLO + 1} bytes: at most {MAX_HELLO}"):
        channel.receive(90, most=MAX_HELLO)
    sender.close()


def test_nobody_there(tmp_path):
    with listening() as listener:
        port = listener.getsockname()[1]
    for address in (
        Address("plain", "127.0.0.1", port),
        Address("tls", "127.0.0.1", port),
        Address("unix", path=str(tmp_path / "none")),
        Address("tls", "no-such-host.invalid", 7700),
        Address("tls", "a..b", 7700),
        Address("plain", "10.0.0.1", 7700),  # `address` does not make it; it is not tried either
    ):
        with pytest.raises(ConnectionLostError, match="cannot be reached") as caught:
            connect(address, timeout=2)
        assert str(address) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_wrong_arguments(tmp_path, certificates):
    with pytest.raises(UsageError, match="16 bytes, not 3"):
        connect(Address("plain", "127.0.0.1", 1), b"abc")
    (tmp_path / "text.pem").write_text("no certificate")
    for ca in ("text.pem", "none.pem"):
        with pytest.raises(UsageError, match="holds no authorities"):
            connect(Address("tls", "127.0.0.1", 1, ca=tmp_path / ca))
    _, sock = socket.socketpair()
    for files in (("text.pem", "text.pem"), ("none.pem", "none.pem")):
        with pytest.raises(UsageError, match="cannot be used as certificate and key"):
            serve_tls(sock, *(tmp_path / name for name in files))
    with pytest.raises(UsageError, match="cannot be used as certificate and key"):
        serve_tls(sock, certificates / "good.pem", certificates / "expired.key")


def test_vanished_peers_are_noticed():
    with listening() as listener:
        channel = Channel(socket.create_connection(listener.getsockname()))
    wanted = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3, socket.TCP_NODELAY: 1}
    assert {option: channel._sock.getsockopt(socket.IPPROTO_TCP, option) for option in wanted} == wanted
    assert channel._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    channel.close()
