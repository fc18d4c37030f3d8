"""Every error that Warpbus raises on purpose.

    WarpbusError                      the root: one line that says what, where and what to do
    ├── UsageError                    a flag or an argument is wrong
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
    │   ├── ConnectionLost            the other side of a connection of the pool is gone or sends nonsense
    │   └── LeaseLostError            a lease of the pool, and what it held, is gone
    ├── StorageError                  a disk that is full or cannot be written
    ├── RequestError                  a request that the HTTP server does not answer as it was meant
    └── UnavailableError              the service cannot take or finish a request now, which may be sent again
        ├── QueueFullError            too many requests wait already
        └── EngineDiedError           the processes that compute have died

Messages follow one form: what is wrong with which file, tensor or flag; what was expected; what to do.
The command line prints the message alone and exits with `exit_code`.
"""


class WarpbusError(Exception):
    """The root of the tree. `exit_code` is what the command line returns to the shell."""

    exit_code = 1


class UsageError(WarpbusError, ValueError):
    """A flag or an argument is wrong."""

    exit_code = 2


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


class ConnectionLost(DeviceError):  # noqa: N818 - says what happened, as ConnectionReset does
    """The other side of a connection of the pool is gone, or sends what cannot be understood; a new one may work."""


class LeaseLostError(DeviceError):
    """A lease of the GPU pool and all that it held are gone: it was ended, or what executed it died."""


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


class RequestError(WarpbusError):
    """A request that the HTTP server does not answer as it was meant.

    Attributes:
        status: of the response.
        kind: OpenAI's `type` of the error.
        param: the field that is wrong, or None.
        code: OpenAI's or our short name of the error, or None.
        retry_after: seconds after which another try may succeed, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after
