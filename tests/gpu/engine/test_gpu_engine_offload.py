"""A quantized model on a GPU sleeps and wakes: every byte, every pointer, captured graphs, the driver's account."""

import gc

import pytest
import torch
from dense_configs import with_traits

from warpbus.cuda.vmm import Arena, mapped_bytes
from warpbus.engine.offload import ALIGNMENT, OffloadableModel
from warpbus.errors import DeviceError
from warpbus.models import SHAPES, random_model
from warpbus.qtensor import Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GPU = torch.device("cuda", 0)
MiB = 2**20
SLACK = 32 * MiB
W4 = Scheme.parse("w4a16-g128")
MIDDLE = with_traits(SHAPES["chatglm2-6b"], num_layers=4)


def used():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(GPU)
    return total - free


def named(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def scores(model):
    return model(torch.arange(100, 164, device=GPU)[None])


def close(found, expected):
    """The weights are compared bit by bit; a product may be summed in another order."""
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@pytest.fixture
def model():
    return random_model(MIDDLE, W4, GPU, torch.float16)


def test_moving_takes_little_more_than_a_tensor(model):
    tensors = named(model)
    expected, clones = scores(model), {name: tensor.cpu() for name, tensor in tensors.items()}
    largest = max(tensor.nbytes for tensor in tensors.values())
    before = used()
    highest = [0]

    class Watched(Arena):
        def resize(self, size):
            super().resize(size)
            free, total = torch.cuda.mem_get_info(GPU)
            highest[0] = max(highest[0], total - free)

    offloadable = OffloadableModel(model, make_arena=Watched)
    assert highest[0] - before <= largest + 256 * MiB
    assert abs(used() - before) <= SLACK + 64 * MiB
    after = named(model)
    for name, tensor in tensors.items():
        assert after[name] is tensor
        assert tensor.device == GPU
        assert tensor.data_ptr() % ALIGNMENT == 0
        assert torch.equal(tensor.cpu(), clones[name])
    linear = model.layers[0].mlp.gate_up
    assert linear.form.codes is linear.codes
    assert linear.form.scales is linear.scales
    close(scores(model), expected)
    assert offloadable.nbytes >= sum(tensor.nbytes for tensor in tensors.values())


def test_asleep_the_drivers_memory_is_free_and_awake_graphs_go_on(model):
    offloadable = OffloadableModel(model)
    layer = model.layers[1]
    x = torch.randn(1, 1, MIDDLE.hidden_size, device=GPU, dtype=torch.float16)

    @torch.no_grad()
    def work():
        return model.scores(layer.leave("mlp", x, layer.enter("mlp.inner", x, 0, None, None, None))[:, 0])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = work()
    graph.replay()
    expected, eager = result.clone(), scores(model)
    assert expected.isfinite().all()
    tensors = named(model)
    clones = {name: tensor.cpu() for name, tensor in tensors.items()}
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    awake, ours = used(), mapped_bytes(GPU)
    for _ in range(3):
        went = offloadable.sleep()
        assert went.nbytes == offloadable.nbytes
        asleep = used()
        assert abs(awake - asleep - (ours - mapped_bytes(GPU))) <= SLACK
        assert ours - mapped_bytes(GPU) >= offloadable.nbytes
        other = torch.full((offloadable.nbytes // 4,), 0x7FC00000, dtype=torch.int32, device=GPU)  # NaN, where it was
        torch.cuda.synchronize()
        del other
        torch.cuda.empty_cache()
        came = offloadable.wake()
        assert came.nbytes == offloadable.nbytes
        print(f"sleep {went.nbytes / went.seconds / 1e9:.1f} GB/s, wake {came.nbytes / came.seconds / 1e9:.1f} GB/s")
        result.zero_()
        graph.replay()
        assert torch.equal(result, expected)
        close(scores(model), eager)
        for name, tensor in named(model).items():
            assert tensor.data_ptr() == pointers[name]
            assert torch.equal(tensor.cpu(), clones[name])


def test_a_wake_without_memory_can_be_tried_again(model):
    offloadable = OffloadableModel(model)
    expected = scores(model)
    offloadable.sleep()
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(GPU)[0]
    neighbour = Arena(free, GPU)
    neighbour.resize(free - offloadable.nbytes // 2)
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"cuda:0: [0-9,]+ bytes more were asked for, [0-9,]+ are free"):
            offloadable.wake()
        assert offloadable.asleep
    neighbour.close()
    offloadable.wake()
    assert not offloadable.asleep
    close(scores(model), expected)


def test_a_tied_head_moves_once():
    tied = random_model(with_traits(MIDDLE, num_layers=1, tie_embeddings=True), W4, GPU, torch.float16)
    assert tied.head.weight is tied.embedding.weight
    offloadable = OffloadableModel(tied)
    assert tied.head.weight is tied.embedding.weight
    assert offloadable.nbytes < sum(tensor.nbytes + ALIGNMENT for tensor in named(tied).values())


def test_an_embedding_on_the_cpu_stays_there():
    model = random_model(with_traits(MIDDLE, num_layers=1), W4, GPU, torch.float16, embedding_device="cpu")
    place = model.embedding.weight.data_ptr()
    expected = scores(model)
    offloadable = OffloadableModel(model)
    offloadable.sleep()
    assert model.embedding.weight.data_ptr() == place
    offloadable.wake()
    close(scores(model), expected)
    assert offloadable.device == GPU


def test_a_hundred_sleeps_leak_nothing():
    model = random_model(with_traits(MIDDLE, num_layers=1, vocab_size=1024), W4, GPU, torch.float16)
    offloadable = OffloadableModel(model)
    offloadable.sleep()
    offloadable.wake()
    before = used()
    for _ in range(100):
        offloadable.sleep()
        offloadable.wake()
    assert abs(used() - before) <= SLACK
    offloadable.sleep()
    assert offloadable.asleep
