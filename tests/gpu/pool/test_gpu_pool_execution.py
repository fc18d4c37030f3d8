"""The executor on a GPU: quotas, graphs, strides, random numbers, bytes in and out."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "cpu" / "pool"))
from pool_hand import Hand

from warpbus.errors import ProtocolError
from warpbus.pool.protocol import wire
from warpbus.pool.protocol.failures import PoisonedError
from warpbus.pool.protocol.geometry import Geometry
from warpbus.pool.protocol.signature import Input, New, Signature
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.meter import Meter
from warpbus.pool.tenant.storages import allowance

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GPU = torch.device("cuda", 0)


@pytest.fixture
def hand():
    yield Hand(Executor(GPU, Quota(64 << 20, 1.0)))
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def used(hand):
    return hand.executor.storages.used


def recorded(hand, shape=(64, 64), noise=False):
    """x -> y = gelu(x w) + w; x takes y over a hundredth at a time. Returns x, w, y."""
    torch.manual_seed(0)
    x, w = hand.put(torch.randn(shape)), hand.put(torch.randn(shape[1], shape[1]) / 8)
    hand.send()
    hand.writer.record(1)
    product = hand.call("aten::mm", x, w)
    active = hand.call("aten::gelu", product)
    hand.writer.free([product])
    if noise:
        hand.call("aten::normal_", active)
    y = hand.call("aten::add.Tensor", active, w)
    hand.writer.free([active])
    hand.call("aten::add_.Tensor", x, y, alpha=0.01)
    hand.writer.stop()
    return x, w, y


def test_bytes_in_and_out(hand):
    data = torch.randint(0, 255, (9 << 20,), dtype=torch.uint8)
    there = hand.put(data)
    assert torch.equal(hand.get(there), data)
    storages = hand.executor.storages
    assert torch.equal(
        torch.frombuffer(bytearray(storages.read(there, 5, 8 << 20)), dtype=torch.uint8), data[5:][: 8 << 20]
    )
    storages.write(there, 3, b"abc")
    assert bytes(storages.read(there, 2, 5)) == bytes([data[2], *b"abc", data[6]])
    assert not hand.get(hand.empty((1 << 20,))).any()


def test_copies_that_are_on_their_way_together(hand):
    data = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8)
    there = hand.put(data)
    hand.send()
    storages = hand.executor.storages
    for _ in range(2):  # the second time with the same buffers
        wanted = [(5, 8), (100, 4096), (7, 1 << 19), (0, 1)]
        copies = []
        for start, nbytes in wanted:
            assert storages.has_room(nbytes)
            copies.append(storages.leave(there, start, nbytes))
        storages.write(there, 0, b"later")
        storages.synchronize()
        for copy, (start, nbytes) in zip(copies, wanted, strict=True):
            assert copy.arrived
            assert bytes(copy.take()) == bytes(data[start : start + nbytes].numpy())
        del copy, copies
        storages.write(there, 0, bytes(data[:5].numpy()))


def test_an_mlp_computes_what_it_does_without_a_pool(hand):
    torch.manual_seed(0)
    x, w, b = torch.randn(32, 64), torch.randn(128, 64), torch.randn(128)
    there = [hand.put(each) for each in (x, w, b)]
    hidden = hand.call("aten::addmm", there[2], there[0], hand.view(there[1], (64, 128), (1, 64)))
    out = hand.call("aten::_log_softmax", hand.call("aten::gelu", hidden), 1, False)
    here = torch.log_softmax(torch.nn.functional.gelu(torch.addmm(b.to(GPU), x.to(GPU), w.to(GPU).T)), 1)
    assert torch.equal(hand.get(out), here.cpu())


def test_the_quota_is_exact_and_temporaries_are_limited(hand):
    big = hand.empty((48 << 20,), torch.uint8)
    assert hand.send() == []
    hand.empty(((16 << 20) + 1,), torch.uint8)
    (failure,) = hand.send()
    assert failure.type == "OutOfMemoryError"
    assert f"{48 << 20:,} of the lease's {64 << 20:,}" in failure.message
    rest = hand.empty((16 << 20,), torch.uint8)
    assert hand.send() == []
    assert used(hand) == 64 << 20
    hand.writer.free([big])
    # Known only afterwards, so that only the allocator can stop it.
    one = hand.empty((1,), torch.uint8)
    hand.call("aten::repeat_interleave.self_int", one, allowance(64 << 20) + (64 << 20))
    (failure,) = hand.send()
    assert failure.type == "OutOfMemoryError"
    assert used(hand) <= 64 << 20
    assert torch.equal(hand.get(rest), torch.zeros(16 << 20, dtype=torch.uint8))
    assert torch.cuda.memory_reserved() <= allowance(64 << 20) + (64 << 20)


def test_results_come_in_the_strides_that_were_announced(hand):
    x = torch.randn(3, 4)
    there = hand.put(x)
    announced = Geometry(torch.float32, (3, 4), (1, 3))
    out = hand.signed(Signature("aten::relu", (Input(0),), (), (there.geometry,), (), (New(announced, 48),)), [there])
    assert torch.equal(hand.get(out), x.relu())
    assert hand.get(out).stride() == (1, 3)


def test_dynamic_calls(hand):
    found = hand.call("aten::nonzero", hand.put(torch.tensor([0.0, 3, 0, 5])))
    hand.send()
    ((description,),) = hand.executor.answer(["describe", [found[0]]])
    assert (description[0], description[1], description[3]) == (torch.int64, [2, 1], 16)


@pytest.mark.parametrize("noise", [False, True], ids=["sure", "random"])
def test_a_graph_computes_what_the_calls_do(hand, noise):
    x, w, y = recorded(hand, noise=noise)
    before = used(hand)
    here_x, here_w = (hand.get(each).to(GPU) for each in (x, w))
    hand.writer.seed(5)
    address = None
    expected = []
    torch.cuda.default_generators[0].manual_seed(5)
    for _ in range(5):
        active = torch.nn.functional.gelu(here_x @ here_w)
        if noise:
            active.normal_()
        here_y = active + here_w
        here_x.add_(here_y, alpha=0.01)
        expected.append((here_x.cpu(), here_y.cpu()))
    for run in range(5):
        hand.writer.run(1)
        assert torch.equal(hand.get(x), expected[run][0])
        assert torch.equal(hand.get(y), expected[run][1])
        usage = hand.executor.usage()
        assert (usage["captured"], usage["not captured"]) == (int(run > 0), [])
        address = address or hand.executor.storages.raw(y).data_ptr()
        assert hand.executor.storages.raw(y).data_ptr() == address
        # The result, and once there is a graph the memory of a run.
        assert used(hand) == before + (64 * 64 * 4) * (1 if run == 0 else 3)
    hand.writer.drop(1)
    hand.send()
    assert used(hand) == before + 64 * 64 * 4
    assert torch.equal(hand.get(y), expected[-1][1])


def test_graphs_share_the_memory_of_a_run(hand):
    x = hand.put(torch.randn(1 << 18))
    hand.send()
    results = []
    for program in range(1, 9):
        hand.writer.record(program)
        inner = hand.call("aten::mul.Scalar", x, float(program))
        results.append(hand.call("aten::neg", inner))
        hand.writer.free([inner])
        hand.writer.stop()
    for _ in range(3):
        for program in range(1, 9):
            hand.writer.run(program)
        assert hand.send() == []
    assert hand.executor.usage()["captured"] == 8
    assert used(hand) == (1 << 20) * (1 + 8 + 2)
    source = hand.get(x)
    for program, result in enumerate(results, 1):
        assert torch.equal(hand.get(result), -source * program)


def test_a_graph_is_captured_again_when_memory_of_it_went_away(hand):
    x, w, y = recorded(hand)
    for _ in range(2):
        hand.writer.run(1)
    hand.send()
    hand.writer.free([w])
    hand.writer.run(1)
    (failure,) = hand.send()
    assert "no storage with the handle" in failure.message
    with pytest.raises(PoisonedError):
        list(hand.executor.answer(["read", y, 0, 4]))
    weights = torch.randn(64, 64) / 8
    hand.writer.new(w, 64 * 64 * 4)
    hand.writer.write(w, 0, bytes(weights.view(-1).view(torch.uint8).numpy()))
    for _ in range(3):
        before = hand.get(x).to(GPU)
        hand.writer.run(1)
        expected = torch.nn.functional.gelu(before @ weights.to(GPU)) + weights.to(GPU)
        assert torch.equal(hand.get(y), expected.cpu())
    assert hand.executor.usage()["captured"] == 1


def test_what_cannot_be_captured_runs_call_by_call(hand):
    x = hand.put(torch.tensor([[2.0, 1], [1, 3]]))
    hand.send()
    hand.writer.record(1)
    values, _ = hand.call("aten::_linalg_eigh", x, "L", True)  # it waits for the GPU
    total = hand.call("aten::sum", values)
    hand.writer.stop()
    for _ in range(4):
        hand.writer.run(1)
        assert hand.get(total).item() == pytest.approx(5)
    usage = hand.executor.usage()
    assert usage["captured"] == 1 or any("aten::" in why for why in usage["not captured"])
    # Other programs are captured still.
    hand.writer.record(2)
    negative = hand.call("aten::neg", x)
    hand.writer.stop()
    for _ in range(3):
        hand.writer.run(2)
    assert torch.equal(hand.get(negative), -hand.get(x))
    assert hand.executor.usage()["captured"] >= 1


def test_programs_and_random_numbers_move(hand):
    x, _, y = recorded(hand, noise=True)
    hand.writer.seed(3)
    for _ in range(3):
        hand.writer.run(1)
    hand.send()
    old = hand.executor
    state = wire.decode(wire.encode(old.state()))
    contents = {handle: bytes(old.storages.read(handle, 0, n)) for handle, n in old.storages.sizes().items()}
    expected = []
    for _ in range(3):
        hand.writer.run(1)
        expected.append((hand.get(x), hand.get(y)))
    new = Executor(GPU, Quota(64 << 20, 1.0))
    for handle, data in contents.items():
        new.storages.create(handle, len(data))
        new.storages.write(handle, 0, data)
    new.restore(state)
    hand.executor, hand.batch = new, new.executed
    for run in range(3):
        hand.writer.run(1)
        assert torch.equal(hand.get(x), expected[run][0])
        assert torch.equal(hand.get(y), expected[run][1])
    assert new.usage()["captured"] == 1


def test_failures_and_what_comes_after(hand):
    good = hand.call("aten::neg", hand.put(torch.ones(4)))
    wrong = hand.call("aten::linalg_cholesky_ex", hand.put(-torch.eye(3)), check_errors=True)
    (failure,) = hand.send()
    assert (failure.operator, failure.type) == ("aten::linalg_cholesky_ex", "RuntimeError")
    with pytest.raises(PoisonedError):
        list(hand.executor.answer(["read", wrong[0], 0, 4]))
    assert hand.get(good).tolist() == [-1] * 4


@pytest.mark.parametrize("nbytes", [1, 4, 4095, 4096, 4097, 9000])
def test_bytes_that_leave_the_gpu_while_it_goes_on(hand, nbytes):
    data = torch.randint(0, 255, (10_000,), dtype=torch.uint8)
    there = hand.put(data)
    twice = hand.call("aten::add.Tensor", there, there)
    hand.send()
    storages = hand.executor.storages
    for turn in range(3):  # buffers are used again
        for handle, expected in ((there, data), (twice, data + data)):
            start = 7 * turn
            copy = storages.leave(handle, start, nbytes)
            while not copy.arrived:
                pass
            assert bytes(copy.take()) == bytes(expected[start : start + nbytes].numpy())
    with pytest.raises(ProtocolError, match="must be inside"):
        storages.leave(there, 9_999, 2)


def test_a_gpu_is_busy_while_it_computes():
    meter = Meter(GPU)
    x = torch.randn(4096, 4096, device=GPU)
    for _ in range(4):
        meter.begin()
        for _ in range(10):
            x = torch.tanh(x @ x)
        meter.end()
        meter.collect(behind=True)
    torch.cuda.synchronize()
    meter.collect()
    assert meter.busy > 0.001
    busy = meter.busy
    meter.begin()
    meter.end()
    torch.cuda.synchronize()
    meter.collect()
    assert meter.busy - busy < busy
