"""The ladder on the CPU: every rung gives the reference, after the checks that a GPU would ask for."""

import pytest
import torch
from torch.library import opcheck

from warpbus.cuda import jit
from warpbus.errors import DeviceError, TensorError, UsageError
from warpbus.kernels.ops import ladder
from warpbus.kernels.ops.ladder import GEMV_RUNGS, MATMUL_RUNGS, gemv, linear_sigmoid, matmul

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(out, expected):
    return ((out.double() - expected).norm() / expected.norm()).item()


def bound(dtype, k):
    """Rounding the result once, and the errors of k additions in float32, which mostly cancel."""
    return torch.finfo(dtype).eps / 2 + 2 * k**0.5 * 2**-24


@pytest.mark.parametrize("rung", MATMUL_RUNGS)
def test_matmul(rung):
    for dtype in MATMUL_RUNGS[rung].dtypes:
        a, b = random(37, 65, dtype=dtype), random(65, 19, dtype=dtype, seed=1)
        out = matmul(a, b, rung)
        assert out.dtype == dtype
        assert out.is_contiguous()
        assert error(out, a.double() @ b.double()) < bound(dtype, 65)


@pytest.mark.parametrize("rung", GEMV_RUNGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gemv(rung, dtype):
    w, x = random(37, 65, dtype=dtype), random(65, dtype=dtype, seed=1)
    out = gemv(w, x, rung)
    assert out.dtype == dtype
    assert error(out, w.double() @ x.double()) < bound(dtype, 65)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [(), (1,), (7,), (2, 3)])
def test_linear_sigmoid(dtype, batch):
    x, weight, bias = (
        random(*batch, 33, dtype=dtype),
        random(9, 33, dtype=dtype, seed=1),
        random(9, dtype=dtype, seed=2),
    )
    out = linear_sigmoid(x, weight, bias)
    assert out.shape == (*batch, 9)
    assert error(out, torch.sigmoid(x.double() @ weight.double().T + bias.double())) < bound(dtype, 33)


def test_half_is_summed_in_float32():
    a = torch.cat([torch.full((1, 1), 2048.0), torch.ones(1, 4096)], dim=1).half()
    assert matmul(a, torch.ones(4097, 1).half(), "naive").item() == 6144
    assert gemv(a, torch.ones(4097).half(), "thread").item() == 6144


def test_transposed_and_offset_operands():
    a, b = random(9, 7).t(), random(5, 10)[:, 1:].t()
    assert error(matmul(a, b, "tiled"), a.double() @ b.double()) < bound(torch.float32, 9)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 2), (3, 0, 2), (3, 2, 0)])
def test_empty(m, n, k):
    assert torch.equal(matmul(torch.ones(m, k), torch.ones(k, n), "tiled"), torch.zeros(m, n))
    assert torch.equal(gemv(torch.ones(n, k), torch.ones(k), "warp"), torch.full((n,), float(k)))


def test_every_rung_says_what_it_is():
    for name, rung in {**MATMUL_RUNGS, **GEMV_RUNGS}.items():
        assert rung.name == name
        assert rung.needs in jit.ARCHITECTURES


def test_what_products_refuse():
    a, b = random(3, 4), random(4, 5)
    with pytest.raises(
        UsageError, match=r"ladder\.matmul: rung is 'fastest': give one of naive, tiled, wmma, mma_naive"
    ):
        matmul(a, b, "fastest")
    with pytest.raises(
        UsageError, match=r"ladder\.gemv: rung is 'naive': give one of thread, warp, vectorised, split_k"
    ):
        gemv(a, a[0], "naive")
    with pytest.raises(TensorError, match=r"ladder\.matmul wmma: a is float32, expected float16, bfloat16: convert"):
        matmul(a, b, "wmma")
    with pytest.raises(
        TensorError, match=r"b has shape \[3, 4\], expected \[4, 4\]: a has 4 columns, and b needs as many"
    ):
        matmul(a, a, "naive")
    with pytest.raises(TensorError, match=r"ladder\.matmul naive: b has shape \[4\], expected a matrix"):
        matmul(a, b[:, 0], "naive")
    with pytest.raises(TensorError, match=r"ladder\.gemv warp: x has shape \[3\], expected \[4\]: w has 4 columns"):
        gemv(a, a[:, 0], "warp")
    with pytest.raises(TensorError, match=r"linear_sigmoid: x has shape \[5, 3\], expected \[5, 4\]"):
        linear_sigmoid(random(5, 3), a, random(3))
    with pytest.raises(TensorError, match=r"linear_sigmoid: bias has shape \[4\], expected \[3\]"):
        linear_sigmoid(random(5, 4), a, random(4))


@pytest.mark.parametrize(
    ("rung", "here", "fits"),
    [
        ("naive", "sm_80", True),
        ("naive", "sm_120a", True),
        ("mma_swizzle", "sm_75", False),
        ("wgmma", "sm_90a", True),
        ("wgmma", "sm_89", False),
        ("wgmma_persistent", "sm_100a", False),
    ],
)
def test_rungs_name_the_gpu_that_they_need(monkeypatch, rung, here, fits):
    monkeypatch.setattr(ladder, "architecture", lambda device: here)
    chosen, device = MATMUL_RUNGS[rung], torch.device("cuda", 0)
    if fits:
        ladder.check_architecture("ladder.matmul", chosen, device)
    else:
        with pytest.raises(DeviceError, match=f"rung {rung} needs {chosen.needs}, cuda:0 is {here}: choose another"):
            ladder.check_architecture("ladder.matmul", chosen, device)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ladder_matmul", (random(3, 4), random(4, 5), "naive")),
        ("ladder_matmul", (random(4, 3).t(), random(5, 4).t(), "tiled")),
        ("ladder_gemv", (random(3, 4), random(4), "split_k")),
        ("linear_sigmoid", (random(2, 3, 4), random(5, 4), random(5))),
    ],
)
def test_registered_as_torch_wants(name, arguments):
    checked = opcheck(getattr(torch.ops.warpbus, name).default, arguments)
    assert set(checked.values()) == {"SUCCESS"}
