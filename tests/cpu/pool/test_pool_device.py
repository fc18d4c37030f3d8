"""`warpbus:0` against the CPU: operators, views, gradients, reading, saving, memory, errors."""

import copy
import gc
import io
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from pool_direct import connected
from pool_training import MODELS, Training, assert_equal_weights
from torch import Tensor

import warpbus
from warpbus.errors import DeviceError
from warpbus.pool.client.session import Session
from warpbus.pool.tenant.execution import Executor

REMOTE = "warpbus"


@pytest.fixture
def both() -> Iterator[tuple[Session, Executor]]:
    with connected() as found:
        yield found


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...] | list[Tensor]]] = {
    "arithmetic": lambda a, b: (a + b * 2 - 1) / (b.abs() + 0.5) ** 2,
    "numbers of each kind": lambda a, b: (a * 2.5 + 1) * True,
    "integers and a float": lambda a, b: a.round().to(torch.int32) * 2.5,
    "integers and an integer": lambda a, b: a.round().to(torch.int8) * 2,
    "a half and a number": lambda a, b: a.half() * 2.5 + 1,
    "comparison": lambda a, b: (a > b) | (a == 0),
    "product": lambda a, b: a @ b.t(),
    "broadcast": lambda a, b: a[:, :1] + b[0],
    "reductions": lambda a, b: (a.sum(), a.mean(0), a.max(1).values, a.argmin(-1), a.std(), b.norm()),
    "views": lambda a, b: a.t()[1:3].reshape(-1)[::2].unfold(0, 2, 1),
    "view as other dtype": lambda a, b: a.view(torch.int32),
    "in place": lambda a, b: a.clone().add_(b).mul_(2).clamp_(-1, 1).zero_().fill_(3),
    "in place through a view": lambda a, b: (c := a.clone(), c[1].fill_(5), c[:, 0].copy_(b[:, 1]))[0],
    "indexing": lambda a, b: (a[a > 0], a[[0, 2]], a[:, torch.tensor([1, 1, 0])], a[..., None]),
    "index assignment": lambda a, b: a.clone().index_put_((torch.tensor([0, 2]),), b[:2]),
    "masked assignment": lambda a, b: a.masked_fill(b > 0, float("-inf")),
    "concatenation": lambda a, b: torch.cat([a, b, a], 1),
    "splitting": lambda a, b: list(a.chunk(2, 1)) + list(b.split([1, 3], 1)) + list(a.unbind()),
    "sorting": lambda a, b: (*a.sort(descending=True), *a.topk(2), a.unique()),
    "softmax": lambda a, b: F.log_softmax(a, -1) + b.softmax(0),
    "normalization": lambda a, b: F.layer_norm(a, (4,), b[0], b[1]),
    "embedding": lambda a, b: F.embedding(torch.tensor([[0, 2], [1, 1]]).to(a.device), a),
    "factories": lambda a, b: (
        torch.arange(2, 9, 3, device=a.device),
        torch.full((2, 2), 7.5, device=a.device),
        torch.eye(3, device=a.device),
        torch.linspace(0, 1, 5, device=a.device),
        torch.zeros_like(a).new_ones(3),
        torch.tensor([1.0, 2.0], device=a.device),
    ),
    "linear algebra": lambda a, b: (
        torch.linalg.inv(a[:, :3] + 3 * torch.eye(3, device=a.device)),
        torch.linalg.svdvals(b),
    ),
    "complex": lambda a, b: torch.view_as_real(torch.fft.rfft(a) * 1j),
    "empty": lambda a, b: a[:0] @ b.t(),
    "channels last": lambda a, b: F.conv2d(
        a.reshape(1, 3, 2, 2).contiguous(memory_format=torch.channels_last), b.reshape(1, 3, 2, 2)
    ),
    "a strided copy": lambda a, b: torch.empty_strided((3, 4), (1, 3), device=a.device).copy_(a),
    "accumulation": lambda a, b: torch.zeros(4, device=a.device).index_add_(
        0, torch.tensor([0, 1, 0]).to(a.device), a[:, 0]
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operators_give_the_same_bits(name: str, both: tuple[Session, Executor]) -> None:
    a, b = drawn(3, 4), drawn(3, 4, seed=1)
    expected, found = OPERATIONS[name](a, b), OPERATIONS[name](a.to(REMOTE), b.to(REMOTE))
    for one, other in zip(*([x] if isinstance(x, Tensor) else x for x in (expected, found)), strict=True):
        assert other.device.type == REMOTE
        assert (other.dtype, other.shape) == (one.dtype, one.shape)
        assert torch.equal(other.cpu(), one)


@pytest.mark.parametrize("adam", [{}, {"foreach": False}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_training_gives_the_same_weights(name: str, adam: dict[str, bool], both: tuple[Session, Executor]) -> None:
    here, there = Training(name, "cpu", foreach=False), Training(name, REMOTE, **adam)
    torch.manual_seed(8)
    expected = here.run(8)
    torch.manual_seed(8)
    assert there.run(8) == expected
    assert_equal_weights(there.weights(), here.weights())


def test_a_training_step_waits_for_nothing(both: tuple[Session, Executor]) -> None:
    training = Training("gpt", REMOTE)
    training.run(2)
    before = both[0].statistics.round_trips
    losses = [training.step() for _ in range(4)]
    assert both[0].statistics.round_trips == before
    assert len({loss.item() for loss in losses}) == 4
    assert both[0].statistics.round_trips == before + 4


def test_double_backward(both: tuple[Session, Executor]) -> None:
    def gradient(x: Tensor) -> Tensor:
        x.requires_grad_()
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return second

    assert torch.equal(gradient(drawn(5).to(REMOTE)).cpu(), gradient(drawn(5)))


def test_conjugates_are_computed(both: tuple[Session, Executor]) -> None:
    a, b = torch.view_as_complex(drawn(2, 3, 3, 2))
    for compute in (
        lambda x, y: x.conj(),
        lambda x, y: x.mH @ y,
        lambda x, y: x.conj().imag + y.real,
        lambda x, y: torch.linalg.solve(x, y, left=False),
        lambda x, y: (x.conj() * y).resolve_conj().resolve_neg(),
    ):
        (near, far) = ([x.clone().to(device).requires_grad_() for x in (a, b)] for device in ("cpu", REMOTE))
        expected, found = compute(*near), compute(*far)
        torch.testing.assert_close(found.cpu(), expected.resolve_conj().resolve_neg())
        expected.abs().sum().backward()
        found.abs().sum().backward()
        torch.testing.assert_close(far[0].grad.cpu(), near[0].grad)


def test_checkpointed_layers(both: tuple[Session, Executor]) -> None:
    layer = torch.nn.Linear(4, 4)
    remote = copy.deepcopy(layer).to(REMOTE)
    for module, x in ((layer, drawn(2, 4)), (remote, drawn(2, 4).to(REMOTE))):
        torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
    assert torch.equal(remote.weight.grad.cpu(), layer.weight.grad)


def test_autocast_is_the_cpus(both: tuple[Session, Executor]) -> None:
    """Products in bfloat16, normalization and the loss in float32, gradients in the weights' own dtype."""
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
    remote = copy.deepcopy(layer).to(REMOTE)
    found = []
    for module, kind in ((layer, "cpu"), (remote, REMOTE)):
        with torch.autocast(kind, dtype=torch.bfloat16):
            logits = module(drawn(6, 4).to(kind)[:5])
            loss = F.cross_entropy(logits, torch.tensor([0, 1, 2, 0, 1]).to(kind))
        assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
        loss.backward()
        found.append((loss, module[0].weight.grad))
    for here, there in zip(*found, strict=True):
        assert torch.equal(there.cpu(), here)


def test_saving_keeps_what_is_shared(both: tuple[Session, Executor]) -> None:
    values = drawn(3, 4)
    whole = values.to(REMOTE)
    buffer = io.BytesIO()
    torch.save({"whole": whole, "row": whole[1], "parameter": torch.nn.Parameter(whole)}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, map_location="cpu", weights_only=True)
    assert torch.equal(loaded["whole"], values)
    assert torch.equal(loaded["parameter"], values)
    assert torch.equal(loaded["row"], values[1])
    loaded["row"].zero_()
    assert not loaded["whole"][1].any()


def test_a_deep_copy_is_another_storage(both: tuple[Session, Executor]) -> None:
    tensor = drawn(3).to(REMOTE)
    copied = copy.deepcopy(tensor)
    copied.zero_()
    assert torch.equal(tensor.cpu(), drawn(3))


def test_random_numbers_follow_the_seed(both: tuple[Session, Executor]) -> None:
    torch.manual_seed(3)
    first = torch.randn(4, device=REMOTE).cpu()
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4, device=REMOTE).cpu(), first)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4), first)


