"""The relay that does TLS for leases: all bytes come over, both ways at once, and either end ends the other."""

import os
import socket
import threading

import pytest
import trustme

from warpbus.errors import ConnectionLostError, UsageError
from warpbus.pool.daemon.tls_relay import relay
from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.frames import Kind
from warpbus.pool.protocol.sockets import Tls, client_context


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("relay")
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(directory / "ca.pem")
    issued.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    issued.private_key_pem.write_to_path(directory / "key.pem")
    return directory


def relayed(files, seconds=60.0):
    """A client's socket before TLS, and the socket of a lease's process."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
    inner, process = socket.socketpair()
    relay(accepted, inner, files / "cert.pem", files / "key.pem", seconds)
    return client, process


@pytest.fixture
def ends(files):
    client, process = relayed(files)
    client.settimeout(60)
    wrapped = client_context(Tls(files / "ca.pem")).wrap_socket(client, server_hostname="localhost")
    found = Channel(wrapped, "the relay"), Channel(process, "the relay")
    yield found
    for each in found:
        each.close()


def test_bytes_come_over_both_ways_at_once(ends):
    data = [os.urandom(4 << 20) for _ in range(2)]

    def send(channel, own):
        for number in range(4):
            channel.send(Kind.DATA, number, own)

    threads = [threading.Thread(target=send, args=each) for each in zip(ends, data, strict=True)]
    for thread in threads:
        thread.start()
    received = [[], []]

    def receive(at):
        for _ in range(4):
            received[at].append(bytes(ends[at].receive(60).payload))

    threads += [threading.Thread(target=receive, args=(at,)) for at in range(2)]
    for thread in threads[2:]:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert received[0] == [data[1]] * 4
    assert received[1] == [data[0]] * 4


@pytest.mark.parametrize("first", [0, 1])
def test_what_was_sent_last_arrives_and_then_the_end(ends, first):
    ends[first].send(Kind.DATA, 7, bytes(1 << 20))
    ends[first].send(Kind.BYE)
    ends[first].close()
    other = ends[1 - first]
    assert len(other.receive(60).payload) == 1 << 20
    assert other.receive(60).kind is Kind.BYE
    with pytest.raises(ConnectionLostError):
        other.receive(60)


@pytest.mark.parametrize("sent", [b"", b"this is no TLS" * 100])
def test_a_client_without_tls_ends(files, sent):
    client, process = relayed(files, seconds=0.2)
    client.sendall(sent)
    process.settimeout(60)
    assert process.recv(10) == b""
    client.close()
    process.close()


def test_files_that_are_no_certificate(files, tmp_path):
    (tmp_path / "text.pem").write_text("none")
    left, right = socket.socketpair()
    with pytest.raises(UsageError, match="cannot be used as certificate and key"):
        relay(left, right, tmp_path / "text.pem", files / "key.pem")
    assert left.fileno() == right.fileno() == -1
