"""Every error that Warpbus raises on purpose.

    WarpbusError                      the root: one line that says what, where and what to do
    ├── UsageError                    a flag or an argument is wrong
    │   ├── ConflictError             not possible in the present state of a model
    │   └── SchemeError               a quantization scheme that does not exist or does not fit a matrix
    ├── CheckpointError               a model directory or one of its files is missing, damaged or not understood
    │   ├── TensorError               a tensor is missing, or has the wrong shape or type
    │   ├── DownloadError             a model that is not on the disk, and that its hub does not give
    │   └── UnknownArchitectureError  a model_type that no family declares
    ├── DataError                     a text, calibration or evaluation file is empty or malformed
    ├── ContextLengthError            a prompt does not fit the model's context
    ├── NumericError                  an algorithm met NaN, or a matrix it cannot factor
    ├── QualityError                  a model that got worse than was allowed
    ├── DeviceError                   a device that is not there or cannot do what was asked
    │   └── LeaseLostError            a lease of the GPU pool, and everything that it held, is gone
    ├── PoolError                     the GPU pool cannot do what it was asked, and no GPU is to blame
    │   ├── ProtocolError             a value or message that does not fit the pool's protocol
    │   ├── ConnectionLostError       a connection is closed, refused or silent; a new one may work
    │   │   ├── FrameError            closed because the peer broke the protocol (also a ProtocolError)
    │   │   └── NotListeningError     refused, because nothing listens at the address
    │   ├── PeerTimeoutError          a process or machine of the pool did not do its part in time
    │   ├── AuthorizationError        a key, certificate or user id does not give access
    │   │   └── TokenError            a token is not accepted (also a UsageError)
    │   └── StateError                not possible in the present state of a connection, lease, move or process
    ├── UploadError                   a hub that does not take a model, or cannot be reached
    ├── StorageError                  a disk that is full or cannot be written
    └── UnavailableError              the service cannot take or finish a request now, which may be sent again
        ├── QueueFullError            too many requests wait already
        └── EngineDiedError           the processes that compute have died

Messages follow one form: what is wrong with which file, tensor or flag; what was expected; what to do.
The command line prints the message alone and exits with `exit_code`. The HTTP server adds
`warpbus.server.request_error.RequestError`.
"""


class WarpbusError(Exception):
    """The root of the tree. `exit_code` is what the command line returns to the shell."""

    exit_code = 1


class UsageError(WarpbusError, ValueError):
    """A flag or an argument is wrong."""

    exit_code = 2


class ConflictError(UsageError):
    """The operation is not possible in the present state of a model: requests run, it sleeps, or it moves."""


class SchemeError(UsageError):
    """A quantization scheme that does not exist, or whose group size does not divide a matrix."""


class CheckpointError(WarpbusError):
    """A model directory, or a file in it, is missing, damaged or not understood."""


class TensorError(CheckpointError):
    """A tensor is missing, or has the wrong shape or type."""


class DownloadError(CheckpointError):
    """A model that is not on the disk, and that its hub does not give: no network, no such name, no access."""


class UnknownArchitectureError(CheckpointError):
    """The checkpoint's `model_type` is one that no family in `warpbus.models` declares."""


class UploadError(WarpbusError):
    """A hub that does not take a model: no network, no access, or an error of its own."""


class DataError(WarpbusError):
    """A text, calibration or evaluation file is empty or malformed."""


class ContextLengthError(WarpbusError, ValueError):
    """A prompt, or a prompt and what is to be generated, does not fit the model's context."""


class NumericError(WarpbusError, ArithmeticError):
    """An algorithm met NaN or infinity, or a matrix that it cannot factor."""


class QualityError(WarpbusError):
    """A quantized model that is worse than was allowed."""


class DeviceError(WarpbusError, RuntimeError):
    """A device that is not there, or that cannot do what was asked."""


class LeaseLostError(DeviceError):
    """A lease of the GPU pool, and everything that it held, is gone: it was ended, or the process behind it died."""


class PoolError(WarpbusError, RuntimeError):
    """The pool cannot do what it was asked, and no GPU is to blame: the parent of the errors of its other causes.

    A daemon also answers with it where it met an unexpected exception; its log has the traceback.
    """


class ProtocolError(PoolError):
    """A value or message does not fit the pool's protocol.

    It is malformed, over a limit, out of order, contradicts itself, or is of a type that cannot be encoded.
    """


class ConnectionLostError(PoolError):
    """A connection of the pool is closed, refused or silent; a new one may work."""


class FrameError(ConnectionLostError, ProtocolError):
    """The peer sent bytes that are no frame of the protocol, or a frame out of order; the connection was closed."""


class NotListeningError(ConnectionLostError):
    """A machine refuses a connection because nothing listens at the address; its network works."""


class PeerTimeoutError(PoolError):
    """A process or machine of the pool did not do its part in time."""


class AuthorizationError(PoolError):
    """A lease's key, a TLS certificate or a user id does not give access to what was asked for."""


class TokenError(AuthorizationError, UsageError):
    """The pool does not accept a token, or the role of the token's owner does not allow the operation."""


class StateError(PoolError):
    """The operation is not possible in the present state of a connection, lease, move, recorded program or process."""


class StorageError(WarpbusError, OSError):
    """A disk that is full, or a path that cannot be written."""


class UnavailableError(WarpbusError):
    """The service cannot take or finish a request now; the request is not to blame and may be sent again.

    `retry_after` is the number of seconds after which that is worth a try, or None where it is not known.
    """

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFullError(UnavailableError):
    """Too many requests wait already; `retry_after` comes from how fast requests have ended lately."""


class EngineDiedError(UnavailableError):
    """The processes that compute have died, and with them all requests that they had."""
