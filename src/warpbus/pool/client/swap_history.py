"""The swaps of a lease as its client sees them: to host memory while others need the GPU, and back for its work."""

import logging
from typing import Any

from warpbus.cuda.memory_size import short_size
from warpbus.errors import FrameError, WarpbusError
from warpbus.pool.protocol.frames import Frame
from warpbus.pool.protocol.messages import Operation, checked, decode_dict

_log = logging.getLogger("warpbus.pool")

_FACTS = {
    "out": Operation({"state": str, "seconds": int | float, "bytes": int, "why": str}),
    "waits": Operation({"state": str, "why": str}),
    "in": Operation(
        {"state": str, "seconds": int | float, "bytes": int, "waited": int | float, "away": int | float},
    ),
}
# A new lease that had no room in the GPU's memory has nothing to copy.
_SECONDS_WORTH_TELLING = 0.1


class SwapHistory:
    """The swaps of a lease that this process has heard of, which is when it reads from the connection.

    Args:
        lease: its id, for the log.

    Attributes:
        out: times that the lease went to host memory.
        back: times that it came back.
        waited: seconds that work waited for its return, in all.
        last_wait: the last of them, or None.
        last_copy: of these, the seconds in which the lease was copied to the GPU.
        nbytes: copied, out and back.
        waits_for: the reason for which its return waits now, or "".
    """

    def __init__(self, lease: str) -> None:
        self.out = 0
        self.back = 0
        self.waited = 0.0
        self.last_wait: float | None = None
        self.last_copy: float | None = None
        self.nbytes = 0
        self.waits_for = ""
        self._lease = lease[:8]
        self._why = ""

    def heard(self, frame: Frame) -> None:
        """Take in a SWAP frame. Raises FrameError if it is malformed."""
        try:
            facts: dict[str, Any] = decode_dict(frame.payload)
            checked(facts.get("state"), facts, _FACTS)
        except WarpbusError as error:
            raise FrameError(f"the pool sent a malformed SWAP frame: {error}") from None
        if facts["state"] == "out":
            self.out += 1
            self.nbytes += facts["bytes"]
            self._why = facts["why"]
        elif facts["state"] == "waits":
            self.waits_for = facts["why"]
            _log.warning("lease %s is in host memory and waits for %s", self._lease, self.waits_for)
        else:
            self._came_back(facts["bytes"], facts["seconds"], facts["waited"], facts["away"])

    def _came_back(self, nbytes: int, seconds: float, waited: float, away: float) -> None:
        self.back += 1
        self.waited += waited
        self.last_wait, self.last_copy = waited, seconds
        self.nbytes += nbytes
        self.waits_for = ""
        if nbytes or waited > _SECONDS_WORTH_TELLING:
            _log.warning(
                "lease %s is in GPU memory again: it was in host memory for %.1f s%s; its work waited for %.2f s, of "
                "which %.2f s to copy %s",
                self._lease,
                away,
                f", because {self._why}" if self._why else "",
                waited,
                seconds,
                short_size(nbytes),
            )
        self._why = ""
