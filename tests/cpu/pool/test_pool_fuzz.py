"""130,000 damaged messages: each raises an error of the pool at worst, and costs no memory."""

import random
import socket
import struct
import tracemalloc

import pytest
import torch
from pool_mutations import mutate, mutate_value, no_hang

from warpbus.errors import ConnectionLostError, DeviceError, PoolError, ProtocolError
from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.frames import HEADER, MAX_FRAME, PROTOCOL, Kind
from warpbus.pool.protocol.geometry import Geometry, contiguous
from warpbus.pool.protocol.instructions import Instruction, Writer, call_prefix, layout, parse
from warpbus.pool.protocol.signature import DevicePlaceholder, Input, New, Number, Same, Signature
from warpbus.pool.protocol.wire import decode, encode

SEED = 20261121
MOST_MESSAGE = 5000  # characters of an error: a tensor of 64 axes has as many sizes and strides

VALUES = [
    None,
    [True, False, -1, 2**63 - 1, 1.5, 1j, "text", "文", b"\x00\xff", torch.bfloat16, torch.strided],
    {"protocol": PROTOCOL, "torch": "2.13.0", "key": bytes(32), "claim": False},
    {"executed": 7, "device": "cuda", "name": "H100", "memory": 10**10, "share": 0.25, "capability": [9, 0]},
    ["read", 17, 0, 4096],
    ["describe", list(range(20))],
    {"operation": "lease", "arguments": {"memory": 8 * 10**9, "share": 0.5, "on": None, "movable": True}},
    {"a": {"b": {"c": [[[(((),),)]]]}}},
    [[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]],
    ["x" * 300, [b"y" * 100] * 3, {str(key): key for key in range(12)}],
]

ROW = contiguous(torch.float32, (4, 8))
SIGNATURES = [
    Signature(
        "aten::add.Tensor",
        (Input(0), Input(1)),
        (("alpha", Number("int", 0)),),
        (ROW, ROW),
        ("int",),
        (New(ROW, 128),),
    ),
    Signature("aten::mul_.Tensor", (Input(0), Number("float", 0)), (), (ROW,), ("float",), (Same(0),)),
    Signature("aten::nonzero", (Input(0),), (), (Geometry(torch.bool, (3, 2), (1, 3), 5),), (), None),
    Signature(
        "aten::cat",
        ((Input(0), Input(1), Input(2)), 1),
        (),
        (ROW, ROW, contiguous(torch.float32, (4, 1))),
        (),
        (New(contiguous(torch.float32, (4, 17)), 272),),
    ),
    Signature(
        "aten::zeros",
        ((2, 3),),
        (("dtype", torch.float16), ("layout", torch.strided), ("device", DevicePlaceholder()), ("pin_memory", False)),
        (),
        (),
        (New(contiguous(torch.float16, (2, 3)), 12),),
    ),
    Signature(
        "aten::native_layer_norm",
        (Input(0), (8,), Input(1), None, 1e-5),
        (),
        (ROW, contiguous(torch.float32, (8,))),
        (),
        (New(ROW, 128), New(contiguous(torch.float32, (4, 1)), 16), None),
    ),
]
FORMS = {number: layout(len(each.inputs), each.numbers, each.results) for number, each in enumerate(SIGNATURES)}


def batches():
    """Payloads of batches that hold all instructions."""
    found = []
    writer = Writer()
    writer.new(1, 4096)
    writer.define(0, SIGNATURES[0].encode())
    writer.call(call_prefix(0) + FORMS[0].pack(1, 1, 3, 2))
    writer.call(call_prefix(1) + FORMS[1].pack(2, 0.5))
    writer.write(1, 16, bytes(range(100)))
    writer.free([1, 2, 3])
    found.append(bytes(writer.take()))
    writer.known(5, 0, 4096, bytes(32))
    writer.seed(2**63)
    writer.random(bytes(range(100)))
    writer.record(1)
    writer.call(call_prefix(3) + FORMS[3].pack(1, 2, 3, 4))
    writer.call(call_prefix(2) + FORMS[2].pack(1, *range(SIGNATURES[2].results)))
    writer.stop()
    writer.run(1)
    writer.drop(1)
    found.append(bytes(writer.take()))
    writer.call(call_prefix(5) + FORMS[5].pack(1, 2, 3, 4))
    writer.call(call_prefix(4) + FORMS[4].pack(9))
    found.append(bytes(writer.take()))
    writer.free(list(range(50)))
    found.append(bytes(writer.take()))
    return found


def form(number):
    if number not in FORMS:
        raise DeviceError(f"a call of kind {number}, which was not defined")
    return FORMS[number]


def check_wire(data):
    found = encode(decode(data))
    assert encode(decode(found)) == found


def check_signature(data):
    found = Signature.decode(data)
    assert Signature.decode(found.encode()).encode() == found.encode()
    assert all(index < len(found.inputs) for index in found.written)
    assert found.results >= 0


def check_definition(value):
    check_signature(encode(value))


