"""Batches for a real executor: random numbers, operators in place and with results, a failure, storages that go."""

import struct

import torch

from warpbus.pool.protocol.geometry import contiguous
from warpbus.pool.protocol.instructions import Writer, call_prefix
from warpbus.pool.protocol.signature import Input, New, Number, Same, Signature
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.migration_source import MigrationSource

QUOTA = Quota(64 * 2**20, 1.0)
STATE, MOMENT = 1, 2  # handles of storages that every batch writes
WEIGHTS = 3  # that none writes
CUT_SHORT = 9  # that failed
ELEMENTS = 1000

_VECTOR = contiguous(torch.float32, (ELEMENTS,))
_NBYTES = 4 * ELEMENTS
_SIGNATURES = (
    Signature("aten::normal_", (Input(0),), (), (_VECTOR,), (), (Same(0),)),
    Signature("aten::mul.Tensor", (Input(0), Input(1)), (), (_VECTOR, _VECTOR), (), (New(_VECTOR, _NBYTES),)),
    Signature(
        "aten::add_.Tensor",
        (Input(0), Input(1)),
        (("alpha", Number("float", 0)),),
        (_VECTOR, _VECTOR),
        ("float",),
        (Same(0),),
    ),
    Signature("aten::nonzero", (Input(0),), (), (_VECTOR,), (), None),
)


def lease(device: torch.device, quota: Quota = QUOTA) -> Executor:
    """An empty executor."""
    return Executor(device, quota)


def ask(source: MigrationSource) -> None:
    """Begin a move: ask the destination, and wait until it accepts the lease."""
    source.ask()
    while not source.is_accepted(0.05):
        pass


def batch(number: int, weights: int = 100_000) -> memoryview:
    """The batch of this number, of a program that begins with 1; its weights take so many bytes."""
    writer = Writer()
    if number == 1:
        for at, signature in enumerate(_SIGNATURES):
            writer.define(at, signature.encode())
        writer.new(STATE, _NBYTES)
        writer.new(MOMENT, _NBYTES)
        writer.new(WEIGHTS, weights)
        for start in range(0, weights, 2**20):
            size = min(2**20, weights - start)
            writer.write(WEIGHTS, start, torch.arange(size).to(torch.uint8).numpy().tobytes())
        writer.seed(7)
        _call(writer, 3, "QQ", WEIGHTS + 100, CUT_SHORT)  # of a storage that there is not
    _call(writer, 0, "Q", STATE)
    product = 1000 + number
    _call(writer, 1, "QQQ", STATE, MOMENT, product)
    _call(writer, 2, "QQd", MOMENT, STATE, 0.5)
    _call(writer, 2, "QQd", MOMENT, product, 0.25)
    if number > 3:
        writer.free([product - 3])
    return memoryview(bytes(writer.take()))


def execute(executor: Executor, number: int, weights: int = 100_000) -> None:
    executor.execute(number, batch(number, weights))


def contents(executor: Executor) -> dict[int, bytes]:
    """The bytes of all storages."""
    sizes = executor.storages.sizes()
    return {handle: bytes(executor.storages.read(handle, 0, nbytes)) for handle, nbytes in sizes.items()}


def _call(writer: Writer, number: int, form: str, *operands: float) -> None:
    writer.call(call_prefix(number) + struct.pack("<" + form, *operands))
