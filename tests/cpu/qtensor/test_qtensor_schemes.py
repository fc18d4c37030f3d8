"""`Schemes`: which matrix has which scheme."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpbus.errors import SchemeError
from warpbus.qtensor import Scheme, Schemes

W4, W8, FP8 = (Scheme.parse(text) for text in ("w4a16-g128", "w8a16", "w8a8-fp8"))


def test_the_first_exception_that_fits_holds() -> None:
    schemes = Schemes(
        W4,
        {
            "lm_head": None,
            r"re:.*\.o_proj$": W8,
            "model.layers.1.mlp.down_proj": FP8,
            r"re:model\.layers\.1\.": W8,
        },
    )
    assert schemes.of("model.layers.0.mlp.down_proj") == W4
    assert schemes.of("lm_head") is None
    assert schemes.of("model.layers.11.self_attn.o_proj") == W8
    assert schemes.of("model.layers.1.mlp.down_proj") == FP8
    assert schemes.of("model.layers.1.mlp.up_proj") == W8
    assert schemes.of("model.layers.11.mlp.up_proj") == W4
    assert schemes.distinct() == (W4, W8, FP8)
    assert str(schemes) == "w4a16-g128 + w8a16 + w8a8-fp8"


def test_a_model_of_one_scheme_and_one_of_none() -> None:
    assert str(Schemes(W4, {"lm_head": None})) == str(W4)
    assert Schemes(None).distinct() == ()
    assert str(Schemes(None)) == "not quantized"


names = st.text(max_size=20).filter(lambda name: not name.startswith("re:"))
kinds = st.sampled_from((W4, W8, FP8, None))


@given(kinds, st.dictionaries(names, kinds, max_size=4))
def test_json_comes_back(default: Scheme | None, exceptions: dict[str, Scheme | None]) -> None:
    schemes = Schemes(default, exceptions)
    back = Schemes.from_json(json.loads(json.dumps(schemes.to_json())))
    assert back == schemes
    assert list(back.exceptions) == list(exceptions)
    assert all(back.of(name) == scheme for name, scheme in exceptions.items())


@pytest.mark.parametrize("value", [None, [], {}, {"default": "w4a16"}, {"default": None, "exceptions": {"a": 4}}])
def test_other_json_is_refused(value: object) -> None:
    with pytest.raises(SchemeError, match=r"expected (an object with default and exceptions|a name such as)"):
        Schemes.from_json(value)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "no regular expression"),
        ("(a+)+$", "no repeated group"),
        ("(a|b){3}", "no repeated group"),
        (".*" * 9, "at most 8"),
        ("a" * 5000, "5000 characters, expected 4096"),
    ],
)
def test_patterns_that_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message) as caught:
        Schemes(None, {f"re:{pattern}": W4})
    assert len(str(caught.value)) < 300


def test_signs_that_stand_for_themselves_are_no_choices() -> None:
    pattern = r"re:model\.layers\.\d+\.[*+?{(]*\*\+\?\(\{\*\+\?\(\{$"
    assert Schemes(None, {pattern: W4}).of("model.layers.3.*+?({*+?({") == W4
