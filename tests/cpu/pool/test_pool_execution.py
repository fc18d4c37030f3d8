"""Batches, calls, what they give and what they leave when they fail."""

import pytest
import torch
import torch.nn.functional as F
from pool_hand import Hand, handle

from warpbus.errors import DeviceError, ProtocolError
from warpbus.pool.protocol import wire
from warpbus.pool.protocol.failures import CallFailure, PoisonedError
from warpbus.pool.protocol.geometry import Geometry, contiguous
from warpbus.pool.protocol.instructions import Writer, call_prefix
from warpbus.pool.protocol.signature import Input, New, Number, Same, Signature
from warpbus.pool.quota import Quota
from warpbus.pool.tenant import execution
from warpbus.pool.tenant.definitions import Definition
from warpbus.pool.tenant.execution import Executor

CPU = torch.device("cpu")
VECTOR = contiguous(torch.float32, (4,))
QUERY = torch.ones(1, 1, 2, 2)
CHOICE = torch._fused_sdp_choice(QUERY, QUERY, QUERY)
ADD = Signature("aten::add.Tensor", (Input(0), Input(1)), (), (VECTOR, VECTOR), (), (New(VECTOR, 16),))


@pytest.fixture
def hand():
    return Hand(Executor(CPU, Quota(1 << 20, 1.0)))


def choice(hand):
    """A call whose result is a number."""
    query = hand.put(QUERY)
    return hand.call("aten::_fused_sdp_choice", query, query, query)


def used(hand):
    return hand.executor.storages.used


def test_an_mlp(hand):
    torch.manual_seed(0)
    x, w1, b1, w2 = torch.randn(5, 8), torch.randn(16, 8), torch.randn(16), torch.randn(3, 16)
    there = [hand.put(each) for each in (x, w1, b1, w2)]
    transposed = hand.view(there[1], (8, 16), (1, 8))
    hidden = hand.call("aten::addmm", there[2], there[0], transposed)
    hidden = hand.call("aten::gelu", hidden)
    out = hand.call("aten::mm", hidden, hand.view(there[3], (16, 3), (1, 16)))
    out = hand.call("aten::_log_softmax", out, 1, False)
    expected = F.log_softmax(F.gelu(F.linear(x, w1, b1)) @ w2.T, 1)
    assert torch.equal(hand.get(out), expected)
    assert used(hand) == sum(4 * each.numel() for each in (x, w1, b1, w2)) + 4 * (5 * 16 * 2 + 5 * 3 * 2)
    assert hand.executor.usage()["calls"] == 4


def test_in_place_and_several_results(hand):
    x = torch.randn(6, 4)
    there = hand.put(x)
    version = hand.executor.storages.version
    hand.send()
    before = version(there)
    row = hand.view(there, (4,), (1,), 8)
    same = hand.call("aten::mul_.Scalar", row, 3.0)
    values, indices = hand.call("aten::max.dim", there, 1, False)
    hand.send()
    assert same is row
    assert version(there) > before
    x[2] *= 3
    assert torch.equal(hand.get(there), x)
    assert torch.equal(hand.get(values), x.max(1).values)
    assert torch.equal(hand.get(indices), x.max(1).indices)


def test_lists_of_tensors(hand):
    pieces = [torch.randn(2, n) for n in (1, 2, 3)]
    there = [hand.put(each) for each in pieces]
    joined = hand.call("aten::cat", there, 1)
    hand.call("aten::_foreach_add_.Scalar", there, 2.0)
    parts = hand.call("aten::unsafe_split_with_sizes", joined, [1, 2, 3], 1)
    squares = hand.call("aten::_foreach_mul.List", there[1:], there[1:])
    assert torch.equal(hand.get(joined), torch.cat(pieces, 1))
    assert torch.equal(hand.get(there[2]), pieces[2] + 2)
    for piece, part in zip(pieces, parts, strict=True):
        assert torch.equal(hand.get(part), piece)
    for piece, square in zip(pieces[1:], squares, strict=True):
        assert torch.equal(hand.get(square), (piece + 2) ** 2)
    at_once = {each.operator for each in hand.executor.definitions.values() if each.several}
    assert "aten::_foreach_mul.List" in at_once
    assert used(hand) == 2 * 48 + 28 + 32 + 36 + 40  # the parts are copies, with the gaps that were announced


