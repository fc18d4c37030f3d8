"""A model sleeps and wakes: on the CPU, through the same class and the same arena as on a GPU."""

import copy

import pytest
import torch
from torch import nn

from warpbus.cuda.vmm import Arena
from warpbus.engine.offload import ALIGNMENT, OffloadableModel, Transfer
from warpbus.errors import DeviceError, UsageError
from warpbus.formats import Checkpoint
from warpbus.kernels.ops.packed import pack
from warpbus.models import load_model
from warpbus.models.layers import QuantizedEmbedding, QuantizedLinear
from warpbus.qtensor import QTensor, Scheme

CPU = torch.device("cpu")
TOKENS = torch.tensor([[5, 9, 2, 77, 31]])


def quantized(linear, scheme, dtype):
    scheme = Scheme.parse(scheme)
    out, columns = linear.weight.shape
    generator = torch.Generator().manual_seed(3)
    scales = torch.rand(out, scheme.groups(columns), generator=generator) / 100
    if scheme.activations is not None:
        values = torch.randint(-127, 128, (out, columns), generator=generator).to(torch.int8)
        return QuantizedLinear(QTensor.from_values(scheme, values, scales), dtype=dtype)
    codes = torch.randint(0, 2**scheme.bits, (out, columns), generator=generator)
    zeros = None if scheme.symmetric else torch.randint(0, 2**scheme.bits, scales.shape, generator=generator)
    return QuantizedLinear(QTensor.from_codes(scheme, codes, scales, zeros), linear.bias, dtype=dtype)


def decoder(directory):
    """A model with matrices of all sorts: dense, packed, with zero points, with values of 8 bits."""
    model = load_model(Checkpoint(directory), device="cpu", dtype=torch.float32)
    first, second = model.layers
    first.mlp.gate_up = quantized(first.mlp.gate_up, "w4a16-g32-asym", torch.float32)
    first.mlp.down = quantized(first.mlp.down, "w8a8-int8", torch.float32)
    second.mlp.gate_up = quantized(second.mlp.gate_up, "w4a16-g32", None)
    return model


def scores(model):
    with torch.no_grad():
        return model(TOKENS)


def named(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.fixture
def model(tiny_model):
    return decoder(tiny_model)


def test_a_decoder_moves_and_remains_what_it_was(model):
    tensors, expected = named(model), scores(model)
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    offloadable = OffloadableModel(model)
    assert torch.equal(scores(model), expected)
    after = named(model)
    assert after.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert after[name] is tensor
        assert tensor.data_ptr() != pointers[name]
        assert tensor.data_ptr() % ALIGNMENT == 0
    layer = model.layers[0].mlp.gate_up
    fields = {id(value) for value in vars(layer.form).values() if isinstance(value, torch.Tensor)}
    assert fields
    assert fields == {id(buffer) for buffer in layer.buffers()} - {id(layer.bias)}
    used = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors.values()}
    assert sum(used.values()) <= offloadable.nbytes <= sum(used.values()) + ALIGNMENT * len(used)


def test_asleep_it_has_no_memory_and_awake_it_is_as_before(model):
    arenas = []

    def make(size, device):
        arenas.append(Arena(size, device))
        return arenas[-1]

    offloadable = OffloadableModel(model, make_arena=make)
    (arena,) = arenas
    expected = scores(model)
    pointers = [tensor.data_ptr() for tensor in named(model).values()]
    for _ in range(3):
        went = offloadable.sleep()
        assert offloadable.asleep
        assert went.nbytes == offloadable.nbytes
        assert went.seconds >= went.copying > 0
        assert arena.mapped == 0
        assert all((tensor == 0).all() for tensor in model.parameters())
        assert offloadable.sleep() == Transfer(0, 0.0, 0.0)
        came = offloadable.wake()
        assert not offloadable.asleep
        assert came.nbytes == offloadable.nbytes
        assert arena.mapped >= offloadable.nbytes
        assert offloadable.wake().nbytes == 0
        assert torch.equal(scores(model), expected)
        assert [tensor.data_ptr() for tensor in named(model).values()] == pointers


def test_what_is_changed_between_two_sleeps_is_kept(model):
    offloadable = OffloadableModel(model)
    offloadable.sleep()
    offloadable.wake()
    with torch.no_grad():
        model.final_norm.weight.fill_(3)
    offloadable.sleep()
    offloadable.wake()
    assert (model.final_norm.weight == 3).all()


