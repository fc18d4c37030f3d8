"""Control messages as bytes: MessagePack with limits, for requests, answers and definitions of calls.

A `Value` is None, a bool, int, float, complex, str or bytes, a dtype, layout or memory format of torch, or a list or a
dict with str keys of such values. Tuples and `torch.Size` arrive as lists. Two extension types of MessagePack are used:

    1  a complex number: two f64, little endian
    2  a dtype, layout or memory format: its name in `TORCH_NAMES`, ASCII

Limits: values nest at most `MAX_DEPTH` deep and hold at most `MAX_ITEMS` items together, strings have at most
`MAX_STRING` bytes, ints are from -2^63 to 2^63 - 1. `decode` allocates nothing before all announced items are there.
"""

from collections.abc import Collection
from struct import Struct
from struct import error as struct_error
from typing import Any, TypeAlias

import msgpack
import torch

from warpbus.errors import ProtocolError

Value: TypeAlias = (
    bool
    | int
    | float
    | complex
    | str
    | bytes
    | torch.dtype
    | torch.layout
    | torch.memory_format
    | list["Value"]
    | tuple["Value", ...]
    | dict[str, "Value"]
    | None
)

MAX_DEPTH = 16
MAX_ITEMS = 1_000_000
MAX_STRING = 2**20

TORCH_NAMES: dict[str, torch.dtype | torch.layout | torch.memory_format] = {
    str(thing).removeprefix("torch."): thing
    for thing in (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
        *(torch.complex32, torch.complex64, torch.complex128),
        torch.strided,
        *(torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d),
    )
}

_COMPLEX, _TORCH = 1, 2
_C128 = Struct("<dd")
_MAX_EXTENSION = 32  # bytes
_BUFFER = 1024  # bytes to begin with; MessagePack would take 256 KiB for each message
_ENCODED_TORCH = {thing: msgpack.ExtType(_TORCH, name.encode("ascii")) for name, thing in TORCH_NAMES.items()}
_DECODED_TORCH = {name.encode("ascii"): thing for name, thing in TORCH_NAMES.items()}
_PLAIN = frozenset({type(None), bool, float, complex, bytes})
_TORCH_TYPES = frozenset({torch.dtype, torch.layout, torch.memory_format})
_CONTAINERS = frozenset({list, tuple, torch.Size, dict})


def encode(value: object) -> bytes:
    """The bytes of a `Value`.

    Raises:
        ProtocolError: something in it is no `Value`, or beyond a limit.
    """
    try:
        _check(value)
        return bytes(msgpack.packb(value, default=_extension, buf_size=_BUFFER))
    except UnicodeEncodeError as error:
        raise ProtocolError(f"{error.object[:40]!a} cannot be sent to the pool: it is no Unicode text") from None
    except ValueError as error:
        raise ProtocolError(f"a value cannot be sent to the pool: {error}") from None


def decode(data: bytes | bytearray | memoryview) -> Value:
    """The value of these bytes, all of them; it keeps no reference to `data`.

    Raises:
        ProtocolError: they are not the bytes of a `Value`, or it is beyond a limit.
    """
    containers = 0

    def counted(container: Any) -> Any:
        nonlocal containers
        containers += 1
        if containers > MAX_ITEMS:
            raise ValueError(f"it has more than {MAX_ITEMS} items")
        return container

    try:
        _check_complete(data)
        value: Value = msgpack.unpackb(
            data,
            list_hook=counted,
            object_pairs_hook=lambda pairs: counted(_dict(pairs)),
            ext_hook=_extended,
            max_str_len=MAX_STRING,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=_MAX_EXTENSION,
        )
        _check(value)
    except (ValueError, struct_error) as error:
        why = str(error) or f"it is no MessagePack ({type(error).__name__})"
        raise ProtocolError(
            f"a value of the pool's protocol cannot be read: {why}; it is damaged, or the other side has another "
            "version of Warpbus"
        ) from None
    return value


def _check_complete(data: bytes | bytearray | memoryview) -> None:
    """Raises ValueError unless `data` is one complete value. Without this check, lists that are announced inside lists
    would be allocated at the announced lengths, before the reader finds that their items are missing."""
    reader = msgpack.Unpacker(max_buffer_size=max(len(data), 1))  # 0 would be no limit
    reader.feed(data)
    try:
        reader.skip()
    except msgpack.OutOfData:
        raise ValueError(f"it is cut off after {len(data)} bytes") from None
    if reader.tell() < len(data):
        raise ValueError(f"{len(data) - reader.tell()} bytes follow the value")


def _check(value: object) -> None:
    """Raises ValueError for anything that is no `Value`, and for a value beyond a limit; goes through it by level."""
    items = 0
    level: list[Collection[Any]] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Collection[Any]] = []
        for container in level:
            for item in container:
                kind = type(item)
                if kind is int:
                    if not -(2**63) <= item < 2**63:
                        raise ValueError(f"an int of {item.bit_length()} bits is not from -2^63 to 2^63 - 1")
                elif kind is str:
                    _check_text(item)
                elif kind in _CONTAINERS:
                    items += len(item)
                    if items > MAX_ITEMS:
                        raise ValueError(f"it has more than {MAX_ITEMS} items")
                    if kind is dict:
                        _check_keys(item)
                        inner.append(item.values())
                    else:
                        inner.append(item)
                elif kind in _TORCH_TYPES:
                    if item not in _ENCODED_TORCH:
                        raise ValueError(f"{item} is none of {', '.join(TORCH_NAMES)}")
                elif kind not in _PLAIN:
                    what = f"{kind.__module__}.{kind.__qualname__}"
                    raise ValueError(f"a {what} is no plain value, list, tuple or dict")
        if not inner:
            return
        level = inner
    raise ValueError(f"it nests deeper than {MAX_DEPTH}")


def _check_text(text: str) -> None:
    nbytes = len(text) if text.isascii() else len(text.encode("utf-8"))
    if nbytes > MAX_STRING:
        raise ValueError(f"a string has {nbytes} bytes, at most {MAX_STRING} are allowed")


def _check_keys(container: dict[Any, Any]) -> None:
    for key in container:
        if type(key) is not str:
            raise ValueError("all keys of a dict have to be strings")
        _check_text(key)


def _dict(pairs: list[tuple[str, Value]]) -> dict[str, Value]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a dict has one key twice")
    return found


def _extension(value: Any) -> msgpack.ExtType:
    """The values that MessagePack has no type for, after `_check`."""
    if type(value) is complex:
        return msgpack.ExtType(_COMPLEX, _C128.pack(value.real, value.imag))
    return _ENCODED_TORCH[value]


def _extended(code: int, data: bytes) -> Value:
    if code == _COMPLEX:
        return complex(*_C128.unpack(data))
    if code != _TORCH:
        raise ValueError(f"there is no extension type {code}")
    if data not in _DECODED_TORCH:
        raise ValueError(f"{data!r} is no dtype, layout or memory format that the pool knows")
    return _DECODED_TORCH[data]
