"""The state of a service."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ready", "unresponsive", "asleep", "restarting", "failed", "closing", "closed"]


@dataclass(frozen=True)
class Health:
    """The state of a service.

    Attributes:
        state: "ready", "unresponsive" (the engine lives but makes no progress; requests are accepted and wait),
            "asleep" (see `Service.sleep`), "restarting" (the engine died), "failed" (it died too often and is not
            restarted any more), "closing" (no new requests are accepted) or "closed".
        reason: why it is not ready; empty if it is.
        restarts: how often the engine has been restarted.
    """

    state: State
    reason: str
    restarts: int
