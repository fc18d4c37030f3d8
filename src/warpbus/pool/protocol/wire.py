"""Values as bytes: what questions, answers and definitions of calls are made of between client and pool.

A value is one tag byte and what the tag says; numbers are little endian. Nothing in the bytes names a class or a
function, so reading them can make plain values only.

    0 None    1 False    2 True    3 int i64    4 float f64    5 complex 2 x f64
    6 str     u32 bytes, UTF-8                  7 bytes u32 bytes, the bytes
    8 torch   u8 bytes, name in `TORCH_NAMES`: a dtype, layout or memory format
    9 list    u32 items, values                 10 tuple u32 items, values
    11 dict   u32 items, then for each its key (u32 bytes, UTF-8) and its value; keys rise strictly

Equal values of equal types have equal bytes, because the keys of a dict are sorted: bytes can be compared and hashed in
place of values, and a dict does not keep its order.

Limits: values nest at most `MAX_DEPTH` deep, hold at most `MAX_ITEMS` items together, strings have at most `MAX_STRING`
bytes, ints 64 bits. A length is compared with the bytes that are there before anything of its size is made.
"""

from struct import Struct
from struct import error as struct_error
from typing import TypeAlias

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

_NONE, _FALSE, _TRUE, _INT, _FLOAT, _COMPLEX, _STR, _BYTES, _TORCH, _LIST, _TUPLE, _DICT = range(12)

_I64 = Struct("<q")
_F64 = Struct("<d")
_C128 = Struct("<dd")
_U32 = Struct("<I")
_TAGGED_I64 = Struct("<Bq")
_TAGGED_F64 = Struct("<Bd")
_TAGGED_C128 = Struct("<Bdd")
_TAGGED_U32 = Struct("<BI")

_ENCODED_TORCH = {thing: bytes((_TORCH, len(name))) + name.encode("ascii") for name, thing in TORCH_NAMES.items()}
_DECODED_TORCH = {name.encode("ascii"): thing for name, thing in TORCH_NAMES.items()}


def encode(value: object) -> bytes:
    """The bytes of a `Value`.

    Raises:
        ProtocolError: something in it is no `Value`, or beyond a limit.
    """
    out = bytearray()
    _ValueEncoder(out).write(value, 0)
    return bytes(out)


def decode(data: bytes | bytearray | memoryview) -> Value:
    """The value of these bytes, all of them; it keeps no reference to `data`.

    Raises:
        ProtocolError: they are not what `encode` makes of a value.
    """
    decoder = _ValueDecoder(memoryview(data))
    value = decoder.read(0)
    decoder.check_end()
    return value


class _ValueEncoder:
    def __init__(self, out: bytearray) -> None:
        self._out = out
        self._items = 0

    def write(self, value: object, depth: int) -> None:
        out = self._out
        if type(value) is int:
            try:
                out += _TAGGED_I64.pack(_INT, value)
            except struct_error:
                raise ProtocolError(
                    f"an int of {value.bit_length()} bits cannot be sent to the pool: give one from -2^63 to 2^63 - 1"
                ) from None
        elif type(value) is str:
            out.append(_STR)
            self._text(value)
        elif value is None:
            out.append(_NONE)
        elif type(value) is bool:
            out.append(_TRUE if value else _FALSE)
        elif type(value) is float:
            out += _TAGGED_F64.pack(_FLOAT, value)
        elif type(value) is tuple or type(value) is torch.Size:
            self._open(_TUPLE, len(value), depth)
            for item in value:
                self.write(item, depth + 1)
        elif type(value) is list:
            self._open(_LIST, len(value), depth)
            for item in value:
                self.write(item, depth + 1)
        elif type(value) is dict:
            self._dict(value, depth)
        elif type(value) is bytes:
            self._check_u32(len(value))
            out += _TAGGED_U32.pack(_BYTES, len(value))
            out += value
        elif type(value) is complex:
            out += _TAGGED_C128.pack(_COMPLEX, value.real, value.imag)
        elif isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            if value not in _ENCODED_TORCH:
                raise ProtocolError(f"{value} cannot be sent to the pool: it knows {', '.join(TORCH_NAMES)}")
            out += _ENCODED_TORCH[value]
        else:
            kind = type(value)
            raise ProtocolError(
                f"a {kind.__module__}.{kind.__qualname__} cannot be sent to the pool: give plain values, lists, "
                "tuples or dicts of them"
            )

    def _open(self, tag: int, count: int, depth: int) -> None:
        if depth + 1 > MAX_DEPTH:
            raise ProtocolError(f"a value cannot be sent to the pool: it nests deeper than {MAX_DEPTH}")
        self._items += count
        if self._items > MAX_ITEMS:
            raise ProtocolError(f"a value cannot be sent to the pool: it has more than {MAX_ITEMS} items")
        self._out += _TAGGED_U32.pack(tag, count)

    def _dict(self, value: dict[object, object], depth: int) -> None:
        keys = [key for key in value if type(key) is str]
        if len(keys) != len(value):
            raise ProtocolError("a dict cannot be sent to the pool: all of its keys have to be strings")
        self._open(_DICT, len(keys), depth)
        for key in sorted(keys):
            self._text(key)
            self.write(value[key], depth + 1)

    def _text(self, text: str) -> None:
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError:
            raise ProtocolError(f"{text[:40]!a} cannot be sent to the pool: it is no Unicode text") from None
        if len(data) > MAX_STRING:
            raise ProtocolError(f"a string of {len(data)} bytes cannot be sent to the pool: at most {MAX_STRING}")
        self._out += _U32.pack(len(data))
        self._out += data

    @staticmethod
    def _check_u32(count: int) -> None:
        if count >= 2**32:
            raise ProtocolError(f"{count} bytes cannot be sent to the pool in one value: at most {2**32 - 1}")