def test_a_tied_head_moves_once(make_model, tmp_path):
    directory = make_model(tmp_path / "tied", tie_word_embeddings=True)
    model = load_model(Checkpoint(directory), device="cpu", dtype=torch.float32)
    assert model.head.weight is model.embedding.weight
    expected = scores(model)
    offloadable = OffloadableModel(model)
    assert model.head.weight is model.embedding.weight
    assert offloadable.nbytes < sum(p.nbytes + ALIGNMENT for p in model.parameters())
    offloadable.sleep()
    offloadable.wake()
    assert torch.equal(scores(model), expected)


def test_packed_forms_of_gpu_kernels_stay_whole():
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (80, 128), generator=generator)
    scheme = Scheme.parse("w4a16-g64-asym")
    scales, zeros = torch.rand(80, 2, generator=generator), torch.randint(0, 16, (80, 2), generator=generator)
    packed = pack(QTensor.from_codes(scheme, codes, scales, zeros), torch.float16)
    layer = QuantizedLinear(packed)
    offloadable = OffloadableModel(layer)
    assert layer.form is packed
    assert layer.codes is packed.codes
    assert layer.zeros is packed.zeros
    offloadable.sleep()
    assert packed.codes.count_nonzero() == 0
    offloadable.wake()
    assert torch.equal(layer.weight.codes(), codes.to(layer.weight.codes().dtype))


def test_a_head_that_shares_a_packed_embedding_moves_once():
    scheme = Scheme.parse("w8a16-g32")
    codes, scales = torch.arange(48 * 64).view(48, 64) % 256, torch.rand(48, 2) + 0.5
    packed = pack(QTensor.from_codes(scheme, codes, scales), torch.float16)
    model = nn.ModuleDict(
        {"embedding": QuantizedEmbedding(packed, dtype=torch.float16), "head": QuantizedLinear(packed)}
    )
    tokens = torch.tensor([[0, 47, 3]])
    expected = model["embedding"](tokens)
    offloadable = OffloadableModel(model)
    assert model["embedding"].form is model["head"].form is packed
    assert offloadable.nbytes < packed.nbytes + 3 * ALIGNMENT
    offloadable.sleep()
    offloadable.wake()
    assert torch.equal(model["embedding"](tokens), expected)
    assert torch.equal(model["head"].weight.codes(), codes.to(torch.uint8))


class Shared(nn.Module):
    """Tensors that share memory in part, one of them not contiguous; one made in inference mode; one of no bytes."""

    def __init__(self):
        super().__init__()
        memory = torch.arange(4000, dtype=torch.float32)
        self.register_buffer("left", memory[130:200])
        self.register_buffer("right", memory[190:310].view(10, 12).t())
        self.register_buffer("empty", torch.empty(0))
        with torch.inference_mode():
            self.register_buffer("still", torch.arange(30, dtype=torch.bfloat16))


def test_tensors_that_share_memory_go_on_sharing_it():
    model = Shared()
    expected = copy.deepcopy(dict(model.named_buffers()))
    offloadable = OffloadableModel(model)
    offloadable.sleep()
    offloadable.wake()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name])
        assert buffer.stride() == expected[name].stride()
    model.left[-1] = -1
    assert model.right[9, 0] == -1
    assert offloadable.nbytes == 768 + 256  # the bytes 512 to 1240 of what is shared, and the 60 that are not


class Full:
    """An arena of a device whose memory another process has taken, as long as `full` is set."""

    def __init__(self, size, device):
        self.arena = Arena(size, device)
        self.tensor = self.arena.tensor
        self.full = False

    def resize(self, size):
        if self.full and size > self.arena.mapped:
            raise DeviceError(f"cpu: {size:,} bytes more were asked for, 0 are free")
        self.arena.resize(size)


def test_a_wake_that_fails_leaves_it_asleep_and_can_be_tried_again(model):
    made = []

    def make(size, device):
        made.append(Full(size, device))
        return made[-1]

    offloadable = OffloadableModel(model, make_arena=make)
    expected = scores(model)
    offloadable.sleep()
    made[0].full = True
    for _ in range(2):
        with pytest.raises(DeviceError, match="0 are free"):
            offloadable.wake()
        assert offloadable.asleep
    made[0].full = False
    offloadable.wake()
    assert torch.equal(scores(model), expected)


def test_a_model_that_cannot_move_can_be_used(model):
    expected = scores(model)

    def make(size, device):
        full = Full(size, device)
        full.full = True
        return full

    with pytest.raises(DeviceError, match="0 are free"):
        OffloadableModel(model, make_arena=make)
    assert torch.equal(scores(model), expected)


def test_a_model_without_tensors():
    with pytest.raises(UsageError, match="without tensors"):
        OffloadableModel(nn.ReLU())
