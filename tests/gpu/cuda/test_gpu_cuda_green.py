"""Green contexts on a GPU: on which multiprocessors kernels run, and that they compute what they do elsewhere."""

import pytest
import torch

from warpbus.cuda.green import GreenContext
from warpbus.cuda.kernel import Unit
from warpbus.errors import DeviceError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GPU = torch.device("cuda", 0)
SOURCE = """
extern "C" __global__ void mark(int* seen) {
    unsigned multiprocessor;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
    atomicAdd(&seen[multiprocessor], 1);
    for (int i = 0; i < 1000; i++) __nanosleep(100);
}
"""


@pytest.fixture
def used(tmp_path, monkeypatch):
    """`used(context)`: the multiprocessors that a kernel with many blocks runs on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mark.cu").write_text(SOURCE)
    mark = Unit(tmp_path / "mark.cu", tmp_path).kernel("mark", "P")

    def run(context):
        with context.running():
            seen = torch.zeros(1024, dtype=torch.int32, device=GPU)
            mark(context.total * 16, 128, seen)
        return set(torch.nonzero(seen).flatten().tolist())

    return run


def test_a_share_is_what_it_says(used):
    total = torch.cuda.get_device_properties(GPU).multi_processor_count
    with GreenContext(GPU, 0.25) as green:
        assert green.total == total
        assert abs(green.multiprocessors / total - 0.25) < 0.05
        assert 0 < len(used(green)) <= green.multiprocessors


def test_two_tenants_have_no_multiprocessor_in_common(used):
    with GreenContext(GPU, 0.25) as small, GreenContext(GPU, 0.5) as large:
        first, second = used(small), used(large)
        assert not first & second
        assert len(first) <= small.multiprocessors < len(second) <= large.multiprocessors
        with pytest.raises(DeviceError, match="close another green context"):
            GreenContext(GPU, 0.5)


def test_what_is_closed_is_free_again(used):
    for _ in range(3):
        with GreenContext(GPU, 1.0) as whole:
            assert len(used(whole)) <= whole.multiprocessors
    whole.close()


def test_torch_computes_as_elsewhere():
    x = torch.randn(512, 512, device=GPU, generator=torch.Generator(GPU).manual_seed(1))
    expected = (x.double() @ x.double()).relu().sum()
    with GreenContext(GPU, 0.1) as green:
        with green.running() as stream:
            assert torch.cuda.current_stream(GPU) == stream
            y = x @ x
            found = (x.double() @ x.double()).relu().sum()
        # No synchronization by hand: what follows waits.
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(y.double(), x.double() @ x.double(), rtol=1e-2, atol=1e-1)


def test_gradients():
    weight = torch.randn(64, 64, device=GPU, requires_grad=True)
    x = torch.randn(64, 64, device=GPU)
    (weight @ x).square().sum().backward()
    expected, weight.grad = weight.grad, None
    with GreenContext(GPU, 0.1) as green, green.running():
        (weight @ x).square().sum().backward()
    torch.testing.assert_close(weight.grad, expected)