def test_data_is_not_offered_by_its_hash_for_ever(both: tuple[Session, Executor]) -> None:
    """Weights come again, batches do not: after 64 of one size in vain, uploads of it wait for nothing."""
    session = both[0]
    for number in range(70):
        torch.full((1 << 20,), number, dtype=torch.uint8).to(REMOTE)
    before = session.statistics.round_trips
    last = torch.full((1 << 20,), 7, dtype=torch.uint8).to(REMOTE)
    assert session.statistics.round_trips == before <= 64 + 2
    assert last[-1].item() == 7


def test_resizing_keeps_the_beginning(both: tuple[Session, Executor]) -> None:
    tensor = drawn(4).to(REMOTE)
    tensor.resize_(2, 3)
    assert torch.equal(tensor.flatten()[:4].cpu(), drawn(4))


def test_memory_is_counted_to_the_byte_on_both_sides(both: tuple[Session, Executor]) -> None:
    session, executor = both
    tensors = [torch.zeros(n, dtype=torch.uint8, device=REMOTE) for n in (1, 100, 4096)]
    view = tensors[2][5:]
    session.flush()
    assert session.used == executor.storages.used == 4197
    del tensors
    gc.collect()
    session.flush()
    assert session.used == executor.storages.used == 4096
    del view
    session.flush()
    assert session.used == executor.storages.used == 0