def test_results_come_in_the_strides_that_were_announced(hand):
    x = torch.randn(3, 4)
    there = hand.put(x)
    announced = Geometry(torch.float32, (3, 4), (1, 3))
    relu = Signature("aten::relu", (Input(0),), (), (there.geometry,), (), (New(announced, 48),))
    out = hand.signed(relu, [there])
    assert torch.equal(hand.get(out), x.relu())
    assert hand.get(out).stride() == (1, 3)
    assert used(hand) == 96


def test_results_that_share_a_storage_with_something_are_copied(hand):
    definition = Definition(ADD.encode(), hand.executor.storages)
    given, part = torch.ones(4), torch.ones(8)[:4]
    for result in (given, given.view(4), part):
        kept = definition.conformed(result, VECTOR, 16, {id(given)})
        assert kept.data_ptr() != result.data_ptr()
        assert torch.equal(kept, result)
    alone = torch.ones(4)
    assert definition.conformed(alone, VECTOR, 16, {id(given)}) is alone
    for wrong in (None, torch.ones(5), torch.ones(4, dtype=torch.float64)):
        with pytest.raises(ProtocolError, match="was announced"):
            definition.conformed(wrong, VECTOR, 16, {id(given)})


def test_memory_that_nobody_wrote_is_zero(hand):
    hand.send()
    for _ in range(10):
        out = hand.call("aten::empty.memory_format", [256], device=CPU)
        assert not hand.get(out).any()
        hand.call("aten::fill_.Scalar", out, 7.0)
        hand.writer.free([out])
        hand.send()


def test_dynamic_calls(hand):
    x = torch.tensor([0.0, 3, 0, 5])
    there = hand.put(x)
    found = hand.call("aten::nonzero", there)
    item = choice(hand)
    assert hand.send() == []
    ((description, number, nothing),) = hand.executor.answer(["describe", [found[0], item[0], 9999]])
    assert description == [torch.int64, [2, 1], [1, 2], 16] or description == [torch.int64, [2, 1], [1, 1], 16]
    assert (number, nothing) == (CHOICE, None)
    dtype, shape, stride, _ = description
    place = handle(found[0], Geometry(dtype, tuple(shape), tuple(stride)))
    assert hand.get(place).tolist() == [[1], [3]]
    assert used(hand) == 48
    hand.writer.free([*found, *item])
    hand.send()
    assert (used(hand), len(hand.executor.storages.live)) == (32, 2)


def test_dynamic_calls_are_charged(hand):
    there = hand.put(torch.ones(1 << 17))  # half the quota; the indices would take 1 MiB
    assert hand.send() == []
    found = hand.call("aten::nonzero", there)
    (failure,) = hand.send()
    assert (failure.type, failure.operator) == ("OutOfMemoryError", "aten::nonzero")
    assert used(hand) == 1 << 19
    with pytest.raises(PoisonedError, match="do not fit"):
        list(hand.executor.answer(["describe", [found[0]]]))


def test_the_quota_is_looked_at_before_the_operator_runs(hand):
    there = hand.put(torch.ones(1 << 17))
    outer = hand.call(
        "aten::mul.Tensor", hand.view(there, (1 << 17, 1), (1, 1)), hand.view(there, (1, 1 << 17), (1, 1))
    )
    (failure,) = hand.send()
    assert failure == CallFailure(
        "OutOfMemoryError",
        f"{4 << 34:,} bytes do not fit: {1 << 19:,} of the lease's {1 << 20:,} bytes are in use; "
        "free tensors, or lease more memory",
        "aten::mul.Tensor",
        1,
    )
    exact = hand.call("aten::neg", there)
    assert hand.send() == []
    assert used(hand) == hand.executor.storages.peak == 1 << 20
    with pytest.raises(PoisonedError):
        list(hand.executor.answer(["read", outer, 0, 4]))
    assert torch.equal(hand.get(exact), -torch.ones(1 << 17))


def test_poison_spreads_and_is_reported_once(hand):
    x, wrong = hand.put(torch.ones(4)), hand.put(torch.tensor([9]))
    table = hand.put(torch.ones(3, 2))
    bad = hand.call("aten::embedding", table, wrong)
    worse = hand.call("aten::neg", bad)
    hand.call("aten::add_.Tensor", hand.view(table, (1, 2), (2, 1)), bad)
    good = hand.call("aten::neg", x)
    (failure,) = hand.send()
    assert (failure.type, failure.operator, failure.batch) == ("IndexError", "aten::embedding", 1)
    for each in (bad, worse, table):
        with pytest.raises(PoisonedError) as caught:
            list(hand.executor.answer(["read", each, 0, 4]))
        assert caught.value.failure == failure
    assert hand.get(good).tolist() == [-1] * 4
    hand.writer.free([bad, worse, table])
    hand.writer.write(x, 0, bytes(16))
    assert hand.send() == []
    assert used(hand) == 40


