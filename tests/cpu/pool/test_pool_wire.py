"""Values as bytes: what goes in comes out, and what is no value is refused before it costs anything."""

import math
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warpbus.errors import PoolError, ProtocolError
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


def same(left, right):
    """Equal with equal types all the way down; NaN is equal to itself, and 0.0 is not -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left == right


@given(VALUES)
def test_values_come_back(value):
    data = encode(value)
    assert same(decode(data), value)
    assert same(decode(memoryview(bytearray(data))), value)


@given(st.binary(max_size=60))
def test_bytes_that_are_a_value_are_its_only_bytes(data):
    try:
        value = decode(data)
    except (ProtocolError, PoolError):
        return
    assert encode(value) == data


@given(st.dictionaries(TEXT, PLAIN, max_size=8), st.randoms())
def test_the_order_of_a_dict_does_not_show(value, random):
    items = list(value.items())
    random.shuffle(items)
    assert encode(dict(items)) == encode(value)


def test_bytes_are_as_documented():
    assert encode({"b": 1, "a": [None, True]}).hex(" ") == (
        "0b 02 00 00 00 01 00 00 00 61 09 02 00 00 00 00 02 01 00 00 00 62 03 01 00 00 00 00 00 00 00"
    )
    assert encode(torch.bfloat16) == b"\x08\x08bfloat16"
    assert encode(torch.Size([2])) == encode((2,))
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
        (10**5000, "from -2"),
        ("\ud800", "no Unicode text"),
        ("x" * (MAX_STRING + 1), f"at most {MAX_STRING}"),
        ({1: 2}, "keys have to be strings"),
        (object(), "builtins.object cannot be sent"),
        (np.float64(1.0), "float64 cannot be sent"),
        (np.complex128(1.0), "complex128 cannot be sent"),
        (torch.zeros(1), "Tensor cannot be sent"),
        (torch.sparse_coo, "it knows bool"),
        ([None] * (MAX_ITEMS + 1), "more than 1000000 items"),
        ({1, 2}, "set cannot be sent"),
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
    with pytest.raises(ProtocolError, match="deeper than 16"):
        decode(b"\x09\x01\x00\x00\x00" * (MAX_DEPTH + 1) + b"\x00")
    with pytest.raises(ProtocolError, match="deeper than 16"):
        decode(b"\x09\x01\x00\x00\x00" * 100_000 + b"\x00")
    endless = []
    endless.append(endless)
    with pytest.raises(ProtocolError, match="deeper than 16"):
        encode(endless)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "1 bytes are announced and 0"),
        (b"\x0c", "no value begins with 12"),
        (b"\xff", "no value begins with 255"),
        (b"\x00\x00", "1 bytes follow"),
        (b"\x03\x00", "8 bytes are announced and 1"),
        (b"\x06\x02\x00\x00\x00\xff\xff", "not UTF-8"),
        (b"\x06\x03\x00\x00\x00\xed\xa0\x80", "not UTF-8"),  # a surrogate
        (b"\x06\xff\xff\xff\xff", f"at most {MAX_STRING}"),
        (b"\x07\xff\xff\xff\xff", "4294967295 bytes are announced"),
        (b"\x09\xff\xff\xff\xff", "4294967295 items are announced"),
        (b"\x0a\x02\x00\x00\x00\x00", "2 items are announced"),
        (b"\x0b\x01\x00\x00\x00", "1 items are announced"),
        (encode({"a": 0, "b": 0}).replace(b"b", b"a"), "do not rise"),
        (encode({"a": 0, "b": 0}).replace(b"a", b"c"), "do not rise"),
        (b"\x08\x04\x00\x00", "4 bytes are announced"),
        (b"\x08\x06Tensor", "no dtype, layout or memory format"),
        (b"\x08\x04load", "no dtype, layout or memory format"),
        (b"\x09" + struct.pack("<I", MAX_ITEMS + 1) + bytes(MAX_ITEMS + 1), "more than 1000000 items"),
    ],
)
def test_what_is_no_value_is_not_read(data, message):
    with pytest.raises(ProtocolError, match=message) as caught:
        decode(data)
    assert "\n" not in str(caught.value)


def test_announced_lengths_cost_nothing():
    tracemalloc.start()
    try:
        for tag in (b"\x06", b"\x07", b"\x09", b"\x0a", b"\x0b"):
            for length in (2**32 - 1, 2**31, 10**6):
                with pytest.raises(ProtocolError):
                    decode(tag + struct.pack("<I", length) + bytes(100))
        assert tracemalloc.get_traced_memory()[1] < 100_000
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
