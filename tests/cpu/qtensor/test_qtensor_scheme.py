"""`Scheme`: one spelling, and sentences for everything else."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from warpbus.errors import SchemeError, UsageError
from warpbus.qtensor import Scheme

SCHEMES = [Scheme(*parts) for parts in itertools.product((2, 3, 4, 8), (None, 32, 64, 128), (True, False))]
SCHEMES += [Scheme(8, None, activations="int8"), Scheme(8, None, activations="fp8")]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_parse_undoes_str(scheme: Scheme) -> None:
    assert Scheme.parse(str(scheme)) == scheme


def test_spelling() -> None:
    assert str(Scheme(4, 128)) == "w4a16-g128"
    assert str(Scheme(3, 32, symmetric=False)) == "w3a16-g32-asym"
    assert Scheme.parse("w8a16") == Scheme(8, None)
    assert str(Scheme(8, None, activations="int8")) == "w8a8-int8"
    assert Scheme.parse("w8a8-fp8") == Scheme(8, None, activations="fp8")


@given(st.text() | st.from_regex(r"w\d{1,3}a\d{1,2}(-g\d{1,4}|-int8|-fp8)?(-asym)?", fullmatch=True))
def test_any_other_text_is_a_scheme_error(text: str) -> None:
    if text in map(str, SCHEMES):
        return
    with pytest.raises(SchemeError) as caught:
        Scheme.parse(text)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [
        *("", "w4", "W4A16", "w4a16-g", "w4a16-128", "w4a16-asym-g128", "w4a16 ", "w4a8", "w04a16", "w٤a16"),
        *("w8a8", "w8a8-int4", "w4a8-int8", "w8a8-fp8-asym", "w8a8-int8-g128", "w8a16-int8"),
    ],
)
def test_malformed_names_are_answered_with_an_example(text: str) -> None:
    with pytest.raises(SchemeError, match=r"unknown scheme .* for instance w4a16-g128"):
        Scheme.parse(text)


def test_unsupported_numbers_are_answered_with_those_supported() -> None:
    with pytest.raises(SchemeError, match="7 bits are not supported: choose from 2, 3, 4, 5, 6, 8"):
        Scheme.parse("w7a16")
    with pytest.raises(SchemeError, match="groups of 48 are not supported: choose from 32, 64, 128"):
        Scheme.parse("w4a16-g48")
    with pytest.raises(UsageError, match="unknown scheme"):
        Scheme.parse(f"w{'9' * 5000}a16")


def test_groups() -> None:
    assert Scheme(4, 128).groups(13696) == 107
    assert Scheme(4, None).groups(77) == 1
    with pytest.raises(SchemeError, match=r"down: 6848 columns .* groups of 128 .* use groups of 32, 64"):
        Scheme(4, 128).groups(6848, "down")
    with pytest.raises(SchemeError, match="one scale per row"):
        Scheme(4, 128).groups(100)


def test_codes_and_bits_per_weight() -> None:
    assert [(Scheme(bits, None).middle_code, Scheme(bits, None).max_code) for bits in (2, 3, 4, 8)] == [
        (2, 3),
        (4, 7),
        (8, 15),
        (128, 255),
    ]
    assert Scheme(4, 128).bits_per_weight(4096) == 4 + 16 / 128
    assert Scheme(4, 32, symmetric=False).bits_per_weight(4096) == 4 + 20 / 32
    assert Scheme(8, None).bits_per_weight(4096, scale_bits=32) == 8 + 32 / 4096
    assert Scheme.parse("w8a8-fp8").bits_per_weight(4096) == 8 + 16 / 4096


def test_w8a8_goes_with_8_bits_rows_and_symmetry() -> None:
    for bits, group_size, symmetric in ((4, None, True), (8, 128, True), (8, None, False)):
        with pytest.raises(SchemeError, match=r"activations in int8 go with .* use w8a8-int8"):
            Scheme(bits, group_size, symmetric, activations="int8")
    with pytest.raises(SchemeError, match="activations in int4 are not supported: choose from int8, fp8"):
        Scheme(8, None, activations="int4")


def test_int8_values_are_codes_and_fp8_values_are_not() -> None:
    int8, fp8 = Scheme.parse("w8a8-int8"), Scheme.parse("w8a8-fp8")
    assert (int8.max_code, int8.middle_code, int8.dtype) == (255, 128, torch.int8)
    assert (fp8.groups(77), fp8.has_codes, fp8.dtype) == (1, False, torch.float8_e4m3fn)
    for ask in (lambda: fp8.max_code, lambda: fp8.middle_code):
        with pytest.raises(SchemeError, match="w8a8-fp8: its weights are floating-point values"):
            ask()