def test_what_does_not_fit_is_refused_where_it_is_asked_for() -> None:
    with connected(memory=1000) as (session, executor):
        kept = torch.zeros(600, dtype=torch.uint8, device=REMOTE)
        with pytest.raises(torch.OutOfMemoryError, match=r"401 bytes; 600 of the lease's 1000 bytes are in use"):
            torch.zeros(401, dtype=torch.uint8, device=REMOTE)
        with pytest.raises(torch.OutOfMemoryError):
            torch.cat([kept, kept])
        rest = torch.zeros(400, dtype=torch.uint8, device=REMOTE)
        session.flush()
        assert executor.storages.used == 1000
        del rest
        assert torch.ones(400, dtype=torch.uint8, device=REMOTE).numel() == 400


def test_errors_are_pytorchs(both: tuple[Session, Executor]) -> None:
    a = drawn(3, 4).to(REMOTE)
    with pytest.raises(RuntimeError, match=r"3, 4|3x4"):
        a @ a
    with pytest.raises(RuntimeError, match="same device"):
        a + drawn(3, 4)
    with pytest.raises(IndexError):
        a[7]
    with pytest.raises(NotImplementedError, match="not among the operators that a pool runs"):
        a.to_sparse()
    assert torch.equal(a.cpu(), drawn(3, 4))


def test_an_error_of_the_other_side_comes_with_the_next_read(both: tuple[Session, Executor]) -> None:
    table = drawn(3, 4).to(REMOTE)
    wrong = F.embedding(torch.tensor([9]).to(REMOTE), table)  # only the values are wrong
    with pytest.raises(IndexError):
        (wrong + 1).cpu()
    assert torch.equal(table.cpu(), drawn(3, 4))


def test_a_second_gpu_is_refused_before_anybody_is_asked(both: tuple[Session, Executor]) -> None:
    with pytest.raises(DeviceError, match="has a remote GPU already"):
        warpbus.pool.connect("warpbus://localhost:1", memory="1GB")


def test_without_a_connection_the_device_says_what_to_do() -> None:
    with connected():
        left = drawn(2).to(REMOTE)
    with pytest.raises(DeviceError, match="no remote GPU is connected"):
        left + 1
    with pytest.raises(DeviceError, match="no remote GPU is connected"):
        torch.zeros(2, device=REMOTE)
