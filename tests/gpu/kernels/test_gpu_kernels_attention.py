"""decode_attention on a GPU against float64: heads, caches, lengths, blocks, graphs; the same bits for any cut."""

from dataclasses import replace

import pytest
import torch
from tile_errors import assert_close_everywhere

from warpbus.errors import TensorError
from warpbus.kernels.ops import attention
from warpbus.kernels.ops.attention import decode_attention, has_kernel
from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.rope import rope_and_cache
from warpbus.kernels.ops.wna16 import wna16_linear
from warpbus.kernels.reference.cache import quantize
from warpbus.kernels.reference.rope import rotate
from warpbus.qtensor import QTensor, Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

HALVES = [torch.float16, torch.bfloat16]
CODES = [torch.int8, torch.float8_e4m3fn]
BOTH = [(dtype, cache) for dtype in HALVES for cache in (dtype, *CODES)]
SCALES = ("key_scales", "value_scales")
CACHES = ("keys", "values", *SCALES)
NOWHERE = 2**31 - 1  # an entry of a block table that may not be used


@pytest.fixture(autouse=True)
def _seed(seed):
    """Each test has random numbers of its own."""


def poisoned(*shape, dtype):
    """All bits set: NaN in every float format, -1 in int8."""
    size = torch.empty((), dtype=dtype).element_size()
    return torch.full((*shape[:-1], shape[-1] * size), 255, device="cuda", dtype=torch.uint8).view(dtype)


