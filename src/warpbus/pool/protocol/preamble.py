"""The first bytes of a connection, in plain text: the lease that the client wants, and a proof that it has the key.

    client: MAGIC, then 16 bytes: zeros for the daemon itself, a lease's id, its `link_id`, or its `arrival_id`
    server: 32 random bytes, the nonce                                    } only for a lease
    client: 32 bytes, HMAC-SHA256 of them with the lease's key (RFC 2104) }

The daemon checks the proof before it passes the socket to the lease's process, so a client without the key reaches
neither that process nor the limited number of its concurrent handshakes. All parts have a fixed size and nothing is
decoded. The key itself follows in the first frame, after TLS where there is TLS.
"""

import hashlib
import hmac
from dataclasses import dataclass

MAGIC = b"WARPBUS2"
LEASE_BYTES = 16
NONCE_BYTES = 32
MAC_BYTES = hashlib.sha256().digest_size
CONTROL = bytes(LEASE_BYTES)
"""Sent in place of a lease's id: the connection is for the daemon itself."""


@dataclass(frozen=True)
class Proof:
    """The answer of a client to a nonce.

    Attributes:
        lease_id: the 16 bytes that the client began with.
        nonce: the random bytes that the daemon sent.
        mac: the client's HMAC of the nonce.
    """

    lease_id: bytes
    nonce: bytes
    mac: bytes

    def is_for_link(self, lease: str) -> bool:
        """Whether it begins with the `link_id` of a lease, whose id is given in hexadecimal digits."""
        return hmac.compare_digest(self.lease_id, link_id(bytes.fromhex(lease)))

    def shows(self, key: bytes) -> bool:
        """Whether the client has this key. Takes the same time for every wrong answer."""
        return hmac.compare_digest(self.mac, mac_of(key, self.lease_id, self.nonce))


def link_id(lease: bytes) -> bytes:
    """The first bytes of a connection from another lease's process, in place of the 16 bytes of the lease's id."""
    return hashlib.sha256(b"warpbus link" + lease).digest()[:LEASE_BYTES]


def link_key(key: bytes) -> bytes:
    """The secret with which another lease's client connects its lease to this one: 32 bytes that are made of the
    lease's key, and of which the key cannot be made."""
    return hmac.new(key, b"warpbus link key", hashlib.sha256).digest()


def mac_of(key: bytes, lease_id: bytes, nonce: bytes) -> bytes:
    """The answer of a client that has `key` to `nonce`."""
    return hmac.new(key, b"warpbus lease" + lease_id + nonce, hashlib.sha256).digest()
