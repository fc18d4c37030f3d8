"""A cache of 4-bit codes on a GPU: the write and the read against the reference, decode attention against float64."""

import pytest
import torch
from tile_errors import assert_close_everywhere

from warpbus.errors import UsageError
from warpbus.kernels.ops.attention import decode_attention, has_kernel
from warpbus.kernels.ops.cache import gather_cache
from warpbus.kernels.ops.rope import rope_and_cache
from warpbus.kernels.reference import cache as reference
from warpbus.kernels.reference.cache import INT4, quantize
from warpbus.kernels.reference.rope import rotate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *HALVES]
NOWHERE = 2**31 - 1  # an entry of a block table that may not be used
# tokens, heads, kv_heads, head_dim, rotary_dim, interleaved, tokens of a block
CASES = [
    (1, 32, 2, 128, 64, True, 32),  # ChatGLM2
    (154, 32, 2, 128, 64, True, 32),
    (99, 8, 2, 128, 128, False, 16),  # Llama, Qwen
    (10, 3, 1, 64, 64, False, 256),
    (7, 2, 2, 256, 64, False, 32),
    (6, 9, 3, 80, 40, False, 64),  # rotary_dim / 2 is no multiple of 8; blocks of 16 are rotated
    (6, 4, 2, 96, 96, False, 32),
    (6, 9, 3, 10, 6, True, 16),
    (5, 4, 2, 264, 64, True, 32),  # without a kernel
]


@pytest.fixture(autouse=True)
def _seed(seed):
    """Each test has random numbers of its own."""


