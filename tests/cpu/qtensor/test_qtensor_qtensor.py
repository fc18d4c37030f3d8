"""`QTensor`: against plain arithmetic on floats."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from warpbus.errors import SchemeError, TensorError
from warpbus.qtensor import QTensor, Scheme

schemes = st.builds(Scheme, st.sampled_from((2, 3, 4, 8)), st.sampled_from((None, 32, 64)), st.booleans())


def random_parts(scheme: Scheme, out: int, columns: int, seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    groups = scheme.groups(columns)
    codes = torch.randint(0, scheme.max_code + 1, (out, columns), generator=generator)
    scales = torch.rand(out, groups, generator=generator) * 0.1 - 0.02
    zeros = None if scheme.symmetric else torch.randint(0, scheme.max_code + 1, (out, groups), generator=generator)
    return codes, scales, zeros


def random_qtensor(text: str, out: int = 6, columns: int = 64, seed: int = 0) -> QTensor:
    scheme = Scheme.parse(text)
    return QTensor.from_codes(scheme, *random_parts(scheme, out, columns, seed))


@settings(deadline=None, max_examples=60)
@given(schemes, st.integers(1, 7), st.integers(1, 3), st.sampled_from((torch.float32, torch.float16, torch.bfloat16)))
def test_dequantize_is_plain_arithmetic(scheme: Scheme, out: int, multiple: int, dtype: torch.dtype) -> None:
    columns = multiple * (scheme.group_size or 11)
    codes, scales, zeros = random_parts(scheme, out, columns, seed=out * 10 + multiple)
    weight = QTensor.from_codes(scheme, codes, scales.to(dtype), zeros)
    found = weight.dequantize()
    assert found.dtype == dtype
    width = columns // scales.shape[1]
    for row in range(out):
        for column in range(columns):
            zero = scheme.middle_code if zeros is None else int(zeros[row, column // width])
            # Both factors are exact in float64: rounding once to `dtype` is what one multiplication in it does.
            exact = (int(codes[row, column]) - zero) * float(weight.scales[row, column // width])
            assert found[row, column] == torch.tensor(exact, dtype=torch.float64).to(dtype)


@settings(deadline=None, max_examples=40)
@given(schemes, st.integers(1, 9), st.integers(1, 3), st.integers(0, 1000))
def test_codes_come_back(scheme: Scheme, out: int, multiple: int, seed: int) -> None:
    codes, scales, zeros = random_parts(scheme, out, multiple * (scheme.group_size or 13), seed)
    weight = QTensor.from_codes(scheme, codes, scales, zeros)
    assert torch.equal(weight.codes(), codes.to(torch.uint8))
    assert weight.shape == codes.shape


def test_dequantize_rounds_scales_to_the_asked_dtype_first() -> None:
    weight = random_qtensor("w4a16-g32")
    half = dataclasses.replace(weight, scales=weight.scales.half())
    assert torch.equal(weight.dequantize(torch.float16), half.dequantize())


def test_nbytes_counts_codes_scales_and_zeros() -> None:
    assert random_qtensor("w4a16-g32", out=6, columns=64).nbytes == 6 * 32 + 6 * 2 * 4
    assert random_qtensor("w3a16-asym", out=6, columns=64).nbytes == 6 * 24 + 6 * 4 + 6


@pytest.mark.parametrize("text", ["w4a16-g32", "w3a16-g32-asym"])
def test_concatenate_and_rows_are_those_of_the_weights(text: str) -> None:
    parts = [random_qtensor(text, out, seed=out) for out in (2, 5, 1)]
    whole = QTensor.concatenate(parts)
    assert whole.shape == (8, 64)
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert torch.equal(whole.rows(2, 7).dequantize(), parts[1].dequantize())
    assert whole.rows(2, 7).qweight.untyped_storage().data_ptr() == whole.qweight.untyped_storage().data_ptr()


def test_concatenate_refuses_mixed_schemes_and_widths() -> None:
    for other in (random_qtensor("w4a16-g64"), random_qtensor("w4a16-g32", columns=96)):
        with pytest.raises(TensorError, match=r"one scheme and width .*w4a16-g32 \(6, 64\)"):
            QTensor.concatenate([random_qtensor("w4a16-g32"), other])


def test_to_moves_every_part() -> None:
    moved = random_qtensor("w4a16-g32-asym").to("meta")
    assert moved.zeros is not None
    assert {moved.device.type, moved.scales.device.type, moved.zeros.device.type} == {"meta"}


def test_parts_that_do_not_fit_are_named() -> None:
    weight = random_qtensor("w4a16-g32-asym")
    assert weight.zeros is not None
    symmetric = Scheme(4, 32)
    wrong = {
        r"qweight: expected shape \[6, 8\], found \[6, 7\]": {"qweight": weight.qweight[:, :7]},
        "qweight: expected torch.int32, found torch.int64": {"qweight": weight.qweight.long()},
        r"scales: expected shape \[6, 2\], found \[6, 1\]": {"scales": weight.scales[:, :1]},
        "scales: expected a floating-point type, found torch.int32": {"scales": weight.scales.int()},
        r"zeros: expected shape \[6, 2\], found \[5, 2\]": {"zeros": weight.zeros[:5]},
        "zeros: expected torch.uint8, found torch.int32": {"zeros": weight.zeros.int()},
        "zeros: scheme w4a16-g32-asym needs them": {"zeros": None},
        "zeros: scheme w4a16-g32 needs none": {"scheme": symmetric},
    }
    for message, change in wrong.items():
        with pytest.raises(TensorError, match=message):
            dataclasses.replace(weight, **change)


def test_a_group_size_that_does_not_divide_is_a_scheme_error() -> None:
    with pytest.raises(SchemeError, match="50 columns cannot be cut into groups of 32"):
        QTensor.from_codes(Scheme(4, 32), torch.zeros(2, 50), torch.ones(2, 2))


def random_values(text: str, out: int = 6, columns: int = 10, seed: int = 0) -> QTensor:
    generator = torch.Generator().manual_seed(seed)
    scheme = Scheme.parse(text)
    values = torch.randint(-127, 128, (out, columns), generator=generator).to(scheme.dtype)
    return QTensor.from_values(scheme, values, torch.rand(out, generator=generator) + 0.01)


W8A8 = ("w8a8-int8", "w8a8-fp8")


@pytest.mark.parametrize("text", W8A8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_multiplied_by_the_scale_of_their_row(text: str, dtype: torch.dtype) -> None:
    weight = random_values(text)
    assert weight.scales.shape == (6, 1)
    assert weight.nbytes == 6 * 10 + 6 * 4
    found = weight.dequantize(dtype)
    for row in range(6):
        for column in range(10):
            exact = float(weight.qweight[row, column]) * float(weight.scales[row, 0].to(dtype))
            assert found[row, column] == torch.tensor(exact, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("text", W8A8)
def test_values_are_cut_stacked_and_moved(text: str) -> None:
    parts = [random_values(text, out, seed=out) for out in (2, 5, 1)]
    whole = QTensor.concatenate(parts)
    assert whole.shape == (8, 10)
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert torch.equal(whole.rows(2, 7).dequantize(), parts[1].dequantize())
    assert whole.to("meta").qweight.dtype == whole.scheme.dtype


def test_codes_of_int8_are_values_above_the_least() -> None:
    scheme = Scheme.parse("w8a8-int8")
    codes = torch.tensor([[0, 1, 128, 255]], dtype=torch.uint8)
    weight = QTensor.from_codes(scheme, codes, torch.ones(1, 1))
    assert weight.qweight.tolist() == [[-128, -127, 0, 127]]
    assert torch.equal(weight.codes(), codes)


def test_fp8_has_no_codes_and_packed_schemes_no_values() -> None:
    weight = random_values("w8a8-fp8")
    with pytest.raises(SchemeError, match="w8a8-fp8: its weights are floating-point values"):
        weight.codes()
    with pytest.raises(SchemeError, match="w8a8-fp8: its weights are floating-point values"):
        QTensor.from_codes(weight.scheme, torch.zeros(2, 4), torch.ones(2, 1))
    with pytest.raises(SchemeError, match=r"w8a8, not w4a16-g32: use from_codes"):
        QTensor.from_values(Scheme(4, 32), torch.zeros(2, 32, dtype=torch.int8), torch.ones(2))
    with pytest.raises(TensorError, match=r"qweight: expected torch\.float8_e4m3fn, found torch\.int8"):
        QTensor.from_values(weight.scheme, torch.zeros(2, 4, dtype=torch.int8), torch.ones(2))


@pytest.mark.parametrize(
    "text", ["w4a16-g32", "w3a16-g64-asym", "w2a16-asym", "w3a16", "w8a16-g128", "w8a8-int8", "w8a8-fp8"]
)
def test_columns_and_smaller_groups_are_those_of_the_weights(text: str) -> None:
    whole = random_values(text, columns=256) if "w8a8" in text else random_qtensor(text, columns=256)
    weights = whole.dequantize(torch.float32)
    size = whole.scheme.group_size
    for start, stop in ((0, 128), (128, 256), (0, 256)):
        assert torch.equal(whole.columns(start, stop).dequantize(torch.float32), weights[:, start:stop])
    parts = [whole.columns(0, 128), whole.columns(128, 256)]
    assert torch.equal(QTensor.side_by_side(parts).dequantize(torch.float32), weights)
    if size is None:  # anywhere
        odd = [whole.columns(0, 37), whole.columns(37, 256)]
        assert torch.equal(odd[1].dequantize(torch.float32), weights[:, 37:])
        assert torch.equal(QTensor.side_by_side(odd).dequantize(torch.float32), weights)
    if not whole.holds_values:
        finer = whole.regrouped(32)
        assert finer.scheme.group_size == 32
        assert torch.equal(finer.dequantize(torch.float32), weights)
        assert torch.equal(finer.columns(96, 160).dequantize(torch.float32), weights[:, 96:160])


def test_columns_that_cut_a_group_and_parts_that_do_not_fit_are_refused() -> None:
    whole = random_qtensor("w4a16-g64", columns=128)
    with pytest.raises(SchemeError, match="columns 32 to 63 of a matrix of scheme w4a16-g64: expected whole"):
        whole.columns(32, 64)
    with pytest.raises(SchemeError, match="groups of 64 columns cannot be cut into groups of 128"):
        whole.regrouped(128)
    with pytest.raises(TensorError, match="only matrices of one scheme and height"):
        QTensor.side_by_side([whole, random_qtensor("w4a16-g32", columns=128)])
