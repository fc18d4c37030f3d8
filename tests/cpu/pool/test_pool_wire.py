"""Values as bytes: what goes in comes out, and what is no value is refused before it costs anything."""

import math
import struct
import subprocess
import sys
import tracemalloc
from datetime import UTC, datetime

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warpbus.errors import ProtocolError
from warpbus.pool.protocol.wire import MAX_DEPTH, MAX_ITEMS, MAX_STRING, TORCH_NAMES, decode, encode

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.complex_numbers(),
    TEXT,
    st.binary(max_size=40),
    st.sampled_from(list(TORCH_NAMES.values())),
)
VALUES = st.recursive(
    PLAIN,
    lambda items: st.one_of(
        st.lists(items, max_size=6), st.lists(items, max_size=6).map(tuple), st.dictionaries(TEXT, items, max_size=6)
    ),
    max_leaves=30,
)


def arrived(value):
    """The value that a value arrives as: tuples are lists."""
    if isinstance(value, list | tuple):
        return [arrived(item) for item in value]
    return {key: arrived(item) for key, item in value.items()} if isinstance(value, dict) else value


def same(left, right):
    """Equal with equal types all the way down; NaN is equal to itself, and 0.0 is not -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left == right


@given(VALUES)
def test_values_come_back(value):
    data = encode(value)
    assert same(decode(data), arrived(value))
    assert same(decode(memoryview(bytearray(data))), arrived(value))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_refused(data):
    try:
        value = decode(data)
    except ProtocolError:
        return
    assert same(decode(encode(value)), value)


def test_bytes_are_as_documented():
    assert encode({"b": 1, "a": [None, True]}).hex(" ") == "82 a1 62 01 a1 61 92 c0 c3"
    assert encode(torch.int32) == b"\xc7\x05\x02int32"
    assert encode(complex(1, -2)) == b"\xd8\x01" + struct.pack("<dd", 1, -2)
    assert encode(torch.Size([2])) == encode((2,)) == encode([2])
    assert encode(0.0) != encode(-0.0)
    assert encode(1) != encode(True) != encode(1.0)


def test_bytes_are_the_same_in_another_process():
    value = {"z": (torch.float16, 1.5, "ü"), "a": {"k": [1, 2], "j": b"\x00"}}
    code = f"import torch; from warpbus.pool.protocol.wire import encode; print(encode({value!r}).hex())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert bytes.fromhex(found.stdout) == encode(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2**63, "an int of 64 bits"),
        (-(2**63) - 1, "an int of 64 bits"),
        (10**5000, "not from -2"),
        ("\ud800", "no Unicode text"),
        ({"\ud800": 1}, "no Unicode text"),
        ("x" * (MAX_STRING + 1), f"at most {MAX_STRING}"),
        ("\u00fc" * (MAX_STRING // 2 + 1), f"at most {MAX_STRING}"),
        ({"x" * (MAX_STRING + 1): 1}, f"at most {MAX_STRING}"),
        ({1: 2}, "keys of a dict have to be strings"),
        ({b"a": 2}, "keys of a dict have to be strings"),
        (object(), "a builtins.object is no plain value"),
        (bytearray(1), "a builtins.bytearray is no plain value"),
        (datetime.now(UTC), "a datetime.datetime is no plain value"),
        (msgpack.ExtType(1, bytes(16)), "ExtType is no plain value"),
        (np.float64(1.0), "float64 is no plain value"),
        (np.complex128(1.0), "complex128 is no plain value"),
        (torch.zeros(1), "Tensor is no plain value"),
        (torch.sparse_coo, "is none of bool"),
        ([None] * (MAX_ITEMS + 1), "more than 1000000 items"),
        ([[None] * (MAX_ITEMS // 2)] * 2, "more than 1000000 items"),
        ({1, 2}, "set is no plain value"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_value_is_not_sent(value, message):
    with pytest.raises(ProtocolError, match=message) as caught:
        encode(value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def nested(depth):
    value = None
    for _ in range(depth):
        value = [value]
    return value


def test_depth():
    assert decode(encode(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    with pytest.raises(ProtocolError, match="deeper than 16"):
        encode(nested(MAX_DEPTH + 1))
    for inner in (b"\xc0", b"\x90", b"\x80"):
        with pytest.raises(ProtocolError, match="deeper than 16"):
            decode(b"\x91" * (MAX_DEPTH + (inner == b"\xc0")) + inner)
    with pytest.raises(ProtocolError, match="deeper than 16"):
        decode(b"\x81\xa1a" * (MAX_DEPTH + 1) + b"\xc0")
    for depth in (500, 1_000, 100_000):  # within, about and beyond what MessagePack itself allows
        with pytest.raises(ProtocolError, match=r"deeper than 16|StackError"):
            decode(b"\x91" * depth + b"\xc0")
    endless = []
    endless.append(endless)
    with pytest.raises(ProtocolError, match="deeper than 16"):
        encode(endless)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cut off after 0 bytes"),
        (b"\xc1", "no MessagePack"),
        (b"\xc0\xc0", "1 bytes follow"),
        (b"\xd3\x00", "cut off after 2 bytes"),
        (b"\xcf" + bytes([255] * 8), "an int of 64 bits"),
        (b"\xa2\xff\xff", "invalid start byte"),
        (b"\xa3\xed\xa0\x80", "invalid continuation byte"),  # a surrogate
        (
            b"\xdb" + struct.pack(">I", MAX_STRING + 1) + b"x" * (MAX_STRING + 1),
            f"{MAX_STRING + 1} exceeds max_str_len",
        ),
        (b"\xdb\xff\xff\xff\xff", "cut off"),
        (b"\xc6\xff\xff\xff\xff", "cut off"),
        (b"\xdd\xff\xff\xff\xff", "cut off"),
        (b"\xdf\xff\xff\xff\xff", "cut off"),
        (b"\x92\xc0", "cut off"),
        (b"\x81\xa1a", "cut off"),
        (b"\x82\xa1a\x00\xa1a\x00", "one key twice"),
        (b"\x81\x01\x00", "int is not allowed for map key"),
        (b"\x81\x90\x00", "list is not allowed for map key"),
        (b"\x81\xc4\x01a\x00", "have to be strings"),
        (b"\xc7\x04\x02\x00", "cut off"),
        (b"\xc7\x06\x02Tensor", "no dtype, layout or memory format"),
        (b"\xc7\x04\x02load", "no dtype, layout or memory format"),
        (b"\xc7\x21\x02" + bytes(33), "exceeds max_ext_len"),
        (b"\xd7\x01" + bytes(8), "requires a buffer of 16 bytes"),
        (b"\xd4\x03a", "no extension type 3"),
        (b"\xd6\xff" + bytes(4), "Timestamp is no plain value"),
        (b"\xc7\x03\xffabc", "invalid timestamp"),
        (b"\xdd" + struct.pack(">I", MAX_ITEMS + 1) + b"\xc0" * (MAX_ITEMS + 1), "1000001 exceeds max_array_len"),
        (b"\xdf" + struct.pack(">I", MAX_ITEMS + 1) + b"\xa0\xc0" * (MAX_ITEMS + 1), "1000001 exceeds max_map_len"),
        (b"\x92" + 2 * (b"\xdd" + struct.pack(">I", MAX_ITEMS // 2) + b"\xc0" * (MAX_ITEMS // 2)), "more than 1000000"),
    ],
    ids=lambda value: value[:8].hex() if isinstance(value, bytes) else "",
)
def test_what_is_no_value_is_not_read(data, message):
    with pytest.raises(ProtocolError, match=message) as caught:
        decode(data)
    assert "\n" not in str(caught.value)
    assert "another version of Warpbus" in str(caught.value)


def test_announced_lengths_cost_nothing():
    tracemalloc.start()
    try:
        for kind in (b"\xdb", b"\xc6", b"\xdd", b"\xdf", b"\xc9"):
            for length in (2**32 - 1, 2**31, 10**6):
                with pytest.raises(ProtocolError):
                    decode(kind + struct.pack(">I", length) + bytes(100))
        assert tracemalloc.get_traced_memory()[1] < 100_000
        # A list within a list, each announced as long as the message: together they would take 400 MB.
        with pytest.raises(ProtocolError, match="cut off"):
            decode((b"\xdd" + struct.pack(">I", 50_000)) * 1_000 + bytes(45_000))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_many_empty_lists_are_refused_while_they_are_read():
    """Each is a byte of the message and 56 bytes of memory."""
    lists = b"\xdc\xff\xff" + b"\x90" * 0xFFFF
    data = b"\xdc\x00\x40" + lists * 64
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="more than 1000000 items"):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 100 * MAX_ITEMS
    finally:
        tracemalloc.stop()


def test_numbers_at_their_limits():
    for value in (2**63 - 1, -(2**63), math.inf, -math.inf, 5e-324, complex(math.nan, -math.inf)):
        assert same(decode(encode(value)), value)


@settings(max_examples=20)
@given(VALUES)
def test_half_a_value_is_none(value):
    data = encode(value)
    for cut in range(len(data)):
        with pytest.raises(ProtocolError):
            decode(data[:cut])