def check_batch(data):
    for instruction in parse(memoryview(data), form):
        assert instruction[0] in set(Instruction)


CHECKS = {
    "wire": (check_wire, mutate, [encode(value) for value in VALUES], 40_000),
    "signature": (check_signature, mutate, [each.encode() for each in SIGNATURES], 25_000),
    "definition": (check_definition, mutate_value, [decode(each.encode()) for each in SIGNATURES], 15_000),
    "batch": (check_batch, mutate, batches(), 40_000),
}


def refusal(check, data):
    """The message of the DeviceError or PoolError of a check, or None; any other error fails the test."""
    try:
        check(data)
    except (DeviceError, PoolError) as error:
        return line_of(error, data)
    except BaseException as error:
        error.add_note(f"input: {data!r}")
        raise
    return None


def line_of(error, data):
    """What an error says, which is one line of a sensible length."""
    text = str(error)
    assert "\n" not in text, data
    assert len(text) < MOST_MESSAGE, data
    return text


@pytest.mark.parametrize("name", CHECKS)
def test_valid_messages_are_read(name):
    check, _, corpus, _ = CHECKS[name]
    assert [refusal(check, data) for data in corpus] == [None] * len(corpus)


@pytest.mark.parametrize("name", CHECKS)
def test_damaged_messages(name):
    check, damage, corpus, count = CHECKS[name]
    rng = random.Random(SEED)
    with no_hang():
        refused = sum(refusal(check, damage(rng, corpus)) is not None for _ in range(count))
    # Some damage gives another valid message; most does not.
    assert count // 4 < refused < count


@pytest.mark.parametrize("name", CHECKS)
def test_damaged_messages_cost_no_memory(name):
    check, damage, corpus, _ = CHECKS[name]
    rng = random.Random(SEED + 1)
    tracemalloc.start()
    try:
        for _ in range(1500):
            data = damage(rng, corpus)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            refusal(check, data)
            size = len(data) if isinstance(data, bytes) else len(encode(data))
            # Python's objects take more than their bytes did, but in proportion.
            assert tracemalloc.get_traced_memory()[1] - before < 100 * size + 100_000, data
    finally:
        tracemalloc.stop()


def frames_of(data):
    """What a stream of frames holds, read in the simplest way: the frames before the first nonsense or the end."""
    found = []
    while len(data) >= HEADER.size:
        nbytes, kind, number = HEADER.unpack_from(data)
        end = HEADER.size + nbytes
        if kind not in set(Kind) or nbytes > MAX_FRAME or end > len(data):
            break
        found.append((kind, number, data[HEADER.size : end]))
        data = data[end:]
    return found


STREAMS = [
    b"".join(
        HEADER.pack(len(payload), kind, number) + payload
        for number, (kind, payload) in enumerate(zip(Kind, payloads, strict=False))
    )
    for payloads in (
        [encode(value) for value in VALUES],
        [b"", b"x" * 1000, b"", b"y" * 3],
        [b"z" * 20_000, b"", b"w" * 50_000],
        [b"v" * 70_000, b"end"],
    )
] + [struct.pack("<IBxxxQ", 0, 11, 0) * 30]


def received(data, rng):
    """What a channel gives of these bytes, which come in pieces; then the other side closes."""
    left, right = socket.socketpair()
    channel = Channel(left, "the peer")
    found = []
    try:
        cuts = sorted(int(rng.random() * (len(data) + 1)) for _ in range(int(rng.random() * 3)))
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            right.sendall(data[start:end])
            while (frame := channel.receive(0)) is not None:
                found.append((frame.kind, frame.number, bytes(frame.payload)))
        right.close()
        while True:
            frame = channel.receive(90)
            assert frame is not None, "neither a frame nor the end"
            found.append((frame.kind, frame.number, bytes(frame.payload)))
    except ConnectionLostError as lost:
        line_of(lost, data)
        assert channel.fileno() == -1
        return found
    finally:
        right.close()
        channel.close()


def test_damaged_streams_of_frames():
    rng = random.Random(SEED)
    with no_hang():
        for _ in range(10_000):
            data = mutate(rng, STREAMS)
            assert received(data, rng) == frames_of(data), data.hex()


def test_damaged_streams_cost_one_frame_at_most():
    rng = random.Random(SEED + 1)
    announced = HEADER.pack(MAX_FRAME, Kind.DATA, 1) + bytes(100)
    for data in [announced, *(mutate(rng, STREAMS) for _ in range(300))]:
        tracemalloc.start()
        try:
            received(data, rng)
            assert tracemalloc.get_traced_memory()[1] < MAX_FRAME + 4 * len(data) + 200_000
        finally:
            tracemalloc.stop()


def test_a_tensor_of_very_many_axes_costs_nothing():
    axes = [2**62] * 100_000
    value = ["aten::relu", [{"input": 0}], [], [[torch.float32, axes, axes, 0]], [], None]
    with no_hang(), pytest.raises(ProtocolError, match="100000 axes"):
        Signature.decode(encode(value))
