"""The envelope of control messages: requests with an operation and its arguments, and answers with a result or error.

    request   {"operation": name, "arguments": {name: value}}
    answer    {"progress": {...}} any number of times, then {"result": {...}}
    error     {"type": name of an exception, "message": str}, see `failures`

Requests go from clients to daemons, between daemons, and in both directions between a daemon and the processes of its
tenants. `operations` has a table of the operations of each endpoint; a request that does not fit it is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, NamedTuple

from warpbus.errors import ProtocolError, UsageError
from warpbus.pool.protocol.wire import decode, encode


@dataclass(frozen=True)
class Operation:
    """An operation that an endpoint accepts under a name.

    Args:
        arguments: their types by name.
        optional: the types of arguments that may be missing.
        role: the role that a client of a daemon needs at least.
    """

    arguments: Mapping[str, type | UnionType] = field(default_factory=dict)
    optional: Mapping[str, type | UnionType] = field(default_factory=dict)
    role: Literal["viewer", "tenant", "admin"] = "tenant"


class Request(NamedTuple):
    """A request that fits the table of its endpoint."""

    operation: str
    arguments: dict[str, Any]


def encode_request(operation: str, arguments: Mapping[str, Any]) -> bytes:
    """The bytes of a request. Raises ProtocolError if an argument is no value of `wire`."""
    return encode({"operation": operation, "arguments": dict(arguments)})


def decode_request(data: bytes | memoryview, operations: Mapping[str, Operation]) -> Request:
    """The request of these bytes.

    Raises:
        ProtocolError: they are no message.
        UsageError: there is no such operation, or its arguments are others.
    """
    message = decode_dict(data)
    return checked(message.get("operation"), message.get("arguments"), operations)


def checked(name: Any, arguments: Any, operations: Mapping[str, Operation]) -> Request:
    """A request, compared with a table of operations.

    Raises:
        UsageError: there is no such operation, or its arguments are others.
    """
    operation = operations.get(name) if isinstance(name, str) else None
    if operation is None:
        raise UsageError(f"the pool does not understand {name!r:.100}: is it older than the client?")
    if not isinstance(arguments, dict):
        raise UsageError(f"{name}: the arguments are {arguments!r:.100}: give a dict")
    kinds = {**operation.arguments, **operation.optional}
    for argument in [each for each in operation.arguments if each not in arguments] + list(arguments):
        kind, value = kinds.get(argument), arguments.get(argument)
        if kind is None:
            raise UsageError(f"{name}: there is no argument {argument!r:.100}: give {', '.join(kinds) or 'none'}")
        # True is an int to Python, and to nobody else.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            wanted = kind.__name__ if isinstance(kind, type) else str(kind)
            raise UsageError(f"{name}: {argument} is {value!r:.100}: give {wanted}")
    return Request(str(name), arguments)


def encode_answer(answer: Mapping[str, Any], *, final: bool) -> bytes:
    """The bytes of a result, or of progress if it is not `final`."""
    return encode({"result" if final else "progress": dict(answer)})


def decode_answer(data: bytes | memoryview) -> tuple[dict[str, Any], bool]:
    """A result or progress, and whether it is the result. Raises ProtocolError if the bytes are neither."""
    match decode_dict(data):
        case {"result": dict(result)}:
            return result, True
        case {"progress": dict(progress)}:
            return progress, False
    raise ProtocolError("a message of the pool is no answer: it has no result and no progress")


def decode_dict(data: bytes | memoryview) -> dict[str, Any]:
    """The message of these bytes. Raises ProtocolError if they are none."""
    message = decode(data)
    if not isinstance(message, dict):
        raise ProtocolError(f"a message of the pool is no dict, but a {type(message).__name__}")
    return message