def problem(
    positions,
    dtype,
    cache,
    kv_heads=2,
    group=16,
    size=128,
    rotary=64,
    limit=None,
    spare=5,
    interleaved=True,
    value=1.0,
    block=32,
):
    """Arguments of the operator, the cache that of the second of three layers.

    What no row has written is poison: past its position in its last block, in blocks of nobody and of other layers.
    """
    heads, limit, rows = kv_heads * group, limit or max(positions) + 1, len(positions)
    used = [position // block + 1 for position in positions]
    blocks = torch.full((rows, -(-limit // block)), NOWHERE, dtype=torch.int32)
    free = (torch.randperm(sum(used) + spare) + 1).int()
    for row, count in enumerate(used):
        blocks[row, :count], free = free[:count], free[count:]
    blocks = blocks.cuda()
    shape = (sum(used) + spare + 1, 3, 2, kv_heads, block)
    data = poisoned(*shape, size, dtype=cache)[:, 1]
    scales = poisoned(*shape, dtype=torch.float32)[:, 1]
    turns = torch.rand(limit + spare, rotary // 2, device="cuda") * 6.3
    given = {
        "qkv": torch.randn(rows, (heads + 2 * kv_heads) * size, device="cuda").to(dtype),
        "table": torch.cat((turns.cos(), turns.sin()), dim=-1),
        "positions": torch.tensor(positions, dtype=torch.int32, device="cuda"),
        "blocks": blocks,
        "keys": data[:, 0],
        "values": data[:, 1],
        "key_scales": None if cache == dtype else scales[:, 0],
        "value_scales": None if cache == dtype else scales[:, 1],
        "heads": heads,
        "interleaved": interleaved,
        "limit": limit,
    }
    for row, position in enumerate(positions):
        places = places_of(given, row, torch.arange(position, device="cuda"))
        for name, magnitude in (("key", 1.0), ("value", value)):
            past = torch.randn(position, kv_heads, size, device="cuda") * magnitude
            if cache != dtype and position:
                past, given[name + "_scales"][places] = quantize(past, cache)
            plain(given[name + "s"])[places] = plain(past.to(cache))
    return given


def places_of(given, row, positions):
    """An index of the cache: the tokens of a row at `positions`."""
    block = given["keys"].shape[2]
    return given["blocks"][row, positions // block].long(), slice(None), positions % block


def plain(tensor):
    """float8 as bytes, which can be indexed."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def row_of(given, name, row, tokens):
    """The first tokens of a row, `[kv_heads, tokens, ...]`."""
    found = plain(given[name])[places_of(given, row, torch.arange(tokens, device="cuda"))]
    return found.view(given[name].dtype).transpose(0, 1)


def copy(given):
    """With tensors of its own, of the same strides."""
    made = dict(given)
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            made[name] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
            plain(made[name]).copy_(plain(value))
    return made


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def expected(given):
    """Attention in float64 over the cache as it is after the operator has written the new token into it."""
    kv_heads, size = given["keys"].shape[1], given["keys"].shape[3]
    q = given["qkv"].unflatten(-1, (-1, size))[:, : given["heads"]]
    q = rotate(q, given["table"][given["positions"].long()], given["interleaved"]).double()
    out = []
    for row, position in enumerate(given["positions"].tolist()):
        keys, values = (row_of(given, name, row, position + 1).float().double() for name in ("keys", "values"))
        if given["key_scales"] is not None:
            keys, values = (
                x * row_of(given, name, row, position + 1)[..., None].double()
                for x, name in zip((keys, values), SCALES, strict=True)
            )
        scores = q[row].unflatten(0, (kv_heads, -1)) @ keys.transpose(-1, -2) * size**-0.5
        out.append((scores.softmax(-1) @ values).flatten(0, 1))
    return torch.stack(out)


def assert_near(found, wanted):
    """Query, weights and output are each rounded once to the dtype: eps / 2 each at most, and less in the norm."""
    assert found.isfinite().all()
    error = ((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()
    tolerance = max(torch.finfo(found.dtype).eps, 1e-6)
    assert error < tolerance, error
    assert_close_everywhere(found, wanted, tolerance)


def check(given):
    """Runs the operator and compares output, what it wrote, and what it must not have touched."""
    before = copy(given)
    found = decode_attention(**given)
    assert_near(found, expected(given))
    kv_heads, size = given["keys"].shape[1], given["keys"].shape[3]
    _, k, v = given["qkv"].unflatten(-1, (-1, size)).split((given["heads"], kv_heads, kv_heads), dim=1)
    k = rotate(k, given["table"][given["positions"].long()], given["interleaved"])
    rows = torch.arange(len(found), device="cuda")
    block = given["keys"].shape[2]
    places = (
        given["blocks"][rows, given["positions"].long() // block].long(),
        slice(None),
        given["positions"].long() % block,
    )
    for name, new in (("key", k.float()), ("value", v.float())):
        cache, scales = given[name + "s"], given[name + "_scales"]
        stored = plain(cache)[places].view(cache.dtype).float()
        if scales is None:
            step = new.abs() * torch.finfo(found.dtype).eps
        else:
            stored *= scales[places][..., None]
            largest = new.abs().amax(-1, keepdim=True)
            step = largest / 127 if cache.dtype == torch.int8 else new.abs() / 8 + largest / 448 / 512
        assert ((stored - new).abs() <= step * 1.01 + 1e-6).all(), name
        for of, tensor in ((name + "s", cache), (name + "_scales", scales)):
            if tensor is not None:
                plain(before[of])[places] = plain(tensor)[places]
                assert torch.equal(bits(tensor), bits(before[of])), of
    return found


@pytest.mark.parametrize(("dtype", "cache"), BOTH)
@pytest.mark.parametrize("size", [16, 32, 48, 64, 80, 96, 128, 192, 256])
def test_head_dims(size, dtype, cache):
    for rotary, interleaved in ((size, False), (size // 2, True), (2, False), (size, True)):
        check(problem([0, 1, 40, 300], dtype, cache, 2, 3, size, rotary, interleaved=interleaved))


@pytest.mark.parametrize(("dtype", "cache"), BOTH)
@pytest.mark.parametrize("group", [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 71])
def test_groups(group, dtype, cache):
    check(problem([0, 63, 64, 700], dtype, cache, 2, group))
    check(problem([5, 2000], dtype, cache, 1, group, 64, 64))


@pytest.mark.parametrize(("dtype", "cache"), BOTH)
@pytest.mark.parametrize(("heads", "group", "size"), [(1, 7, 64), (8, 4, 128), (32, 1, 128), (64, 1, 80), (8, 2, 256)])
def test_kv_heads(heads, group, size, dtype, cache):
    check(problem([130, 0, 17], dtype, cache, heads, group, size, 32))


@pytest.mark.parametrize(("dtype", "cache"), BOTH)
def test_every_length(dtype, cache):
    edges = [0, 1, 7, 8, 15, 16, 31, 32, 33, 62, 63, 64, 65, 127, 128, 129, 255, 256, 511, 512, 513, 1023, 1024, 1025]
    check(problem(edges, dtype, cache))
    check(problem(edges, dtype, cache, 1, 4, limit=1026, spare=0))
    for position in edges:
        check(problem([position], dtype, cache))


@pytest.mark.parametrize(("dtype", "cache"), BOTH)
def test_long_contexts(dtype, cache):
    check(problem([4095], dtype, cache))
    check(problem([4096, 8191, 10, 5000], dtype, cache, limit=8200))
    check(problem([70_000], dtype, cache, 1, 4, limit=100_000))
    check(problem([33_000, 100], dtype, cache, 2, 2, 256, limit=40_001))


@pytest.mark.parametrize(("dtype", "cache"), BOTH)
def test_many_rows(dtype, cache):
    lengths = torch.randint(0, 1500, (64,)).tolist()
    check(problem(lengths, dtype, cache, limit=1500))
    check(problem(torch.randint(0, 90, (515,)).tolist(), dtype, cache, 3, 5, 64, 32))


@pytest.mark.parametrize("cache", CODES)
def test_values_of_any_magnitude(cache):
    for dtype, value in (
        (torch.float16, 0.02),
        (torch.float16, 300.0),
        (torch.bfloat16, 1e-20),
        (torch.bfloat16, 1e20),
    ):
        given = problem([500], dtype, cache, value=value)
        given["qkv"].view(-1, 128)[-2:] *= value
        check(given)


def test_peaked_and_flat_weights():
    for factor in (0.0, 30.0):
        given = problem([900], torch.float16, torch.float16)
        given["qkv"] *= factor
        check(given)


@pytest.mark.parametrize(("dtype", "cache"), BOTH)
def test_zeros(dtype, cache):
    given = problem([0, 200], dtype, cache)
    places = places_of(given, 1, torch.arange(200, device="cuda"))
    for name in CACHES:
        if given[name] is not None:
            plain(given[name])[places] = 0
    given["qkv"].zero_()
    assert torch.equal(decode_attention(**given), torch.zeros(2, 32, 128, device="cuda", dtype=dtype))


@pytest.mark.parametrize(("dtype", "cache"), BOTH)
@pytest.mark.parametrize("block", [16, 64, 128, 256])
def test_block_sizes(block, dtype, cache):
    for size, rotary in ((64, 64), (128, 64), (256, 128), (80, 32)):
        check(problem([0, 15, 16, 255, 256, 257, 1500], dtype, cache, 2, 4, size, rotary, block=block))
    check(problem([9000, 20_000], dtype, cache, 1, 4, block=block))


@pytest.mark.parametrize(("dtype", "cache"), BOTH)
def test_the_same_bits_wherever_blocks_are(dtype, cache):
    given = problem([300, 64, 2000], dtype, cache)
    wanted = decode_attention(**copy(given))
    moved = copy(given)  # in another order, in a cache of their own whose tokens come before its heads, in a wide table
    count = len(given["keys"])
    order = torch.randperm(count, device="cuda")
    for name in CACHES:
        if given[name] is not None:
            into = torch.empty_like(plain(given[name]).transpose(1, 2), memory_format=torch.contiguous_format)
            into = into.transpose(1, 2) if name in ("keys", "values") else into.view(given[name].shape)
            into[order] = plain(given[name])
            moved[name] = into.view(given[name].dtype)
    named = order.int()[given["blocks"].clamp_max(count - 1).long()]
    table = torch.full((3, 2 * named.shape[1] + 3), NOWHERE, dtype=torch.int32, device="cuda")
    table[:, : named.shape[1]] = torch.where(given["blocks"] == NOWHERE, given["blocks"], named)
    moved["blocks"] = table
    moved["qkv"] = torch.cat((given["qkv"], given["qkv"]), dim=1)[:, : given["qkv"].shape[1]]
    assert torch.equal(decode_attention(**moved), wanted)
    finer = copy(given)  # blocks of 16 tokens
    for name in CACHES:
        if given[name] is not None:
            halves = plain(given[name]).unflatten(2, (2, 16)).transpose(1, 2).flatten(0, 1)
            finer[name] = halves.contiguous().view(given[name].dtype)
    both = torch.stack((2 * given["blocks"], 2 * given["blocks"] + 1), dim=-1).flatten(1)
    finer["blocks"] = torch.where(given["blocks"].repeat_interleave(2, dim=1) == NOWHERE, NOWHERE, both).int()
    assert torch.equal(decode_attention(**finer), wanted)


@pytest.mark.parametrize(("dtype", "cache"), BOTH)
def test_the_same_bits_at_every_run_and_alone(dtype, cache):
    lengths = [4095, 0, 63, 64, 500, 511, 512, 513, 2047, 3000, *torch.randint(0, 4096, (22,)).tolist()]
    given = problem(lengths, dtype, cache, limit=4096)
    whole = decode_attention(**given)
    assert all(torch.equal(decode_attention(**given), whole) for _ in range(5))
    stored = decode_attention(**given, stored=True)
    assert_near(stored, expected(given))
    for row in range(10):
        alone = given | {name: given[name][row : row + 1] for name in ("qkv", "positions", "blocks")}
        assert torch.equal(decode_attention(**alone)[0], whole[row]), lengths[row]
        several = given | {
            name: given[name][row : row + 1].repeat_interleave(6, dim=0) for name in ("qkv", "positions", "blocks")
        }
        # Each of the six writes what is there already.
        assert torch.equal(decode_attention(**several), whole[row].expand(6, -1, -1)), lengths[row]
        assert torch.equal(decode_attention(**several, stored=True), stored[row].expand(6, -1, -1)), lengths[row]


@pytest.mark.parametrize(("dtype", "cache"), BOTH)
@pytest.mark.parametrize(
    ("size", "group", "rotary"), [(64, 4, 64), (128, 16, 64), (128, 40, 128), (256, 5, 64), (96, 3, 32)]
)
def test_stored_tokens(size, group, rotary, dtype, cache):
    """Five tokens of one sequence among others, put into the cache by `rope_and_cache`."""
    given = problem([0, 702, 702, 702, 702, 702, 63, 1030], dtype, cache, 2, group, size, rotary, interleaved=False)
    given["blocks"][1:6] = given["blocks"][1].clone()
    given["blocks"][1:6, 704 // 32] = 0  # which was nobody's
    given["positions"][1:6] += torch.arange(5, device="cuda", dtype=torch.int32)
    block = given["keys"].shape[2]
    places = given["positions"].long()
    slots = given["blocks"].gather(1, places[:, None] // block)[:, 0].long() * block + places % block
    rope_and_cache(
        given["qkv"],
        given["table"],
        given["positions"],
        slots,
        *(given[name] for name in CACHES),
        heads=given["heads"],
        interleaved=False,
    )
    before = copy(given)
    given["qkv"].unflatten(-1, (-1, size))[:, given["heads"] :] = float("nan")  # keys and values are not looked at
    torch.full_like(given["qkv"][:, : given["heads"] * size], float("nan"))  # poison where the output will be
    found = decode_attention(**given, stored=True)
    assert_near(found, expected(given))
    for name in CACHES:
        if given[name] is not None:
            assert torch.equal(bits(given[name]), bits(before[name])), name


CUTS = [  # positions of the rows, limit, queries of a KV head, head_dim
    ([4095, 1000], 4096, 16, 128),  # units, groups, quarters; one or several parts a block
    ([3000, 2047], 3100, 5, 96),
    ([1023, 70], 1024, 16, 128),
    ([500, 64], 512, 20, 128),
    ([40_000, 900], 40_001, 40, 64),
    ([2047, 31], 2048, 16, 256),
]


@pytest.mark.parametrize(("positions", "limit", "group", "size"), CUTS)
@pytest.mark.parametrize(("dtype", "cache"), BOTH)
def test_every_way_to_cut_gives_the_same_bits(dtype, cache, positions, limit, group, size, monkeypatch):
    given = problem(positions, dtype, cache, 2, group, size, limit=limit)
    wanted = decode_attention(**given)
    assert_near(wanted, expected(given))
    device = attention._device(torch.device("cuda", torch.cuda.current_device()))
    width = 8 * cache.itemsize
    for cut in attention.cuts(2 * len(positions), group, size, width, limit, device):
        for stages in range(2, cut.stages + 1):  # more might leave blocks without a place that others wait for
            shared = attention.shared_bytes(cut.head_dim, width, min(stages, cut.chunks))
            for combiners in {min(each, cut.combiners) for each in (1, 3, 16)}:
                tried = replace(cut, stages=stages, shared=shared, combiners=combiners, late=stages % 2 == 1)
                monkeypatch.setattr(attention, "plan", lambda *_, tried=tried: tried)
                assert torch.equal(decode_attention(**given), wanted), tried


@pytest.mark.parametrize(("dtype", "cache"), BOTH)
def test_a_captured_graph_and_a_second_stream(dtype, cache):
    given = problem([120, 4020, 620], dtype, cache, limit=4096)  # with the blocks of the 20 tokens before
    given["positions"] -= 20
    decode_attention(**copy(given))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        alike = decode_attention(**copy(given))
        other = copy(given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = decode_attention(**other)
            again = decode_attention(**other)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(alike, decode_attention(**copy(given)), rtol=0, atol=0)
    for _ in range(20):  # a sequence that grows by a token at each replay
        other["qkv"].copy_(torch.randn_like(other["qkv"]))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, again)
        wanted = expected(other)
        assert_near(out, wanted)
        other["positions"] += 1


@pytest.mark.parametrize("lengths", [[130], [500, 64, 7, 1000], [4000]])
def test_settled_waits_for_what_is_projected(lengths):
    """Behind a product whose successor may begin before it has ended, again and again with other results."""
    given = problem(lengths, torch.float16, torch.float16, limit=max(512, max(lengths) + 1))
    n, k = given["qkv"].shape[1], 4096
    scheme = Scheme.parse("w4a16-g128")
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    scales = torch.full((n, k // 128), 1 / (4 * k**0.5), device="cuda").half()
    weight = pack(QTensor.from_codes(scheme, codes, scales, None), torch.float16)
    inputs = [torch.randn(len(lengths), k, device="cuda").half() for _ in range(50)]

    def attended(x, **inputs_ready):
        return decode_attention(**(given | {"qkv": wna16_linear(x, weight)}), **inputs_ready)

    at_once = [attended(x, inputs_ready=True) for x in inputs]
    for x, found in zip(inputs, at_once, strict=True):
        qkv = wna16_linear(x, weight)
        torch.cuda.synchronize()
        assert torch.equal(found, decode_attention(**(given | {"qkv": qkv})))
        assert_near(found, expected(given | {"qkv": qkv}))


def test_many_launches_leave_the_counters_at_zero():
    given = problem([8191], torch.float16, torch.float16)
    device = attention._device(given["qkv"].device)
    assert attention.plan(2, 16, 128, 16, 8192, device).parts > 1
    wanted = decode_attention(**given)
    for _ in range(200):
        found = decode_attention(**given)
    assert torch.equal(found, wanted)
    assert not attention.counters(given["qkv"].device, 2).any()


def test_nothing_to_do():
    given = problem([3], torch.float16, torch.float16)
    none = given | {name: given[name][:0] for name in ("qkv", "positions", "blocks")}
    assert decode_attention(**none).shape == (0, 32, 128)


@pytest.mark.parametrize(
    ("dtype", "cache", "group", "size"),
    [
        (torch.float32, torch.float32, 16, 128),
        (torch.float32, torch.int8, 16, 128),
        (torch.float32, torch.float8_e4m3fn, 3, 40),
        (torch.float16, torch.float16, 16, 24),
        (torch.bfloat16, torch.float8_e4m3fn, 65, 24),
        (torch.float16, torch.int8, 2, 272),
    ],
)
def test_what_has_no_kernel_is_done_by_torch_without_waiting(dtype, cache, group, size):
    assert not has_kernel(dtype, size, torch.device("cuda"))
    given = problem([0, 31, 32, 500], dtype, cache, 2, group, size, 16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = decode_attention(**given)
        again = decode_attention(**given, stored=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = expected(given)
    for out in (found, again):
        assert out.isfinite().all()
        # Dequantized keys and values are rounded too.
        assert (out.double() - wanted).norm() / wanted.norm() < max(2 * torch.finfo(dtype).eps, 1e-5)


def test_what_a_gpu_rejects():
    given = problem([3], torch.float16, torch.float16)
    flat = torch.zeros(given["keys"].numel() + 1, device="cuda", dtype=torch.float16)
    with pytest.raises(TensorError, match="multiples of 16 bytes"):
        decode_attention(**(given | {"keys": flat[1:].view(given["keys"].shape)}))
    with pytest.raises(TensorError, match="blocks are on cpu"):
        decode_attention(**(given | {"blocks": given["blocks"].cpu()}))