class _ValueDecoder:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0
        self._items = 0

    def read(self, depth: int) -> Value:
        at = self._take(1)
        tag = self._data[at]
        if tag == _INT:
            return int(_I64.unpack_from(self._data, self._take(8))[0])
        if tag == _STR:
            return self._text()
        if tag == _NONE:
            return None
        if tag == _FALSE:
            return False
        if tag == _TRUE:
            return True
        if tag == _FLOAT:
            return float(_F64.unpack_from(self._data, self._take(8))[0])
        if tag == _TUPLE:
            return tuple([self.read(depth + 1) for _ in range(self._count(depth))])
        if tag == _LIST:
            return [self.read(depth + 1) for _ in range(self._count(depth))]
        if tag == _DICT:
            return self._dict(depth)
        if tag == _BYTES:
            size = self._u32()
            start = self._take(size)
            return bytes(self._data[start : start + size])
        if tag == _TORCH:
            return self._torch()
        if tag == _COMPLEX:
            return complex(*_C128.unpack_from(self._data, self._take(16)))
        raise self._damaged(f"no value begins with {tag}", at)

    def check_end(self) -> None:
        if self._at != self._size:
            raise self._damaged(f"{self._size - self._at} bytes follow the value", self._at)

    def _take(self, size: int) -> int:
        """Where the next `size` bytes begin."""
        at = self._at
        if size > self._size - at:
            raise self._damaged(f"{size} bytes are announced and {self._size - at} are there", at)
        self._at = at + size
        return at

    def _u32(self) -> int:
        return int(_U32.unpack_from(self._data, self._take(4))[0])

    def _count(self, depth: int) -> int:
        at = self._at
        count = self._u32()
        if depth + 1 > MAX_DEPTH:
            raise self._damaged(f"it nests deeper than {MAX_DEPTH}", at)
        if count > self._size - self._at:  # each item has a byte at least
            raise self._damaged(f"{count} items are announced and {self._size - self._at} bytes are there", at)
        self._items += count
        if self._items > MAX_ITEMS:
            raise self._damaged(f"it has more than {MAX_ITEMS} items", at)
        return count

    def _text(self) -> str:
        at = self._at
        size = self._u32()
        if size > MAX_STRING:
            raise self._damaged(f"a string has {size} bytes, at most {MAX_STRING} are allowed", at)
        start = self._take(size)
        try:
            return str(self._data[start : start + size], "utf-8")
        except UnicodeDecodeError:
            raise self._damaged("a string is not UTF-8", at) from None

    def _dict(self, depth: int) -> dict[str, Value]:
        found: dict[str, Value] = {}
        last: str | None = None
        for _ in range(self._count(depth)):
            at = self._at
            key = self._text()
            if last is not None and key <= last:
                raise self._damaged("the keys of a dict do not rise", at)
            found[key] = self.read(depth + 1)
            last = key
        return found

    def _torch(self) -> Value:
        at = self._take(1)
        size = self._data[at]
        start = self._take(size)
        name = bytes(self._data[start : start + size])
        if name not in _DECODED_TORCH:
            raise self._damaged(f"{name[:40]!r} is no dtype, layout or memory format that the pool knows", at)
        return _DECODED_TORCH[name]

    @staticmethod
    def _damaged(why: str, at: int) -> ProtocolError:
        return ProtocolError(
            f"a value of the pool's protocol cannot be read: {why} (byte {at}); it is damaged, or the other side has "
            "another version of Warpbus"
        )
