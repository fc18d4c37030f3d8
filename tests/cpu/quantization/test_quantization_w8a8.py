"""Weights rounded to int8 and fp8, a scale a row."""

import pytest
import torch

from warpbus.errors import NumericError
from warpbus.kernels.reference import grid as grids
from warpbus.qtensor import Scheme
from warpbus.quantization.algorithms import rtn

INT8, FP8 = Scheme.parse("w8a8-int8"), Scheme.parse("w8a8-fp8")


def test_by_hand():
    weight = torch.tensor([[127.0, -63.5, 0.4, 0.6], [0.0, -2.54, 0.03, 1.27]])
    matrix = rtn(weight, INT8, scale_dtype=torch.float32)
    assert torch.allclose(matrix.scales, torch.tensor([[1.0], [0.02]]))
    assert matrix.qweight.tolist() == [[127, -64, 0, 1], [0, -127, 2, 64]]  # halves to even, as torch rounds
    weight = torch.tensor([[448.0, -17.0, 0.03], [0.0, -4.48, 1.0]])
    matrix = rtn(weight, FP8, scale_dtype=torch.float32)
    assert torch.allclose(matrix.scales, torch.tensor([[1.0], [0.01]]))
    # e4m3 has 3 bits after the leading one: 16 and 18 lie next to 17, 96 and 104 next to 100.
    assert matrix.qweight[0].float().tolist() == [448.0, -16.0, 0.029296875]
    assert matrix.qweight[1].float().tolist() == [0.0, -448.0, 96.0]


@pytest.mark.parametrize(("scheme", "bound"), [(INT8, 0.5 / 127), (FP8, 1 / 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_weight_is_near(scheme, bound, dtype):
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    matrix = rtn(weight, scheme, scale_dtype=dtype)
    assert matrix.scheme == scheme
    assert matrix.scales.dtype == dtype
    change = (matrix.dequantize(torch.float32) - weight.float()).abs()
    largest = weight.float().abs().amax(1, keepdim=True)
    of_what = largest if scheme == INT8 else weight.float().abs() + largest / 448 / 2**6
    # The largest weight of a row is cut off where its scale was rounded down.
    assert (change <= bound * of_what + largest * torch.finfo(dtype).eps).all()
    assert (matrix.qweight.float().abs() <= (127 if scheme == INT8 else 448)).all()


@pytest.mark.parametrize("scheme", [INT8, FP8])
def test_rows_do_not_depend_on_each_other(scheme, monkeypatch):
    weight = torch.randn(13, 64, generator=torch.Generator().manual_seed(1))
    whole = rtn(weight, scheme, scale_dtype=torch.float16)
    monkeypatch.setitem(grids.SLICE_WEIGHTS, "cpu", 5 * 64)
    sliced = rtn(weight, scheme, scale_dtype=torch.float16)
    assert torch.equal(whole.qweight.view(torch.uint8), sliced.qweight.view(torch.uint8))
    assert torch.equal(whole.scales, sliced.scales)
    scaled = rtn(8 * weight, scheme, scale_dtype=torch.float16)
    assert torch.equal(whole.qweight.view(torch.uint8), scaled.qweight.view(torch.uint8))


@pytest.mark.parametrize("scheme", [INT8, FP8])
def test_zero_rows(scheme):
    weight = torch.tensor([[0.0, 0.0], [1e-9, -1e-9], [1.0, 2.0]])
    matrix = rtn(weight, scheme, scale_dtype=torch.float16)
    assert matrix.scales[:2].tolist() == [[1.0], [1.0]]
    assert (matrix.dequantize()[:2] == 0).all()


def test_what_cannot_be_rounded_is_refused():
    weight = torch.ones(4, 32)
    with pytest.raises(NumericError, match=r"^q: its weights are too large"):
        rtn(weight * 1e8, INT8, scale_dtype=torch.float16, name="q")
    weight[2, 3] = float("nan")
    with pytest.raises(NumericError, match=r"^q: NaN or infinity among its weights"):
        rtn(weight, FP8, scale_dtype=torch.float16, name="q")