def test_an_operator_in_place_that_fails_leaves_its_tensor(hand):
    x, index = hand.put(torch.ones(4)), hand.put(torch.tensor([9]))
    hand.call("aten::index_fill_.int_Scalar", x, 0, index, 5.0)
    (failure,) = hand.send()
    assert failure.type == "IndexError"
    assert hand.get(x).tolist() == [1] * 4


def test_an_upload_without_room_is_reported_once(hand):
    there = hand.put(torch.ones((1 << 18) + 1))
    (failure,) = hand.send()
    assert (failure.type, failure.operator) == ("OutOfMemoryError", "NEW")
    assert used(hand) == 0
    hand.writer.free([there])
    assert hand.send() == []


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ((New(contiguous(torch.float32, (2,)), 8),), "gives"),
        ((New(contiguous(torch.float64, (4,)), 32),), "gives"),
        ((New(VECTOR, 16), New(VECTOR, 16)), "gives"),
        ((Same(0),), "gives"),
        ((New(Geometry(torch.float32, (4,), (1,), 1), 20),), "begins at the start"),
    ],
)
def test_announcements_are_checked(hand, outputs, message):
    x = hand.put(torch.ones(4))
    lie = Signature("aten::add.Tensor", (Input(0), Input(1)), (), (VECTOR, VECTOR), (), outputs)
    hand.signed(lie, [x, x])
    (failure,) = hand.send()
    assert failure.type == "ProtocolError"
    assert message in failure.message
    assert used(hand) == 16


def test_what_is_known_only_afterwards_must_not_be_announced(hand):
    x = hand.put(torch.zeros(4))
    lie = Signature("aten::nonzero", (Input(0),), (), (VECTOR,), (), (New(contiguous(torch.int64, (0, 1)), 0),))
    hand.signed(lie, [x])
    (failure,) = hand.send()
    assert "only after it ran" in failure.message


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_must_have_the_right_size(hand):
    x, small = hand.put(torch.ones(64)), hand.put(torch.ones(4))
    big = contiguous(torch.float32, (64,))
    out = Signature("aten::neg.out", (Input(0),), (("out", Input(1)),), (big, VECTOR), (), (Same(1),))
    hand.signed(out, [x, small])
    (failure,) = hand.send()
    assert "another size" in failure.message
    assert used(hand) == 272
    assert len(hand.executor.storages.raw(small)) == 16


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_must_have_the_right_size_where_meta_tensors_cannot_tell(hand):
    x, small = hand.put(torch.ones(64)), hand.empty((4,))
    big = contiguous(torch.float32, (64,))
    out = Signature("aten::_logcumsumexp.out", (Input(0), 0), (("out", Input(1)),), (big, VECTOR), (), (New(big, 256),))
    hand.signed(out, [x, small])
    (failure,) = hand.send()
    assert "another size" in failure.message
    assert used(hand) == 256
    assert hand.executor.storages.live[small].failure is not None


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("recorded", [False, True])
def test_a_call_that_fails_after_it_changed_a_size_leaves_no_memory_uncharged(hand, recorded):
    x, small = hand.put(torch.ones(64)), hand.empty((4,))
    big, wrong = contiguous(torch.float32, (64,)), contiguous(torch.float32, (32,))
    # It is announced wrongly: the operator has made its output larger when that comes out.
    outputs = (New(wrong, 128),)
    out = Signature("aten::_logcumsumexp.out", (Input(0), 0), (("out", Input(1)),), (big, VECTOR), (), outputs)
    if recorded:
        hand.writer.record(1)
    hand.signed(out, [x, small])
    if recorded:
        hand.writer.stop()
        hand.writer.run(1)
    (failure,) = hand.send()
    assert "another size" in failure.message
    assert used(hand) == 256
    assert hand.executor.storages.live[small].failure is not None


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda:1"])
@pytest.mark.parametrize("name", ["aten::zeros_like", "aten::_to_copy"])
def test_a_client_names_no_device(hand, name, device):
    x = hand.put(torch.ones(4))
    lie = Signature(name, (Input(0),), (("device", device),), (VECTOR,), (), (New(VECTOR, 16),))
    hand.signed(lie, [x])
    (failure,) = hand.send()
    assert "does not choose" in failure.message
    assert used(hand) == 16


