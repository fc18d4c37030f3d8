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

from warpbus.errors import StateError
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


def _conjugate_in_place(x: Tensor, _: Tensor) -> None:
    x.conj().mul_(2 + 1j)
    x.mH[0].copy_(x[1])
    x.conj()[1].copy_(x.conj()[2])
    x.conj().imag.add_(1)
    x.conj().imag[0].fill_(2)
    x.conj().imag[1].copy_(torch.tensor([1.0, 2.0, 3.0]))
    x.conj().imag[2].copy_(x.conj().imag[0])
    x.conj()[:, 0] = torch.tensor([3j, 4, 5])
    torch.add(x[0], x[1], out=x.conj()[2])


PRODUCTS_IN_PLACE: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x.conj().addmm_(y.conj(), y),
    lambda x, y: torch.mm(y, y.mH, out=x.conj()),
    lambda x, y: torch.addmm(y.conj(), y, y.mH, out=x.mH),
    lambda x, y: x.conj()[None].baddbmm_(y[None], y.mT[None].conj()),
    lambda x, y: torch.bmm(y[None].conj(), y[None], out=x[None].conj()),
    lambda x, y: torch.dot(x[0].conj(), y[0], out=x.conj()[0, 0]),
    lambda x, y: torch.vdot(x[0].conj(), y[0].conj()),
    lambda x, y: x.conj().conj_physical_(),
    lambda x, y: x.conj().imag.neg_(),
    lambda x, y: torch.linalg.solve_triangular(x.mH, y.conj(), upper=True),
    lambda x, y: x.conj().repeat_interleave(2, 0).clone(memory_format=torch.contiguous_format),
    lambda x, y: x.mH.clone(memory_format=torch.contiguous_format) + x.conj().imag.clone(),
    lambda x, y: torch.full_like(x.conj(), 3j),
    lambda x, y: torch._neg_view(x.conj()).mul_(y),
]


@pytest.mark.parametrize("compute", [_conjugate_in_place, *PRODUCTS_IN_PLACE])
def test_what_is_written_through_a_conjugate(
    both: tuple[Session, Executor], compute: Callable[..., Tensor | None]
) -> None:
    """It is a view: what is written there is in the tensor, in operators that know the mark as in those that do not."""
    near = [torch.view_as_complex(drawn(3, 3, 2, seed=seed)) for seed in (1, 2)]
    far = [each.to(REMOTE) for each in near]
    expected, found = compute(*near), compute(*far)
    for here, there in zip([*near, expected], [*far, found], strict=True):
        if here is not None and there is not None:
            torch.testing.assert_close(there.cpu(), here.resolve_conj().resolve_neg())


def test_gradients_of_what_is_written_through_a_conjugate(both: tuple[Session, Executor]) -> None:
    def gradient(device: str) -> Tensor:
        x = torch.view_as_complex(drawn(3, 3, 2)).to(device).requires_grad_()
        y = x * 2
        y.conj().imag.mul_(3)
        y.conj()[0] *= 2j
        (found,) = torch.autograd.grad((y.mH @ y).abs().sum(), x)
        return found.cpu()

    torch.testing.assert_close(gradient(REMOTE), gradient("cpu"))


def test_conjugates_are_read_saved_and_copied(both: tuple[Session, Executor]) -> None:
    x = torch.view_as_complex(drawn(3, 3, 2))
    far = x.to(REMOTE)
    file = io.BytesIO()
    torch.save([far, far.conj()], file)
    file.seek(0)
    read, conjugate = torch.load(file, map_location="cpu", weights_only=True)
    assert torch.equal(read, x)
    assert torch.equal(conjugate, x.conj())
    conjugate.zero_()
    assert not read.any()
    assert torch.equal(copy.deepcopy(far.conj()).cpu(), x.conj())
    assert far.conj()[0, 0].item() == x.conj()[0, 0].item()
    assert torch.equal(far.conj(), x.conj().to(REMOTE))
    assert str(far.conj().imag) == str(x.conj().imag.resolve_neg()).replace(")", f", device='{REMOTE}:0')")
    assert (far.conj().is_conj(), far.conj().cpu().is_conj(), far.conj().untyped_storage().data_ptr()) == (
        *(True, False),
        far.untyped_storage().data_ptr(),
    )


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


def test_addresses_tell_what_shares_memory(both: tuple[Session, Executor]) -> None:
    first, second = drawn(3, 4).to(REMOTE), drawn(3, 4).to(REMOTE)
    assert first.data_ptr() == first.detach().data_ptr() == first.t().data_ptr() != second.data_ptr()
    assert first[1].data_ptr() - first.data_ptr() == 16
    assert first.untyped_storage().data_ptr() == first.data_ptr()
    assert abs(first.data_ptr() - second.data_ptr()) >= first.nbytes
    assert torch.empty(0, device=REMOTE).data_ptr() == 0
    assert drawn(3).data_ptr() != 0


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


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint32),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64),
    ],
    ids=str,
)
def test_numbers_are_read_as_pytorch_reads_them(dtype: torch.dtype, both: tuple[Session, Executor]) -> None:
    values = torch.tensor([0.0, 1.0, -2.75, 3.4e38, 1e-40, float("inf"), -0.0, float("nan")], dtype=torch.float64)
    if not dtype.is_floating_point and not dtype.is_complex:
        limits = torch.iinfo(dtype) if dtype is not torch.bool else None
        values = torch.tensor([0, 1, 5, *([] if limits is None else [limits.min, limits.max])])
    here = values.to(dtype)
    there = here.to("warpbus")
    for index in range(len(values)):
        expected, found = here[index].item(), there[index].item()
        assert type(found) is type(expected)
        assert repr(found) == repr(expected)


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
        a.to_mkldnn()
    assert torch.equal(a.cpu(), drawn(3, 4))


def test_an_error_of_the_other_side_comes_with_the_next_read(both: tuple[Session, Executor]) -> None:
    table = drawn(3, 4).to(REMOTE)
    wrong = F.embedding(torch.tensor([9]).to(REMOTE), table)  # only the values are wrong
    with pytest.raises(IndexError):
        (wrong + 1).cpu()
    assert torch.equal(table.cpu(), drawn(3, 4))


def test_without_a_connection_the_device_says_what_to_do() -> None:
    with connected():
        left = drawn(2).to(REMOTE)
    with pytest.raises(StateError, match="no remote GPU is connected"):
        left + 1
    with pytest.raises(StateError, match="no remote GPU is connected"):
        torch.zeros(2, device=REMOTE)
