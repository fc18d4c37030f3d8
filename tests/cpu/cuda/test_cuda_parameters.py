"""Declared parameters: where they lie, what is packed, and which arguments are refused."""

import struct

import pytest
import torch

from warpbus.cuda.parameters import Parameters


@pytest.mark.parametrize(
    ("signature", "structs", "layout"),
    [
        ("float* x", {}, [(0, 8)]),
        ("float* x, int n, const ELEMENT* y, float f", {}, [(0, 8), (8, 4), (16, 8), (24, 4)]),
        ("int a, long long b, int c", {}, [(0, 4), (8, 8), (16, 4)]),
        (
            "TensorMap a, TileMaps b, float* out, unsigned int m, int n",
            {},
            [(0, 128), (128, 256), (384, 8), (392, 4), (396, 4)],
        ),
        ("int n, TensorMap a, int m", {}, [(0, 4), (64, 128), (192, 4)]),
        ("float* x, Problem p, int q", {"Problem": "int m, int n, float eps"}, [(0, 8), (8, 12), (20, 4)]),
        ("int q, Sizes s, int r", {"Sizes": "int m, long long n, int k"}, [(0, 4), (8, 24), (32, 4)]),
    ],
)
def test_parameters_lie_where_c_puts_them(signature, structs, layout):
    parameters = Parameters(signature, **structs)
    assert parameters.layout == layout
    assert parameters.offsets == tuple(offset for offset, _ in layout)


def test_arguments_are_packed_at_their_offsets():
    parameters = Parameters(
        "TensorMap map, const float* x, float* bias, long long rows, Problem p, unsigned int last",
        Problem="int m, int whole, float eps",
    )
    x, map_x = torch.zeros(3), bytes(range(128))
    given = {"last": 2**32 - 1, "eps": 0.5, "whole": True, "m": -3, "rows": 2**40, "bias": None, "x": x, "map": map_x}
    packed, first = parameters.pack(given)
    assert first is x
    assert packed[:128] == map_x
    assert struct.unpack_from("<QQqiifI", packed, 128) == (x.data_ptr(), 0, 2**40, -3, 1, 0.5, 2**32 - 1)
    assert len(packed) == 128 + 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": None}, r"does not fit its parameter: n = NoneType None"),
        ({"n": 2**31}, r"n = int 2147483648"),
        ({"n": 1.5}, r"n = float 1\.5"),
        ({"x": 17}, r"x = int 17"),
        ({"map": bytes(256)}, r"map = bytes"),
        ({"map": None}, r"map = NoneType None"),
        ({"m": 1}, r"missing arguments: none, unknown ones: m"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    parameters = Parameters("TensorMap map, float* x, int n")
    with pytest.raises(ValueError, match=message):
        parameters.pack({"map": bytes(128), "x": None, "n": 1, **change})


def test_a_missing_argument_is_named():
    with pytest.raises(ValueError, match="missing arguments: x, size, unknown ones: rows"):
        Parameters("float* x, int n, int size").pack({"n": 1, "rows": 2})


@pytest.mark.parametrize(
    ("signature", "structs", "message"),
    [
        ("float* x, double y", {}, "C type 'double' is not known"),
        ("float* x, Problem p", {}, "C type 'Problem' is not known"),
        ("float* x, int x", {}, "x occurs twice"),
        ("float* m, Problem p", {"Problem": "int m"}, "occurs twice"),
        ("int", {}, "'int' is no parameter"),
    ],
)
def test_declarations_that_cannot_be(signature, structs, message):
    with pytest.raises(ValueError, match=message):
        Parameters(signature, **structs)
