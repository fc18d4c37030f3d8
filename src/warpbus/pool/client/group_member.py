"""A lease as a member of groups: how its process gets connections to those of other leases."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from warpbus.errors import StateError, UsageError


@dataclass(frozen=True)
class GroupMember:
    """One lease of this process.

    Attributes:
        ask: asks the pool, over the control connection.
        lease: the id of the lease.
        link_key: with it others may connect their leases to this one. It gives no other access.
    """

    ask: Callable[[str, dict[str, Any]], Any]
    lease: str
    link_key: bytes

    def connect(self, other: str, link_key: bytes, group: bytes, rank: int) -> None:
        """Connect this lease's process to that of another lease, which has this rank in a group that both have joined.

        Raises:
            StateError: the other lease is not in this pool.
            WarpbusError: it did not come about.
        """
        arguments = {"lease": self.lease, "to": other, "link_key": link_key, "group": group, "rank": rank}
        try:
            self.ask("link", arguments)
        except UsageError as error:
            raise StateError(
                f"two leases cannot be connected ({error}); they have to be of one pool: else copy by .cpu()"
            ) from None
