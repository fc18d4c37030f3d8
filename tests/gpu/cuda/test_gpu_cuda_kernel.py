"""Launches on a GPU: errors that say which limit was broken, threads, devices, the time of a first call."""

import threading

import pytest
import torch

from warpbus.cuda.kernel import Kernel, Unit
from warpbus.cuda.parameters import Parameters
from warpbus.cuda.tensor_map import tensor_map
from warpbus.errors import DeviceError, TensorError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SOURCE = """
extern "C" __global__ void fill(float* out, int size, float value, long long offset) {
    extern __shared__ float staged[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    staged[threadIdx.x] = value + offset;
    if (i < size) out[i] = staged[threadIdx.x];
}
"""


@pytest.fixture
def fill(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "fill.cu").write_text(SOURCE)
    return Unit(tmp_path / "fill.cu", tmp_path).kernel(
        "fill", Parameters("float* out, int size, float value, long long offset")
    )


def test_arguments_arrive(fill):
    out = torch.full((1000,), float("nan"), device="cuda")
    fill(4, 256, out=out, size=1000, value=0.5, offset=2**24, shared=1024)
    assert (out == 2**24 + 0.5).all()


def test_more_shared_memory_than_48_kb(fill):
    out = torch.zeros(10, device="cuda")
    fill(1, 256, out=out, size=10, value=1.0, offset=0, shared=90 * 1024)
    assert (out == 1).all()


@pytest.mark.parametrize(
    ("grid", "block", "shared", "message"),
    [
        (1, 2048, 0, r"a block has 2048 threads, GPU 0 allows 1024"),
        (1, (1, 1, 128), 0, r"at most \[1024, 1024, 64\] a side"),
        ((1, 100_000), 32, 0, r"allows a grid of at most \[2147483647, 65535, 65535\]"),
        (0, 32, 0, "has to be at least 1"),
        (1, 32, 10**6, r"needs 1000000 bytes of shared memory a block, GPU 0 has \d+"),
    ],
)
def test_launches_that_break_a_limit(fill, grid, block, shared, message):
    out = torch.zeros(10, device="cuda")
    with pytest.raises(DeviceError, match=message):
        fill(grid, block, out=out, size=10, value=1.0, offset=0, shared=shared)
    fill(1, 32, out=out, size=10, value=3.0, offset=0, shared=128)
    assert (out == 3).all()


def test_in_a_thread_that_has_not_used_cuda(fill):
    out = torch.zeros(10, device="cuda")
    failed = []

    def run():
        try:
            fill(1, 32, out=out, size=10, value=7.0, offset=0, shared=128)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failed
    assert (out == 7).all()


def test_missing_kernel(fill):
    with pytest.raises(DeviceError, match=r"fill\.cu: kernel empty: CUDA_ERROR_NOT_FOUND"):
        fill.unit.kernel("empty", Parameters("float* out"))(1, 1, out=torch.zeros(1, device="cuda"))


def test_other_parameters_than_the_compiled_kernel_has(fill):
    other = Parameters("float* out, int size, float value, int offset")
    kernel = Kernel(fill.unit, "fill", other)
    with pytest.raises(DeviceError, match=r"fill: the declared parameters lie at .* compiled kernel reads them at"):
        kernel(1, 32, out=torch.zeros(10, device="cuda"), size=10, value=1.0, offset=0, shared=128)


def test_tensor_map_of_unaligned_rows():
    matrix = torch.zeros(8, 9, device="cuda", dtype=torch.float16)
    with pytest.raises(TensorError, match="aligned to 16 bytes"):
        tensor_map(matrix, 8, 64)
