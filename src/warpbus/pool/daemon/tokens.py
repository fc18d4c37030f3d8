"""The tokens of a pool: a file with one line per token. They are compared in constant time and kept as digests."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, get_args

from warpbus.cuda.memory_size import parse_memory
from warpbus.errors import UsageError
from warpbus.pool.broker.leases import HIGHEST_PRIORITY, Limits

_LEAST_LENGTH = 16
_MOST_LINES = 10_000
_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
_FORM = "give: token tenant [admin|viewer] [memory=16GB] [share=0.5] [leases=4] [priority=0]"

Role = Literal["tenant", "admin", "viewer"]
"""The rights of a token: to use the tenant's own leases; everything, with every lease; or to see everything."""


@dataclass(frozen=True)
class Tenant:
    """Somebody whom the pool knows.

    Attributes:
        name: in the broker, the audit log and the status. Two tokens of one name are one tenant.
        role: an admin may do everything with every lease, drain hosts, and send leases here from another machine.
        limits: the most that all leases of this name may have.
    """

    name: str
    role: Role = "tenant"
    limits: Limits = field(default_factory=Limits)

    @property
    def admin(self) -> bool:
        """It has that role."""
        return self.role == "admin"


LOCAL = Tenant("local", "admin")
"""The user without a token of a pool that wants none, which only this machine reaches."""


class Tokens:
    """The tokens that a pool accepts.

    Args:
        tenants: by token; nothing at all lets everybody in as `LOCAL`.
    """

    def __init__(self, tenants: Iterable[tuple[str, Tenant]] = ()) -> None:
        self._known = [(_digest(token), tenant) for token, tenant in tenants]

    def __bool__(self) -> bool:
        return bool(self._known)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The tokens of a file; empty lines and those that begin with # say nothing.

        Raises:
            UsageError: no such file, one that others than its owner may read, or a line that is not understood, or
                contradicts another one. The message names the line and never shows a token.
        """
        try:
            mode = path.stat().st_mode
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--tokens {path}: cannot be read ({error}); {_FORM}, one per line") from None
        if mode & 0o077:
            raise UsageError(f"--tokens {path}: others may read it (mode {mode & 0o777:o}): chmod 600 {path}")
        if len(lines) > _MOST_LINES:
            raise UsageError(f"--tokens {path}: it has {len(lines)} lines: give at most {_MOST_LINES}")
        found: dict[str, Tenant] = {}
        tenants: dict[str, Tenant] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            where = f"--tokens {path}, line {number}"
            tenant = _tenant(words, where)
            if words[0] in found:
                raise UsageError(f"{where}: an earlier line has the same token: run warpbus pool token for a new one")
            if tenants.setdefault(tenant.name, tenant).limits != tenant.limits:
                raise UsageError(f"{where}: {tenant.name} has other limits in an earlier line: give one pair of both")
            found[words[0]] = tenant
        if not found:
            raise UsageError(f"--tokens {path}: it has no token; {_FORM}, one per line")
        return cls(found.items())

    def limits(self) -> dict[str, Limits]:
        """The limits of the tenants, by their names."""
        return {tenant.name: tenant.limits for _, tenant in self._known}

    def tenant(self, token: str | None) -> Tenant | None:
        """The tenant of a token; None if the token is unknown."""
        if not self._known:
            return LOCAL
        found = None
        given = _digest(token or "")
        for digest, tenant in self._known:  # all of them, so that the time taken says nothing
            if hmac.compare_digest(digest, given):
                found = tenant
        return found


def new_token() -> str:
    """A token that nobody has: 43 characters from 256 random bits."""
    return secrets.token_urlsafe(32)


def read_token(path: Path) -> str:
    """The token in a file of a client: its first word, so that a line of the pool's own file may be copied.

    Raises:
        UsageError: the file cannot be read or is empty.
    """
    try:
        words = path.read_text(encoding="utf-8").split(maxsplit=1)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file {path}: cannot be read ({error}); give a file with one token") from None
    if not words:
        raise UsageError(f"--token-file {path}: it is empty; give a file with one token")
    return words[0]


def checked_role(text: str) -> Role:
    """The role of that name. Raises UsageError if there is none."""
    for role in get_args(Role):
        if text == role:
            return role
    raise UsageError(f"role is {text!r:.100}: give one of {', '.join(get_args(Role))}")


def _tenant(words: list[str], where: str) -> Tenant:
    token, name, *options = [*words, *[""] * (2 - len(words))]
    if len(token) < _LEAST_LENGTH:
        raise UsageError(f"{where}: a token has {_LEAST_LENGTH} or more characters: run warpbus pool token for one")
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where}: the tenant is missing or not a name: {_FORM}")
    role: Role = "tenant"
    memory, share, leases, priority = None, None, None, None
    for option in options:
        key, equals, value = option.partition("=")
        try:
            if option in ("admin", "viewer") and role == "tenant":
                role = "admin" if option == "admin" else "viewer"
            elif key == "memory" and equals:
                memory = parse_memory(value)
            elif key == "share" and equals and 0 < float(value) < float("inf"):
                share = float(value)
            elif key == "leases" and equals and int(value) > 0:
                leases = int(value)
            elif key == "priority" and equals and abs(int(value)) <= HIGHEST_PRIORITY:
                priority = int(value)
            else:
                raise ValueError
        except ValueError:
            raise UsageError(f"{where}: {option!r} is not understood: {_FORM}") from None
    return Tenant(name, role, Limits(memory=memory, share=share, leases=leases, priority=priority))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
