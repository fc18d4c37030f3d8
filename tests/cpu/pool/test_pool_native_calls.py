"""`execution.cpp` does calls without Python, and leaves the same lease and failures behind as `Executor._call`."""

import shutil
import struct
from collections import Counter
from dataclasses import replace

import pytest
import torch
from pool_hand import Hand, handle
from pool_native_calls import CALLS, lease, same, values

from warpbus.errors import ProtocolError
from warpbus.pool.protocol.geometry import Geometry, contiguous
from warpbus.pool.protocol.instructions import call_prefix, definition_number
from warpbus.pool.protocol.signature import Input, New, Number, Same, Signature
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.native_calls import (
    NativeCallsLoader,
    compile_native_calls,
    load_native_calls,
    native_calls_path,
)

CPU = torch.device("cpu")
VECTOR = contiguous(torch.float32, (4,))
ADD = Signature("aten::add.Tensor", (Input(0), Input(1)), (), (VECTOR, VECTOR), (), (New(VECTOR, 16),))


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """These tests are of the compiled code."""
    compile_native_calls()
    load_native_calls.cache_clear()
    if load_native_calls() is None:
        pytest.skip("this machine cannot compile extensions of PyTorch")


@pytest.fixture
def hands():
    """Two leases: the second one does all calls in Python."""
    found = [Hand(Executor(CPU, Quota(1 << 20, 1.0))) for _ in range(2)]
    found[1].executor._native = None
    return found


@pytest.fixture
def in_python(monkeypatch):
    """How often each operator was called by Python, and how often Python stored what it gave."""
    calls = Counter()
    originals = Executor._call, Executor._complete

    def call(self, definition, operands):
        calls[definition.operator] += 1
        originals[0](self, definition, operands)

    def complete(self, definition, *arguments):
        calls[f"complete {definition.operator}"] += 1
        originals[1](self, definition, *arguments)

    monkeypatch.setattr(Executor, "_call", call)
    monkeypatch.setattr(Executor, "_complete", complete)
    return calls


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_done_without_python(hands, in_python, name):
    def work(hand):
        a, b = hand.put(values(3, 4)), hand.put(values(3, 4) + 1)
        CALLS[name](hand, a, b)
        CALLS[name](hand, a, b)

    assert same(hands, work) == []
    # Python makes the first tensor of a new place, and so does the first of the calls.
    assert sum(in_python.values()) <= 2 + 2 * 2
    before = in_python.copy()

    def again(hand):
        made = [handle(101 + at, contiguous(torch.float32, (3, 4))) for at in range(2)]
        CALLS[name](hand, *made)

    assert same(hands, again) == []
    assert sum((in_python - before).values()) == 2  # of the second lease


def test_lists_that_have_gaps(hands, in_python):
    def work(hand):
        x, rows, data = hand.put(values(3, 4)), hand.put(torch.tensor([2, 0])), hand.put(values(3, 2))
        for _ in range(2):
            hand.call("aten::index_put_", x, [None, rows], data)

    assert same(hands, work) == []
    assert in_python["aten::index_put_"] == 3


def test_results_that_share_memory_are_copied(hands, in_python):
    def work(hand):
        x = hand.put(values(3, 4))
        for _ in range(2):
            hand.call("aten::_unsafe_view", x, [4, 3])
            hand.call("aten::unsafe_split.Tensor", x, 2, 0)

    assert same(hands, work) == []
    assert in_python["complete aten::_unsafe_view"] == 4
    assert hands[0].executor.storages.used == 3 * 48 + 2 * 48


def test_operators_that_fail(hands):
    def work(hand):
        x, wrong = hand.put(values(3, 4)), hand.put(torch.tensor([1, 9]))
        negative = hand.put(-torch.eye(3))
        for _ in range(2):
            hand.call("aten::index_select", x, 0, wrong)
            hand.call("aten::linalg_cholesky_ex", negative, check_errors=True)
            hand.call("aten::index_put_", x, [wrong], hand.put(torch.ones(2, 4)))
            hand.call("aten::neg", x)

    failures = same(hands, work)
    assert [each.type for each in failures] == 2 * ["IndexError", "_LinAlgError", "IndexError"]


def test_what_is_computed_from_a_failed_call_fails(hands):
    def work(hand):
        wrong = hand.call("aten::linalg_cholesky_ex", hand.put(-torch.eye(3)), check_errors=True)
        target = hand.put(torch.ones(3, 3))
        hand.call("aten::neg", hand.call("aten::neg", wrong[0]))
        hand.call("aten::add_.Tensor", target, wrong[0])
        hand.call("aten::neg", hand.put(torch.ones(3, 3)))

    assert len(same(hands, work)) == 1


def test_the_quota_holds(hands):
    def work(hand):
        x = hand.put(torch.zeros(100_000))
        for _ in range(3):
            hand.call("aten::neg", x)

    failures = same(hands, work)
    assert [each.type for each in failures] == ["OutOfMemoryError"] * 2
    assert hands[0].executor.storages.used == 800_000


@pytest.mark.parametrize("result", [101, 1 << 63, (1 << 64) - 1])
def test_handles_that_cannot_be_new(hands, result):
    def work(hand):
        x = hand.put(torch.ones(4))
        hand.signed(ADD, [x, x])
        prefix = call_prefix(hand.definitions[ADD.encode()])
        hand.writer.call(prefix + b"".join(int(each).to_bytes(8, "little") for each in (x, x, result)))

    assert [each.type for each in same(hands, work)] == ["ProtocolError"]


