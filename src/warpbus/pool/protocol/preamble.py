"""The first bytes of a connection, in plain text: what the client wants, and the proof that it may have it.

    client: MAGIC, then 16 bytes: zeros for the daemon itself, else the id of a lease, or a `door` (see `Host`)
    server: 32 random bytes, the nonce                                    } only for a lease
    client: 32 bytes, HMAC-SHA256 of them with the lease's key (RFC 2104) }

The daemon checks the proof before it hands the socket to the lease's process, so whoever lacks the key reaches neither
that process nor the limited number of handshakes that it makes at a time. All parts have a fixed size and nothing is
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
"""In place of a lease's id: the daemon itself is wanted."""


@dataclass(frozen=True)
class Proof:
    """What a client has answered to a nonce.

    Attributes:
        door: the 16 bytes that it began with.
        nonce: what it was sent.
        mac: its answer.
    """

    door: bytes
    nonce: bytes
    mac: bytes

    def shows(self, key: bytes) -> bool:
        """Whether the client has this key. Takes the same time for every wrong answer."""
        return hmac.compare_digest(self.mac, mac_of(key, self.door, self.nonce))


def mac_of(key: bytes, door: bytes, nonce: bytes) -> bytes:
    """The answer of a client that has `key` to `nonce`."""
    return hmac.new(key, b"warpbus lease" + door + nonce, hashlib.sha256).digest()
