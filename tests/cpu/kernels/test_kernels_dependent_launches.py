"""A kernel does not start early where the host has just copied what it reads before it waits for the copy."""

import pytest
import torch

from warpbus.cuda import driver
from warpbus.kernels.ops import attention, gemv, trellis_decode, wna16_decode
from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.trellis_packed import pack_trellis
from warpbus.qtensor import QTensor, Scheme


@pytest.fixture
def launches(monkeypatch):
    """The arguments and options of what is launched, by their names."""
    made = []

    def kernel(grid, block, **arguments):
        made.append(arguments)

    for module in (gemv, attention):
        monkeypatch.setattr(module, "_kernel", lambda *_: kernel)
    monkeypatch.setattr(wna16_decode.DecodeVariant, "kernel", lambda *_: kernel)
    monkeypatch.setattr(trellis_decode.TrellisVariant, "kernel", lambda *_: kernel)
    for module in (wna16_decode, trellis_decode):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(driver, "attribute", lambda which, device: 227 * 1024)
    return made


def unaligned(tensor):
    """The same numbers at an address that is no multiple of 16 bytes."""
    room = tensor.new_empty(tensor.numel() + 1)
    return room[1:].copy_(tensor.flatten()).view(tensor.shape)


def test_gemv(launches):
    weight, x = torch.zeros(8, 64, dtype=torch.float16), torch.zeros(64, dtype=torch.float16)
    gemv.launch(weight, x, None, "none")
    gemv.launch(weight.T.contiguous().T, x, None, "none")
    gemv.launch(weight, torch.zeros(128, dtype=torch.float16)[::2], None, "none")  # read after the wait
    assert [launch["dependent"] for launch in launches] == [True, False, True]


def test_wna16_decode(launches):
    codes = torch.zeros(32, 128, dtype=torch.uint8)
    weight = pack(QTensor.from_codes(Scheme.parse("w4a16-g128"), codes, torch.ones(32, 1).half(), None), torch.float16)
    x, norm = torch.zeros(2, 128, dtype=torch.float16), torch.ones(128, dtype=torch.float16)
    for each in (norm, unaligned(norm), torch.ones(256, dtype=torch.float16)[::2]):
        wna16_decode.multiply(x, weight, None, each, 1e-5, None, False, x.new_empty(2, 32))
    wna16_decode.multiply(unaligned(x), weight, None, norm, 1e-5, None, False, x.new_empty(2, 32))
    assert [launch["dependent"] for launch in launches] == [True, False, False, True]
    copied = [launch["norm"] for launch in launches[1:3]]
    assert all(each.data_ptr() % 16 == 0 and each.is_contiguous() and torch.equal(each, norm) for each in copied)


def test_trellis_decode(launches):
    weight = QTensor(
        Scheme.parse("w3a16-trellis"), torch.zeros(32, 12, dtype=torch.int32), torch.ones(32, 1), None, (32, 128)
    )
    packed, x = pack_trellis(weight, torch.float16), torch.zeros(2, 128, dtype=torch.float16)
    norm = torch.ones(128, dtype=torch.float16)
    plan = trellis_decode.choose(2, 32, 128, 3, False, 132, 227 * 1024)
    assert plan is not None
    for each in (norm, unaligned(norm)):
        trellis_decode.multiply(x, packed, None, each, 1e-5, None, False, x.new_empty(2, 32), plan)
    trellis_decode.multiply(unaligned(x), packed, None, norm, 1e-5, None, False, x.new_empty(2, 32), plan)
    assert [launch["dependent"] for launch in launches] == [True, False, True]
    assert all(launch[name].data_ptr() % 16 == 0 for launch in launches for name in ("x", "norm"))


def test_attention_takes_no_copy_as_settled(launches, monkeypatch):
    monkeypatch.setattr(attention, "has_kernel", lambda *_: True)
    monkeypatch.setattr(attention, "_device", lambda device: attention.AttentionDevice(132, 228 * 1024))
    qkv = torch.zeros(2, (8 + 2 * 2) * 64, dtype=torch.float16)
    cache = torch.zeros(2, 4, 2, 32, 64, dtype=torch.float16)
    table, blocks = torch.zeros(64, 64), torch.zeros(2, 2, dtype=torch.int32)
    positions = torch.zeros(2, dtype=torch.int32)
    strided = torch.zeros(4, dtype=torch.int32)[::2]
    for inputs_ready, each in ((True, positions), (False, positions), (True, strided)):
        attention._launch(qkv, table, each, blocks, cache[0], cache[1], None, None, 8, False, 64, True, inputs_ready)
    assert [launch["inputs_ready"] for launch in launches] == [True, False, False]
