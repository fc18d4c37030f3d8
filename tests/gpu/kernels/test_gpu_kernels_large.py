"""Tensors and caches of more than 2^31 elements: offsets of 32 bits would wrap around."""

import pytest
import torch
from tile_errors import assert_close_everywhere

from warpbus.kernels.ops.attention import decode_attention
from warpbus.kernels.ops.gemm import linear
from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.rope import rope_and_cache
from warpbus.kernels.ops.wna16 import wna16_linear
from warpbus.qtensor import QTensor, Scheme

GIGABYTES = 30
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < GIGABYTES * 2**30,
        reason=f"needs an NVIDIA GPU with {GIGABYTES} GB",
    ),
]
HALF = torch.float16
ROWS, COLUMNS, K = 131_072 + 40, 16_640, 128  # 2.18e9 results


@pytest.fixture(autouse=True)
def _seed(seed):
    """Each test has random numbers of its own; their memory is given back."""
    yield
    torch.cuda.empty_cache()


def check_ends(out, x, dense):
    """The rows at both ends and around the 2^31st element, against float64."""
    border = 2**31 // COLUMNS
    for rows in (slice(0, 64), slice(border - 32, border + 32), slice(ROWS - 64, ROWS)):
        expected = x[rows].double() @ dense.double().T
        assert_close_everywhere(out[rows], expected, torch.finfo(HALF).eps)


def test_gemm_output():
    x, weight = torch.randn(ROWS, K, device="cuda").to(HALF), torch.randn(COLUMNS, K, device="cuda").to(HALF)
    out = linear(x, weight)
    assert out.numel() > 2**31
    check_ends(out, x, weight)


def test_wna16_output():
    codes = torch.randint(0, 16, (COLUMNS, K), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(COLUMNS, 1, device="cuda") + 0.5).to(HALF) / 64
    weight = QTensor.from_codes(Scheme.parse("w4a16-g128"), codes, scales, None)
    x = torch.randn(ROWS, K, device="cuda").to(HALF)
    out = wna16_linear(x, pack(weight, HALF))
    assert out.numel() > 2**31
    check_ends(out, x, weight.dequantize(torch.float64))


@pytest.mark.parametrize("size", [128])
def test_paged_cache(size):
    """The last blocks give what the same contents give at the beginning of a small cache."""
    heads, kv_heads, block = 8, 2, 32
    many = 2**31 // (kv_heads * block * size) + 64
    positions = torch.tensor([70, 95], dtype=torch.int32, device="cuda")
    qkv = torch.randn(2, (heads + 2 * kv_heads) * size, device="cuda").to(HALF)
    table = torch.randn(128, 64, device="cuda")
    past = torch.randn(2, 6, kv_heads, block, size, device="cuda").to(HALF)
    of_rows = torch.arange(6, device="cuda").view(2, 3)

    def run(blocks):
        cache = torch.zeros(2, blocks, kv_heads, block, size, dtype=HALF, device="cuda")
        places = of_rows + blocks - 6
        cache[:, -6:] = past
        out = decode_attention(
            qkv, table, positions, places.int(), cache[0], cache[1], heads=heads, interleaved=True, limit=96
        )
        slots = places[[0, 1], (positions // block).long()] * block + positions % block
        rotated = rope_and_cache(qkv, table, positions, slots, cache[0], cache[1], heads=heads, interleaved=True)
        assert cache[0].numel() > 2**31 or blocks == 6
        assert not cache[:, :-6].any()
        return out, *rotated, cache[:, -6:].clone()

    small = run(6)
    assert all(map(torch.equal, run(many), small))
