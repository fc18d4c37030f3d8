"""Green contexts on a GPU: on which multiprocessors kernels run, and that they compute what they do elsewhere."""

import pytest
import torch

from warpbus.cuda.capture import GraphMemory, capture
from warpbus.cuda.graphs import Replayed
from warpbus.cuda.green import GreenContext, multiprocessors
from warpbus.cuda.kernel import Unit
from warpbus.cuda.parameters import Parameters
from warpbus.errors import DeviceError
from warpbus.kernels.ops.attention import decode_attention
from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.wna16 import wna16_linear
from warpbus.qtensor import QTensor, Scheme

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
    mark = Unit(tmp_path / "mark.cu", tmp_path).kernel("mark", Parameters("int* seen"))

    def run(context):
        with context.running():
            seen = torch.zeros(1024, dtype=torch.int32, device=GPU)
            mark(context.total * 16, 128, seen=seen)
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


@pytest.mark.parametrize("rows", [1, 16, 200, 4096])
def test_blocks_that_wait_for_each_other_have_room(rows):
    """Our products share tiles among blocks, by as many as run at the same time: here fewer than on the whole GPU."""
    n, k = 4608, 4096
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=GPU)
    scales = torch.full((n, k // 128), k**-0.5 / 4, device=GPU).half()
    weight = pack(QTensor.from_codes(Scheme.parse("w4a16-g128"), codes, scales, None), torch.float16)
    x = torch.randn(rows, k, device=GPU).half()
    expected = wna16_linear(x, weight)
    with GreenContext(GPU, 0.01) as green, green.running():
        assert multiprocessors(GPU) == green.multiprocessors < green.total
        found = wna16_linear(x, weight)
    assert multiprocessors(GPU) == green.total
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("context", [300, 4000])
def test_attention_waits_for_no_block_without_room(context):
    kv_heads, heads, size = 2, 32, 128
    qkv = torch.randn(2, (heads + 2 * kv_heads) * size, device=GPU).half()
    cache = torch.randn(2, 2 * (context // 32 + 1), kv_heads, 32, size, device=GPU).half()
    table = torch.ones(context + 1, 64, device=GPU)
    positions = torch.full((2,), context, dtype=torch.int32, device=GPU)
    blocks = torch.arange(cache.shape[1], dtype=torch.int32, device=GPU).view(2, -1)

    def attended():
        shape = {"heads": heads, "interleaved": True, "limit": context + 1}
        return decode_attention(qkv, table, positions, blocks, cache[0], cache[1], **shape)

    expected = attended()
    with GreenContext(GPU, 0.01) as green, green.running():
        found = attended()
    assert torch.equal(found, expected)


def test_a_graph_that_is_captured_here_stays_here(tmp_path, monkeypatch):
    """Wherever it is replayed; and what is captured elsewhere stays elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mark.cu").write_text(SOURCE)
    mark = Unit(tmp_path / "mark.cu", tmp_path).kernel("mark", Parameters("int* seen"))
    seen = torch.zeros(1024, dtype=torch.int32, device=GPU)
    counted = []

    def captured(blocks):
        memory = GraphMemory(GPU)
        with capture(memory) as graph:  # the kernel is loaded meanwhile
            counted.append(multiprocessors(GPU))
            mark(blocks, 128, seen=seen)
        return graph

    def used(graph):
        seen.zero_()
        graph.replay()
        return set(torch.nonzero(seen).flatten().tolist())

    total = torch.cuda.get_device_properties(GPU).multi_processor_count
    with GreenContext(GPU, 0.25) as green:
        with green.running():
            inside = captured(16 * total)
            within = used(inside)
        outside = captured(16 * total)
        assert counted == [green.multiprocessors, total]
        assert 0 < len(within) <= green.multiprocessors
        assert used(inside) == within
        assert len(used(outside)) > green.multiprocessors
        torch.cuda.synchronize(GPU)
        del inside


def test_calls_that_become_graphs_have_one_in_each_context():
    run, x = Replayed(), torch.randn(64, 64, device=GPU)

    def doubled(x):
        seen.append(multiprocessors(GPU))
        return (2 * x,)

    seen = []
    with GreenContext(GPU, 0.25) as green:
        for _ in range(3):
            assert torch.equal(run(doubled, x)[0], 2 * x)
            with green.running():
                found = run(doubled, x)[0].clone()
            assert torch.equal(found, 2 * x)
        assert sorted(seen) == sorted([green.multiprocessors, green.total] * 2)  # an ordinary call and a capture each
        torch.cuda.synchronize(GPU)
        del run
