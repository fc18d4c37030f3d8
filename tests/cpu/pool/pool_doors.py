"""The server's side of a connection's beginning, as the daemon does it, but for one socket that blocks."""

import secrets

from warpbus.errors import ConnectionLostError
from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.preamble import CONTROL, LEASE_BYTES, MAC_BYTES, MAGIC, NONCE_BYTES, Proof
from warpbus.pool.protocol.sockets import name_of, server_context


def exactly(sock, nbytes):
    found = b""
    while len(found) < nbytes:
        data = sock.recv(nbytes - len(found))
        assert data, "the client has hung up"
        found += data
    return found


def read_preamble(sock, key=b""):
    """The lease that a client with `key` asks for; None for the daemon. Raises ConnectionLostError without the key."""
    begun = exactly(sock, len(MAGIC) + LEASE_BYTES)
    assert begun.startswith(MAGIC)
    lease_id = begun[len(MAGIC) :]
    if lease_id == CONTROL:
        return None
    nonce = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(nonce)
    if not Proof(lease_id, nonce, exactly(sock, MAC_BYTES)).shows(key):
        raise ConnectionLostError("this is another key")
    return lease_id


def serve_tls(sock, certificate, key, timeout=10.0):
    """A channel with what the daemon speaks TLS with."""
    peer = name_of(sock)
    context = server_context(certificate, key)
    try:
        sock.settimeout(timeout)
        return Channel(context.wrap_socket(sock, server_side=True), peer)
    except OSError as error:
        sock.close()
        raise ConnectionLostError(f"{peer} did not finish a TLS handshake ({error})") from None