def test_results_that_are_marked_as_conjugate_are_resolved(hand):
    a = torch.tensor([[2 + 1j, 1j], [0.5 - 1j, 3]])
    b = torch.tensor([[1 + 2j, 3j]])
    factors, pivots, _ = torch.ops.aten.linalg_lu_factor_ex(a)
    expected = torch.linalg.lu_solve(factors, pivots, b, left=False).resolve_conj()
    x = hand.call("aten::linalg_lu_solve", hand.put(factors), hand.put(pivots), hand.put(b), left=False)
    assert hand.send() == []
    data = hand.executor.storages.read(x, 0, 16)
    assert torch.allclose(torch.frombuffer(bytearray(data), dtype=torch.complex64), expected.flatten())


def test_dynamic_calls_change_no_sizes(hand):
    x, out = hand.put(torch.ones(64)), hand.empty((1, 1), torch.int64)
    signature = Signature(
        "aten::nonzero.out",
        (Input(0),),
        (("out", Input(1)),),
        (contiguous(torch.float32, (64,)), out.geometry),
        (),
        None,
    )
    hand.signed(signature, [x, out])
    (failure,) = hand.send()
    assert "another size" in failure.message
    assert hand.executor.storages.sizes() == {x: 256}
    assert used(hand) == 256


def test_views_stay_inside(hand):
    x = hand.put(torch.ones(4))
    outside = hand.view(x, (4,), (1,), 1)
    hand.call("aten::neg", outside)
    (failure,) = hand.send()
    assert "must end inside" in failure.message


def test_handles_that_are_not_there_or_taken(hand):
    x = hand.put(torch.ones(4))
    hand.call("aten::neg", handle(7, VECTOR))
    hand.next -= 1  # the same handle for another result
    hand.next = int(x) - 1
    hand.call("aten::neg", x)
    first, second = hand.send()
    assert "no storage with the handle 7" in first.message
    assert "in use" in second.message
    assert hand.get(x).tolist() == [1] * 4
    assert used(hand) == 16


def test_batches_are_executed_once_and_in_order(hand):
    x = hand.put(torch.ones(4))
    hand.send()
    hand.call("aten::add_.Tensor", x, x)
    hand.call("aten::neg", hand.view(x, (4,), (1,), 9))
    again = memoryview(bytes(hand.writer.take()))
    executor = hand.executor
    failures = executor.execute(2, again)
    assert len(failures) == 1
    assert executor.execute(2, again) == failures
    assert executor.execute(1, memoryview(b"nonsense")) == []
    with pytest.raises(ProtocolError, match="between are missing"):
        executor.execute(4, again)
    hand.batch = 2
    assert hand.get(x).tolist() == [2] * 4


@pytest.mark.parametrize(
    "damage", [b"\xff", b"\x01\x00", b"\x04\x63\x00\x00\x00", b"\x03\x00\x00\x00\x00\x02\x00\x00\x00ab"]
)
def test_malformed_batches_count_as_executed(hand, damage):
    writer = Writer()
    writer.new(1, 16)
    with pytest.raises(ProtocolError):
        hand.executor.execute(1, memoryview(bytes(writer.take()) + damage))
    assert (hand.executor.executed, used(hand)) == (1, 16)


def test_operators_off_the_list_are_refused(hand):
    for name in ("aten::set_.source_Tensor", "aten::from_file", "aten::resize_", "prim::device"):
        hand.writer.define(0, wire.encode([name, [], [], [], [], []]))
        with pytest.raises(DeviceError, match="not among the operators"):
            hand.send()


def test_definitions_have_a_quota_of_their_own(hand, monkeypatch):
    x = hand.put(torch.ones(4))
    hand.get(hand.call("aten::add.Tensor", x, x))
    defined = len(next(iter(hand.definitions)))
    monkeypatch.setattr(execution, "MAX_DEFINED_BYTES", 2 * defined)
    encoded = next(iter(hand.definitions))
    for number in (1, 1, 0):  # a definition that is replaced does not count any more
        hand.writer.define(number, encoded)
        assert hand.send() == []
    hand.writer.define(2, encoded)
    with pytest.raises(ProtocolError, match=f"{3 * defined:,} bytes together: a lease may have {2 * defined:,}"):
        hand.send()


