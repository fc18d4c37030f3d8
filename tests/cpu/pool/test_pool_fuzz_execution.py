"""Damaged batches neither kill an executor nor take more than its quota: it goes on with what makes sense."""

import random
import resource
import struct
from contextlib import contextmanager

import pytest
import torch
from pool_hand import Hand
from pool_mutations import mutate, mutate_value, no_hang

from warpbus.errors import DeviceError, PoolError
from warpbus.pool.protocol.failures import CallFailure, PoisonedError
from warpbus.pool.protocol.instructions import Instruction, Writer, call_prefix, parse
from warpbus.pool.protocol.signature import Signature
from warpbus.pool.protocol.wire import decode, encode
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.execution import Executor

SEED = 20261121
QUOTA = 1 << 18
EXTREMES = (0, 1, 7, 101, 2**20, QUOTA, QUOTA + 1, 2**31, 2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


class Recorder(Hand):
    """Keeps the batches that it sends."""

    def __init__(self):
        super().__init__(Executor(torch.device("cpu"), Quota(QUOTA, 1.0)))
        self.batches = []

    def send(self):
        self.batches.append(bytes(self.writer.buffer))
        return super().send()


def recorded():
    """Batches as clients send them, with every instruction in them."""
    hand = Recorder()
    x, weight, bias = (hand.put(torch.randn(shape)) for shape in ((4, 8), (16, 8), (16,)))
    hidden = hand.call("aten::addmm", bias, x, hand.view(weight, (8, 16), (1, 8)))
    hand.call("aten::mul_.Tensor", hidden, 0.5)
    assert hand.send() == []
    normed = hand.call("aten::native_layer_norm", hidden, [16], bias, None, 1e-5)
    both = hand.call("aten::cat", [hidden, normed[0]], 1)
    hand.call("aten::sum.dim_IntList", both, [0], True)
    assert hand.send() == []
    indices = hand.put(torch.tensor([3, 0, 1]))
    picked = hand.call("aten::index_select", hidden, 0, indices)
    hand.call("aten::index.Tensor", hidden, [indices])
    hand.call("aten::nonzero", hand.view(hidden, (4, 4), (16, 2), 1))
    hand.call("aten::copy_", picked, hand.view(both, (3, 16), (32, 1)))
    assert hand.send() == []
    hand.call("aten::zeros", [2, 3], dtype=torch.float16, device=torch.device("cpu"))
    hand.call("aten::rand", [5], device=torch.device("cpu"))
    hand.call("aten::_to_copy", x, dtype=torch.bfloat16)
    hand.call("aten::topk", hidden, 2, 1, True, True)
    assert hand.send() == []
    hand.writer.seed(7)
    hand.writer.random(torch.get_rng_state().numpy().tobytes())
    hand.writer.record(3)
    twice = hand.call("aten::add.Tensor", x, x)
    inner = hand.call("aten::relu", twice)
    last = hand.call("aten::mm", inner, hand.view(weight, (8, 16), (1, 8)))
    hand.writer.free([inner])
    hand.writer.stop()
    hand.writer.run(3)
    hand.writer.run(3)
    assert hand.send() == []
    hand.writer.free([last, picked, 10**6])
    hand.writer.drop(3)
    hand.writer.free([int(both)])
    assert hand.send() == []
    return hand.batches


BATCHES = recorded()


def steps_of(payload, layouts):
    """A batch as lists of instructions and operands, signatures as values."""
    steps = []
    for kind, *operands in parse(memoryview(payload), layouts.__getitem__):
        if kind == Instruction.DEFINE:
            signature = Signature.decode(operands[1])
            layouts[operands[0]] = struct.Struct(
                f"<{len(signature.inputs)}Q{len(signature.numbers)}d{signature.results}Q"
            )
            operands[1] = decode(operands[1])
        elif kind == Instruction.WRITE:
            operands[2] = bytes(operands[2])
        elif kind == Instruction.RANDOM:
            operands[0] = bytes(operands[0])
        steps.append([kind, *operands])
    return steps


LAYOUTS = {}
STEPS = [steps_of(batch, LAYOUTS) for batch in BATCHES]
SIGNATURES = [step[2] for steps in STEPS for step in steps if step[0] == Instruction.DEFINE]


def written(steps):
    writer = Writer()
    for kind, *operands in steps:
        if kind == Instruction.CALL:
            number, values = operands
            writer.call(call_prefix(number % 2**32) + b"".join(packed(value) for value in values))
        elif kind == Instruction.DEFINE:
            writer.define(operands[0] % 2**32, encode(operands[1]))
        elif kind in (Instruction.RECORD, Instruction.RUN, Instruction.DROP):
            getattr(writer, Instruction(kind).name.lower())(operands[0] % 2**32)
        else:
            getattr(writer, Instruction(kind).name.lower())(*operands)
    return bytes(writer.take())


def packed(value):
    return struct.pack("<d" if isinstance(value, float) else "<Q", value)


def rearranged(rng, corpus):
    """A batch whose instructions are well-formed, and make less sense than they did."""
    steps = [list(step) for step in rng.choice(corpus)]
    handles = range(95, 145)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = int(rng.random() * len(steps))
        step = steps[at]
        way = rng.random()
        if way < 0.1:
            del steps[at]
        elif way < 0.2:
            steps.insert(int(rng.random() * len(steps)), list(step))
        elif way < 0.35:
            steps.insert(at, list(rng.choice(rng.choice(corpus))))
        elif way < 0.4:
            rng.shuffle(steps)
        elif step[0] == Instruction.DEFINE:
            step[2] = mutate_value(rng, [step[2], *SIGNATURES] if rng.random() < 0.2 else [step[2]])
        elif step[0] in (Instruction.CALL, Instruction.FREE):
            values = list(step[-1])
            if values:
                values[int(rng.random() * len(values))] = rng.choice(EXTREMES if rng.random() < 0.2 else handles)
            step[-1] = tuple(values)
        elif step[0] == Instruction.RANDOM:
            state = bytearray(step[1])
            state[rng.randrange(24)] = rng.randrange(256)  # where it says which words are used up
            step[1] = bytes(state)
        elif len(step) > 1:
            step[1 + int(rng.random() * min(2, len(step) - 1))] = rng.choice(
                EXTREMES if rng.random() < 0.7 else handles
            )
        if not steps:
            return b""
    return written(steps)


def check_sound(executor):
    """What is charged is what is there, within the quota, each storage with memory of its own."""
    storages = executor.storages
    assert 0 <= storages.used == sum(each.nbytes for each in storages.live.values()) <= storages.peak <= QUOTA
    memory = {}
    for handle, storage in storages.live.items():
        if storage.base is not None:
            untyped = storage.base.untyped_storage()
            assert untyped.nbytes() == storage.nbytes
            if storage.nbytes:
                assert memory.setdefault(untyped.data_ptr(), handle) == handle
            for place, tensor in storage.views.items():
                assert place.geometry.extent <= storage.nbytes
                assert tensor.untyped_storage().data_ptr() == untyped.data_ptr()


def check_alive(executor):
    """After all that, a client that makes sense is served, has all of the quota, and gets the right answers."""
    writer = Writer()
    writer.stop()
    for program, *_ in executor.state()["programs"]:
        writer.drop(program)
    executor.execute(executor.executed + 1, memoryview(writer.take()))
    writer.free(list(executor.storages.live))
    executor.execute(executor.executed + 1, memoryview(writer.take()))
    assert executor.storages.used == 0
    hand = Hand(executor)
    hand.next = 10**9
    x = torch.randn(QUOTA // 16)
    there = hand.put(x)
    assert torch.equal(hand.get(hand.call("aten::add.Tensor", there, there)), x + x)


@contextmanager
def memory_for(gigabytes):
    """A process that would take much more gets an error."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + gigabytes * 10**9, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def batter(damage, corpus, seed, executors, batches):
    """Let executors have some good batches and many damaged ones; how many of those were refused or failed."""
    rng = random.Random(seed)
    failed = 0
    messages = []
    for _ in range(executors):
        executor = Executor(torch.device("cpu"), Quota(QUOTA, 1.0))
        for _ in range(batches):
            payload = rng.choice(BATCHES) if rng.random() < 0.3 else damage(rng, corpus)
            try:
                number = executor.executed + 1
                failures = executor.execute(number, memoryview(payload))
                assert all(isinstance(each, CallFailure) and each.batch == number for each in failures)
                failed += bool(failures)
            except (DeviceError, PoolError) as error:
                messages.append(str(error))
            except BaseException as error:
                error.add_note(f"input: {payload.hex()}")
                raise
            check_sound(executor)
        for handle in [*executor.storages.live]:
            try:
                for _ in executor.answer(["describe", [handle]]):
                    pass
            except PoisonedError:
                pass
        state = decode(encode(executor.state()))
        assert state["executed"] == executor.executed
        check_alive(executor)
    assert not [message for message in messages if "\n" in message or len(message) > 5000]
    return len(messages), failed


@pytest.mark.parametrize(("damage", "corpus"), [(mutate, BATCHES), (rearranged, STEPS)], ids=["damaged", "rearranged"])
def test_damaged_batches(damage, corpus):
    with no_hang(), memory_for(4):
        refused, failed = batter(damage, corpus, SEED, executors=12, batches=60)
    assert refused > 0
    assert failed > 0


def test_one_handle_for_two_results_is_not_charged_once():
    hand = Hand(Executor(torch.device("cpu"), Quota(QUOTA, 1.0)))
    x = hand.put(torch.randn(6, 4))
    values, indices = hand.call("aten::topk", x, 2, 1, True, True)
    data = bytes(hand.writer.take()).replace(packed(int(indices)), packed(int(values)))
    for _ in range(3):
        [failure] = hand.executor.execute(hand.executor.executed + 1, memoryview(data))
        assert (failure.type, failure.operator) == ("ProtocolError", "aten::topk")
        check_sound(hand.executor)
        hand.writer.free([x, values])
        hand.executor.execute(hand.executor.executed + 1, memoryview(hand.writer.take()))
        assert hand.executor.storages.used == 0


def test_what_a_program_makes_must_not_be_something_else():
    hand = Hand(Executor(torch.device("cpu"), Quota(QUOTA, 1.0)))
    x = hand.put(torch.randn(4, 8))
    hand.writer.record(1)
    hand.call("aten::neg", x)
    y = hand.call("aten::relu", x)
    hand.writer.stop()
    hand.writer.new(y, 100)
    hand.writer.run(1)
    hand.batch += 1
    [failure] = hand.executor.execute(hand.batch, memoryview(hand.writer.take()))
    assert failure.type == "ProtocolError"
    assert "is in use for others" in failure.message
    check_sound(hand.executor)
