"""A failure on the pool's side as the client gets it: the name of an exception, its message, and its operator."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from warpbus import errors
from warpbus.errors import ConnectionLostError, DeviceError, PoolError, ProtocolError, WarpbusError
from warpbus.pool.protocol.wire import Value

# Those of Python and torch that callers tell apart; each stands before what it is derived from.
_PLAIN: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(torch.OutOfMemoryError, torch.linalg.LinAlgError),  # type: ignore[attr-defined]
        *(NotImplementedError, IndexError, ValueError, TypeError, RuntimeError),
    )
}
# The errors that are raised again as the same class: these are made from a message alone.
_OWN: dict[str, type[WarpbusError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, WarpbusError)
}
_MAX_MESSAGE = 16_384


@dataclass(frozen=True, slots=True)
class CallFailure:
    """An error of a call.

    Attributes:
        type: the name of an exception, of Python's, torch's or Warpbus's; "RuntimeError" for any other.
        message: its text.
        operator: the called operator, or the instruction.
        batch: the number of the batch that it was in; 0 where it was in none.
    """

    type: str
    message: str
    operator: str
    batch: int

    @staticmethod
    def of(error: Exception, operator: str, batch: int) -> "CallFailure":
        """The failure that an exception is."""
        message = str(error)[:_MAX_MESSAGE]
        name = type(error).__name__
        if name in _OWN:
            return CallFailure(name, message, operator, batch)
        if "can't allocate memory" in message:  # how PyTorch words it on a CPU
            return CallFailure("OutOfMemoryError", message, operator, batch)
        plain = next((name for name, kind in _PLAIN.items() if isinstance(error, kind)), "RuntimeError")
        return CallFailure(plain, message, operator, batch)

    def exception(self) -> Exception:
        """The exception that it is on the client's side: of the same name, or a RuntimeError.

        A connection that the pool has lost is a PoolError: a ConnectionLostError would mean the client's own, and the
        client would connect again and ask again, without end.
        """
        kind: type[Exception] = _OWN.get(self.type) or _PLAIN.get(self.type, RuntimeError)
        return (PoolError if issubclass(kind, ConnectionLostError) else kind)(self.message)

    def plain(self) -> dict[str, Value]:
        """As a value of `warpbus.pool.protocol.wire`, the payload of an ERROR frame."""
        return {"type": self.type, "message": self.message, "operator": self.operator, "batch": self.batch}

    @staticmethod
    def read(value: Any) -> "CallFailure":
        """From what `plain` gave. Raises ProtocolError for anything else."""
        kinds = {"type": str, "message": str, "operator": str, "batch": int}
        if not isinstance(value, dict) or {key: type(item) for key, item in value.items()} != kinds:
            raise ProtocolError("what is said to be a failure is none")
        return CallFailure(**value)


def error_value(error: BaseException) -> dict[str, Value]:
    """An error as `sent_error` reads it."""
    return {"type": type(error).__name__, "message": str(error)}


def sent_error(said: Mapping[str, Any]) -> WarpbusError:
    """The error of an `error_value`; one of an unknown kind becomes a `PoolError`."""
    return _OWN.get(str(said.get("type")), PoolError)(str(said.get("message")))


class PoisonedError(DeviceError):
    """The requested value was never computed.

    Attributes:
        failure: of the call that should have.
    """

    def __init__(self, failure: CallFailure) -> None:
        super().__init__(f"{failure.operator}: {failure.message}")
        self.failure = failure
