"""The error that carries the fields of an HTTP error response."""

from warpbus.errors import WarpbusError


class RequestError(WarpbusError):
    """The HTTP server refuses a request, or failed to answer it.

    Attributes:
        status: the HTTP status of the response.
        kind: OpenAI's `type` of the error.
        param: the field that is wrong, or None.
        code: OpenAI's or Warpbus's short name of the error, or None.
        retry_after: seconds after which another try may succeed, or None.
        closes: the connection ends with the response, since what comes next on it is unknown.
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
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.closes = closes