def matrix(size):
    """The Hadamard matrix of a vector in float64, blocks of it on the diagonal."""
    block = torch.ones(1, 1, dtype=torch.float64)
    while len(block) < size & -size:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1))) * 0.5**0.5
    return torch.block_diag(*[block] * (size // len(block))).cuda()


def angles(positions, rotary):
    turns = torch.rand(positions, rotary // 2, device="cuda") * 6.3
    return torch.cat((turns.cos(), turns.sin()), dim=-1)


def empty(blocks, kv_heads, block, size):
    """Keys, values and their scales, the second of three layers; codes of all ones, and NaN."""
    shape = (blocks, 3, 2, kv_heads, block)
    codes = torch.full((*shape, size // 2), 255, dtype=torch.uint8, device="cuda")[:, 1]
    scales = torch.full(shape, float("nan"), device="cuda")[:, 1]
    return codes[:, 0], codes[:, 1], scales[:, 0], scales[:, 1]


def by_token(cache):
    """A cache as a list of slots, `[blocks * B, kv_heads, ...]`."""
    return cache.transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_write(case, dtype):
    tokens, heads, kv_heads, size, rotary, interleaved, block = case
    qkv, table = torch.randn(tokens, (heads + 2 * kv_heads) * size, device="cuda").to(dtype), angles(99, rotary)
    qkv[0, heads * size :] = 0
    count = tokens // block + 2
    stored = empty(count, kv_heads, block, size)
    positions = torch.randint(0, 99, (tokens,), device="cuda").int()
    slots = torch.randperm(count * block, device="cuda")
    slots, others = slots[:tokens], slots[tokens:]
    _, k, v = rope_and_cache(qkv, table, positions, slots, *stored, heads=heads, interleaved=interleaved)
    for codes, scales, new in zip(stored[:2], stored[2:], (k, v), strict=True):
        wanted, wanted_scales = quantize(new.cpu(), INT4)
        found, found_scales = by_token(codes)[slots].cpu(), by_token(scales)[slots].cpu()
        assert torch.equal(found_scales, wanted_scales)
        assert torch.equal(found, wanted)
        assert (found_scales[0] == 0).all()
        assert (by_token(codes)[others] == 255).all()
        assert by_token(scales)[others].isnan().all()


def test_nan_is_not_hidden():
    qkv = torch.randn(2, 12 * 32, device="cuda")
    qkv[1, 10 * 32 + 3] = float("nan")  # in the first of two heads of values
    stored = empty(1, 2, 16, 32)
    slots = torch.arange(2, device="cuda")
    rope_and_cache(qkv, angles(2, 32), slots.int(), slots, *stored, heads=8, interleaved=True)
    assert by_token(stored[3])[:2].isnan().tolist() == [[False, False], [True, False]]
    assert not by_token(stored[2])[:2].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kv_heads", "size"), [(2, 128), (1, 64), (32, 128), (3, 96), (4, 256), (2, 32), (5, 160), (2, 192), (3, 24)]
)
def test_read(kv_heads, size, dtype):
    for block, tokens in ((32, 1), (32, 31), (32, 32), (32, 1000), (16, 77), (64, 500), (256, 300)):
        count = -(-tokens // block)
        shape = (count + 4, 3, 2, kv_heads, block)
        codes = torch.randint(0, 256, (*shape, size // 2), device="cuda", dtype=torch.uint8)[:, 1, 1]
        scales = (torch.rand(shape, device="cuda") + 0.01)[:, 1, 1]
        blocks = torch.full((count + 1,), NOWHERE, dtype=torch.int64, device="cuda")  # the last one is not there
        blocks[:count] = torch.randperm(count + 4, device="cuda")[:count]
        wanted = reference.gather_cache(codes, scales, blocks, tokens, dtype)
        assert wanted.isfinite().all()
        for table in (blocks, blocks.int(), blocks.int().repeat_interleave(3)[::3]):
            torch.full_like(wanted, float("nan"))  # poison where the output will be
            assert torch.equal(gather_cache(codes, scales, table, tokens, dtype), wanted)


def problem(positions, dtype, kv_heads=2, group=16, size=128, rotary=64, limit=None, block=32, value=1.0):
    """Arguments of decode attention; what no row has written is poison."""
    heads, limit, rows = kv_heads * group, limit or max(positions) + 1, len(positions)
    used = [position // block + 1 for position in positions]
    blocks = torch.full((rows, -(-limit // block)), NOWHERE, dtype=torch.int32)
    free = (torch.randperm(sum(used) + 5) + 1).int()
    for row, count in enumerate(used):
        blocks[row, :count], free = free[:count], free[count:]
    stored = empty(sum(used) + 6, kv_heads, block, size)
    for row, position in enumerate(positions):
        at = torch.arange(position + 1)
        places = blocks[row, at // block].long().cuda(), slice(None), (at % block).cuda()
        for which, magnitude in ((0, 1.0), (1, value)):
            codes, scales = quantize(torch.randn(position + 1, kv_heads, size, device="cuda") * magnitude, INT4)
            stored[which][places], stored[which + 2][places] = codes, scales
    return {
        "qkv": torch.randn(rows, (heads + 2 * kv_heads) * size, device="cuda").to(dtype),
        "table": angles(limit, rotary),
        "positions": torch.tensor(positions, dtype=torch.int32, device="cuda"),
        "blocks": blocks.cuda(),
        **dict(zip(("keys", "values", "key_scales", "value_scales"), stored, strict=True)),
        "heads": heads,
        "interleaved": True,
        "limit": limit,
        "stored": True,
    }


def rows_of(given, name, row, tokens):
    """The vectors of a row in the basis of the model, float64 `[kv_heads, tokens, d]`."""
    codes, at = given[name + "s"], torch.arange(tokens, device="cuda")
    block = codes.shape[2]
    places = given["blocks"][row, at // block].long(), slice(None), at % block
    bytes_ = codes[places].transpose(0, 1).long()
    numbers = torch.stack((bytes_ % 16, bytes_ // 16), dim=-1).flatten(-2).double() - 7.5
    scales = given[name + "_scales"][places].transpose(0, 1).double()
    return numbers * scales[..., None] @ matrix(2 * codes.shape[3])


def expected(given):
    kv_heads, size = given["keys"].shape[1], 2 * given["keys"].shape[3]
    q = given["qkv"].unflatten(-1, (-1, size))[:, : given["heads"]]
    q = rotate(q, given["table"][given["positions"].long()], given["interleaved"]).double()
    out = []
    for row, position in enumerate(given["positions"].tolist()):
        keys, values = (rows_of(given, name, row, position + 1) for name in ("key", "value"))
        scores = q[row].unflatten(0, (kv_heads, -1)) @ keys.transpose(-1, -2) * size**-0.5
        out.append((scores.softmax(-1) @ values).flatten(0, 1))
    return torch.stack(out)


def check(given):
    """The query is rounded twice, weights once and the output twice: eps / 2 each at most, and less in the norm."""
    found, wanted = decode_attention(**given), expected(given)
    assert found.isfinite().all()
    tolerance = 1.5 * torch.finfo(found.dtype).eps
    error = ((found.double() - wanted).norm() / wanted.norm()).item()
    assert error < tolerance, error
    assert_close_everywhere(found, wanted, tolerance)
    return found


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [32, 64, 96, 128, 160, 192, 256])
def test_head_dims(size, dtype):
    for rotary in (size, size // 2, 2):
        check(problem([0, 1, 40, 300], dtype, 2, 3, size, rotary))
    check(problem([0, 1, 40, 300], dtype, 2, 3, size, size) | {"interleaved": False})


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("group", [1, 2, 7, 8, 16, 17, 33, 64])
def test_groups(group, size, dtype):
    check(problem([0, 63, 64, 700], dtype, 2, group, size))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_length(dtype):
    edges = [0, 1, 7, 8, 15, 16, 31, 32, 33, 62, 63, 64, 65, 127, 128, 129, 255, 256, 511, 512, 513, 1023, 1024, 1025]
    check(problem(edges, dtype))
    check(problem(edges, dtype, 1, 4, 256))
    for position in edges:
        check(problem([position], dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_long_contexts_and_many_rows(dtype):
    check(problem([4096, 8191, 10, 5000], dtype, limit=8200))
    check(problem([70_000], dtype, 1, 4, limit=100_000))
    check(problem([33_000, 100], dtype, 2, 2, 256, limit=40_001))
    check(problem(torch.randint(0, 1500, (64,)).tolist(), dtype, limit=1500))
    check(problem(torch.randint(0, 90, (515,)).tolist(), dtype, 3, 5, 64, 32))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("block", [16, 64, 128, 256])
def test_block_sizes(block, dtype):
    for size, rotary in ((64, 64), (128, 64), (256, 128), (96, 32)):
        check(problem([0, 15, 16, 255, 256, 257, 1500], dtype, 2, 4, size, rotary, block=block))


def test_values_of_any_magnitude():
    for dtype, values in ((torch.float16, (0.02, 300.0)), (torch.bfloat16, (1e-20, 1e20))):
        for value in values:
            check(problem([500], dtype, value=value))


@pytest.mark.parametrize("dtype", HALVES)
def test_the_same_bits_at_every_run_and_alone(dtype):
    lengths = [4095, 0, 63, 64, 500, 511, 512, 513, 2047, 3000, *torch.randint(0, 4096, (22,)).tolist()]
    given = problem(lengths, dtype, limit=4096)
    whole = decode_attention(**given)
    assert all(torch.equal(decode_attention(**given), whole) for _ in range(5))
    for row in range(10):
        alone = given | {name: given[name][row : row + 1] for name in ("qkv", "positions", "blocks")}
        assert torch.equal(decode_attention(**alone)[0], whole[row]), lengths[row]


def test_graphs():
    given = problem([100, 2000], torch.float16)
    decode_attention(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = decode_attention(**given)
    given["qkv"].copy_(torch.randn_like(given["qkv"]))
    graph.replay()
    assert torch.equal(found, decode_attention(**given))


def test_what_has_no_kernel():
    assert not has_kernel(torch.float16, 80, torch.device("cuda"), INT4)
    check(problem([40, 3], torch.float16, 2, 3, 80, 40))  # torch's operators
    with pytest.raises(UsageError, match="give stored"):
        decode_attention(**problem([3], torch.float16) | {"stored": False})
