"""Kernels whose blocks wait for each other, on several streams at once, and launches from several threads."""

import threading

import pytest
import torch
from tile_errors import assert_close_everywhere

from warpbus.cuda.jit import architecture
from warpbus.kernels.ops import wna16_sm90
from warpbus.kernels.ops.attention import decode_attention
from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.wna16 import wna16_linear
from warpbus.qtensor import QTensor, Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

ARCH = architecture(0) if torch.cuda.is_available() else "sm_80"
STREAMS, ROUNDS = 4, 50


@pytest.fixture(autouse=True)
def _seed(seed):
    """Each test has random numbers of its own."""


def weight_of(n, k):
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    scales = ((torch.rand(n, k // 128, device="cuda") + 0.5) / (15 * k**0.5)).half()
    return QTensor.from_codes(Scheme.parse("w4a16-g128"), codes, scales, None)


def attended(context):
    """A call of decode_attention for two rows of `context` + 1 tokens, whose blocks combine what they have."""
    kv_heads, heads, size = 2, 32, 128
    qkv = torch.randn(2, (heads + 2 * kv_heads) * size, device="cuda").half()
    cache = torch.randn(2, 2 * (context // 32 + 1), kv_heads, 32, size, device="cuda").half()
    table = torch.ones(context + 1, 64, device="cuda")
    positions = torch.full((2,), context, dtype=torch.int32, device="cuda")
    blocks = torch.arange(cache.shape[1], dtype=torch.int32, device="cuda").view(2, -1)
    shape = {"heads": heads, "interleaved": True, "limit": context + 1}
    return lambda: decode_attention(qkv, table, positions, blocks, cache[0], cache[1], **shape)


def on_streams(calls):
    """What each call gives, ROUNDS times, on a stream of its own; all streams are filled before the GPU begins."""
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    gate = torch.cuda.Event()
    gate.record()
    results = [[] for _ in calls]
    for stream in streams:
        stream.wait_event(gate)
    for _ in range(ROUNDS):
        for call, stream, found in zip(calls, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(call())
    torch.cuda.synchronize()
    return results


@pytest.mark.skipif(ARCH != "sm_90a", reason="needs sm_90a")
def test_products_that_hand_parts_on_run_beside_each_other():
    weight = weight_of(4608, 4096)
    packed = pack(weight, torch.float16)
    inputs = [torch.randn(rows, 4096, device="cuda").half() for rows in (24, 200, 700, 1500)]

    def multiply(x):
        out = x.new_full((len(x), 4608), float("nan"))
        wna16_sm90.multiply(x, packed, None, out)
        return out

    dense = weight.dequantize(torch.float64)
    expected = [multiply(x) for x in inputs]
    for x, alone in zip(inputs, expected, strict=True):
        assert_close_everywhere(alone, x.double() @ dense.T, torch.finfo(torch.float16).eps)
    found = on_streams([lambda x=x: multiply(x) for x in inputs])
    assert all(
        torch.equal(each, alone) for each_stream, alone in zip(found, expected, strict=True) for each in each_stream
    )


def test_attention_that_combines_runs_beside_each_other_and_products():
    x, packed = torch.randn(4, 4096, device="cuda").half(), pack(weight_of(4608, 4096), torch.float16)
    calls = [*(attended(context) for context in (300, 4000, 9000)), lambda: wna16_linear(x, packed)]
    expected = [call() for call in calls]
    found = on_streams(calls)
    assert all(
        torch.equal(each, alone) for each_stream, alone in zip(found, expected, strict=True) for each in each_stream
    )


def test_threads_launch_at_once():
    """Each on its own stream, with shapes that ask for different amounts of shared memory of the same kernels."""
    packed = {k: pack(weight_of(512, k), torch.float16) for k in (1024, 4096, 8192)}
    cases = [(torch.randn(m, k, device="cuda").half(), packed[k]) for k in packed for m in (1, 3, 8, 16)]
    expected = [wna16_linear(x, weight) for x, weight in cases]
    torch.cuda.synchronize()
    wrong = []
    ready = threading.Barrier(STREAMS)

    def run(first):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                ready.wait()
                for round_ in range(ROUNDS):
                    at = (first * 3 + round_) % len(cases)
                    if not torch.equal(wna16_linear(*cases[at]), expected[at]):
                        wrong.append((first, round_, at))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