def test_numbers(hand):
    x = hand.put(torch.ones(4))
    signature = Signature(
        "aten::add.Tensor",
        (Input(0), Input(1)),
        (("alpha", Number("int", 0)),),
        (VECTOR, VECTOR),
        ("int",),
        (New(VECTOR, 16),),
    )
    outs = [hand.signed(signature, [x, x], [alpha]) for alpha in (2, -3)]
    assert [hand.get(out)[0].item() for out in outs] == [3, -2]
    flag = Signature("aten::mul.Scalar", (Input(0), Number("bool", 0)), (), (VECTOR,), ("bool",), (New(VECTOR, 16),))
    assert [hand.get(hand.signed(flag, [x], [each])).sum().item() for each in (0, 1)] == [0, 4]


def test_random_numbers_are_those_of_a_local_program(hand):
    x = hand.put(torch.zeros(100))
    hand.writer.seed(2**64 - 1)
    hand.call("aten::normal_", x)
    mask = hand.call("aten::bernoulli", hand.put(torch.full((50,), 0.5)))
    theirs = hand.get(x), hand.get(mask)
    torch.manual_seed(2**64 - 1)
    ours = torch.zeros(100).normal_(), torch.full((50,), 0.5).bernoulli()
    assert torch.equal(theirs[0], ours[0])
    assert torch.equal(theirs[1], ours[1])


def test_questions(hand):
    x = hand.put(torch.arange(4.0))
    hand.send()
    answer = hand.executor.answer
    assert list(answer(["sync"])) == [None]
    assert list(answer(["known", [bytes(32)]])) == [[False]]
    (usage,) = answer(["usage"])
    assert (usage["used"], usage["memory"], usage["executed"]) == (16, 1 << 20, 1)
    assert wire.decode(wire.encode(usage)) == usage
    assert [bytes(part) for part in answer(["read", x, 4, 4])] == [torch.tensor([1.0]).numpy().tobytes()]
    for wrong in (["read", 9, 0, 1], ["read", x, 0, 17], ["known", [b"short"]], ["shutdown"], [], ["read", x, "0", 1]):
        with pytest.raises(ProtocolError):
            list(answer(wrong))


def test_state_goes_over_to_another_executor(hand):
    torch.manual_seed(1)
    x = hand.put(torch.arange(4.0))
    wrong = hand.call("aten::neg", hand.view(x, (4,), (1,), 1))
    found = hand.call("aten::nonzero", x)
    item = choice(hand)
    hand.call("aten::normal_", x)
    (failure,) = hand.send()
    executor = hand.executor
    state = wire.decode(wire.encode(executor.state()))
    contents = {each: bytes(executor.storages.read(each, 0, n)) for each, n in executor.storages.sizes().items()}
    hand.call("aten::normal_", x)
    expected = hand.get(x)

    other = Executor(CPU, Quota(1 << 20, 1.0))
    for each, data in contents.items():
        other.storages.create(each, len(data))
        other.storages.write(each, 0, data)
    other.restore(state)
    assert other.storages.used == executor.storages.used
    assert other.execute(1, memoryview(b"")) == [failure]
    hand.executor, hand.batch = other, 1
    hand.call("aten::normal_", x)  # it is defined there already
    assert torch.equal(hand.get(x), expected)
    with pytest.raises(PoisonedError, match="must end inside"):
        list(other.answer(["read", wrong, 0, 4]))
    assert list(other.answer(["describe", [found[0], item[0]]])) == list(
        executor.answer(["describe", [found[0], item[0]]])
    )


@pytest.mark.parametrize("damaged", [{}, {"definitions": 3}, {"definitions": [[0, b"xx"]]}])
def test_a_state_that_is_none(damaged):
    with pytest.raises(ProtocolError):
        Executor(CPU, Quota(100, 1.0)).restore(damaged)


def test_a_call_costs_no_hashing_of_geometries(hand, monkeypatch):
    x = hand.put(torch.ones(4))
    out = hand.signed(ADD, [x, x])
    hand.send()

    def never(self):
        raise AssertionError("a geometry was hashed")

    monkeypatch.setattr(Geometry, "__hash__", never)
    again = hand.next + 1
    payload = call_prefix(0) + hand.executor._definitions[0].layout.pack(x, out, again)
    assert hand.executor.execute(2, memoryview(payload)) == []
    monkeypatch.undo()
    assert hand.executor.storages.read(again, 0, 4) == torch.tensor([3.0]).numpy().tobytes()