def test_a_call_by_the_number_of_another_definition_in_its_place_is_refused(hands):
    other = replace(ADD, operator="aten::logaddexp")
    numbers = [definition_number(7, each.encode()) for each in (ADD, other)]
    for hand in hands:
        x = hand.put(torch.ones(4))
        for number, signature in zip(numbers, (ADD, other), strict=True):
            hand.writer.define(number, signature.encode())
            hand.writer.call(call_prefix(number) + struct.pack("<3Q", x, x, number))
        assert hand.send() == []
        assert [*hand.executor.definitions] == numbers[1:]
        hand.writer.call(call_prefix(numbers[0]) + struct.pack("<3Q", x, x, 1))
        with pytest.raises(ProtocolError, match=f"a call of kind {numbers[0]}, which was not defined"):
            hand.send()


def test_two_results_with_one_handle(hands):
    def work(hand):
        x = hand.put(values(3, 4))
        hand.call("aten::max.dim", x, 1, False)
        prefix = call_prefix(0)
        hand.writer.call(prefix + b"".join(int(each).to_bytes(8, "little") for each in (x, 900, 900)))

    assert [each.type for each in same(hands, work)] == ["ProtocolError"]


def test_tensors_outside_their_storage_and_storages_that_are_gone(hands):
    def work(hand):
        x = hand.put(torch.ones(8))
        hand.call("aten::neg", hand.view(x, (4,), (1,), 4))
        short = hand.put(torch.ones(4))
        hand.call("aten::neg", hand.view(short, (4,), (1,), 4))
        hand.call("aten::neg", handle(77, VECTOR))

    assert [each.type for each in same(hands, work)] == ["ProtocolError"] * 2


def test_a_batch_that_ends_inside_a_call(hands):
    messages = []
    for hand in hands:
        x = hand.put(torch.ones(4))
        hand.signed(ADD, [x, x])
        hand.signed(ADD, [x, x])
        del hand.writer.buffer[-3:]
        with pytest.raises(Exception, match="ends inside") as caught:
            hand.send()
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]
    assert lease(hands[0].executor) == lease(hands[1].executor)


def test_numbers_are_those_of_the_call(hands):
    scale = Signature(
        "aten::addcmul", (Input(0), Input(1), Input(2)), (("value", Number("int", 0)),), (VECTOR,) * 3, ("int",)
    )

    def work(hand):
        x = hand.put(values(4))
        for factor in (3, -(2**40)):
            made = hand.signed(Signature(**{**vars(scale), "outputs": (New(VECTOR, 16),)}), [x, x, x], [factor])
            assert made.geometry == VECTOR

    assert same(hands, work) == []


def test_writes_that_a_migration_has_to_know_are_logged(hands):
    def work(hand):
        x = hand.put(values(3, 4))
        hand.send()
        hand.executor.storages.writes = {}
        hand.call("aten::mul_.Scalar", hand.view(x, (4,), (1,), 8), 2.0)

    assert same(hands, work) == []
    assert hands[0].executor.storages.writes == hands[1].executor.storages.writes != {}


def test_recorded_calls_do_not_run(hands):
    def work(hand):
        x = hand.put(torch.ones(4))
        hand.signed(ADD, [x, x])
        hand.writer.record(1)
        y = hand.signed(ADD, [x, x])
        hand.writer.stop()
        hand.send()
        assert y not in hand.executor.storages.live
        hand.writer.run(1)

    assert same(hands, work) == []


def test_a_definition_that_is_replaced(hands):
    out = Geometry(torch.float32, (4,), (1,))
    subtract = Signature("aten::sub_.Tensor", (Input(0), Input(1)), (), (out, out), (), (Same(0),))

    def work(hand):
        x, y = hand.put(values(4)), hand.put(torch.ones(4))
        hand.signed(ADD, [x, y])
        hand.writer.define(0, subtract.encode())
        hand.writer.call(call_prefix(0) + int(x).to_bytes(8, "little") + int(y).to_bytes(8, "little"))

    assert same(hands, work) == []


def test_a_lease_finds_what_was_compiled_and_compiles_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_native_calls.cache_clear()
    assert load_native_calls() is None
    assert not [*tmp_path.rglob("*.so")]
    monkeypatch.undo()
    load_native_calls.cache_clear()
    assert load_native_calls() is not None
    monkeypatch.setenv("WARPBUS_POOL_FAST_PATH", "0")
    load_native_calls.cache_clear()
    assert load_native_calls() is None
    monkeypatch.undo()
    load_native_calls.cache_clear()


def test_a_lease_that_begins_before_it_is_compiled(tmp_path, hands, in_python):
    path = tmp_path / "execution.so"
    loader = NativeCallsLoader(path)
    assert loader.load() is None
    hand = hands[1]  # calls in Python
    x, y = hand.put(values(4)), hand.put(torch.ones(4))
    first = hand.signed(ADD, [x, y])
    assert hand.send() == []
    assert in_python["aten::add.Tensor"] == 1
    shutil.copy(native_calls_path(), path)
    native = loader.load()
    assert native is not None
    assert loader.load() is None  # once is enough
    hand.executor.use_native(native)
    hand.writer.call(call_prefix(0) + b"".join(int(each).to_bytes(8, "little") for each in (x, y, 1 << 20)))
    assert hand.send() == []
    assert in_python["aten::add.Tensor"] == 1
    assert torch.equal(hand.get(first), values(4) + 1)


def test_a_lease_says_why_it_cannot_load_what_was_compiled(tmp_path, caplog):
    path = tmp_path / "execution.so"
    path.write_bytes(b"no library")
    loader = NativeCallsLoader(path)
    assert loader.load() is None
    assert loader.load() is None
    (record,) = caplog.records
    assert "operators take longer, because" in record.message
