"""decode_attention on a GPU against float64: heads, caches, lengths, strides, graphs; the same bits for any cut."""

from dataclasses import replace

import pytest
import torch

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops import attention
from warpbus.kernels.ops.attention import decode_attention
from warpbus.kernels.reference.rope import quantize, rotate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

HALVES = [torch.float16, torch.bfloat16]
CODES = [torch.int8, torch.float8_e4m3fn]
BOTH = [(dtype, cache) for dtype in HALVES for cache in (dtype, *CODES)]
SCALES = ("key_scales", "value_scales")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(torch.seed() % 2**31)


def poisoned(*shape, dtype):
    """All bits set: NaN in every float format, -1 in int8."""
    size = torch.empty((), dtype=dtype).element_size()
    return torch.full((*shape[:-1], shape[-1] * size), 255, device="cuda", dtype=torch.uint8).view(dtype)


def problem(
    positions, dtype, cache, kv_heads=2, group=16, size=128, rotary=64, limit=None, spare=5, interleaved=True, value=1.0
):
    """Arguments of the operator: what lies past a row's position, in spare rows and in spare capacity is poison."""
    heads, limit = kv_heads * group, limit or max(positions) + 1
    shape = (len(positions) + 1, kv_heads, limit + spare)
    turns = torch.rand(limit + spare, rotary // 2, device="cuda") * 6.3
    given = {
        "qkv": torch.randn(len(positions), (heads + 2 * kv_heads) * size, device="cuda").to(dtype),
        "table": torch.cat((turns.cos(), turns.sin()), dim=-1),
        "positions": torch.tensor(positions, dtype=torch.int32, device="cuda"),
        "keys": poisoned(*shape, size, dtype=cache),
        "values": poisoned(*shape, size, dtype=cache),
        "key_scales": None if cache == dtype else poisoned(*shape, dtype=torch.float32),
        "value_scales": None if cache == dtype else poisoned(*shape, dtype=torch.float32),
        "heads": heads,
        "interleaved": interleaved,
        "limit": limit,
    }
    for row, position in enumerate(positions):
        for name, magnitude in (("key", 1.0), ("value", value)):
            past = torch.randn(kv_heads, position, size, device="cuda") * magnitude
            if cache != dtype and position:
                past, given[name + "_scales"][row, :, :position] = quantize(past, cache)
            given[name + "s"][row, :, :position] = past.to(cache)
    return given


def copy(given):
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def repeated(row, times):
    """A batch of one, `times` times. Not by bytes of a single dimension, which are not whole elements."""
    return row.expand(times, *row.shape[1:]).contiguous()


def expected(given):
    """Attention in float64 over the cache as it is after the operator has written the new token into it."""
    kv_heads, size = given["keys"].shape[1], given["keys"].shape[3]
    q = given["qkv"].unflatten(-1, (-1, size))[:, : given["heads"]]
    q = rotate(q[None], given["table"][given["positions"].long()], given["interleaved"])[0].double()
    out = []
    for row, position in enumerate(given["positions"].tolist()):
        keys, values = (given[name][row, :, : position + 1].to(torch.float32).double() for name in ("keys", "values"))
        if given["key_scales"] is not None:
            keys, values = (
                x * given[name][row, :, : position + 1, None].double()
                for x, name in zip((keys, values), SCALES, strict=True)
            )
        scores = q[row].unflatten(0, (kv_heads, -1)) @ keys.transpose(-1, -2) * size**-0.5
        out.append((scores.softmax(-1) @ values).flatten(0, 1))
    return torch.stack(out)


def check(given):
    """Runs the operator and compares output, what it wrote, and what it must not have touched."""
    before = copy(given)
    found = decode_attention(**given)
    wanted = expected(given)
    assert found.isfinite().all()
    error = ((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()
    # Query, weights and output are each rounded once to the dtype: eps / 2 each at most, and less in the norm.
    assert error < torch.finfo(found.dtype).eps, error
    kv_heads, size = given["keys"].shape[1], given["keys"].shape[3]
    _, k, v = given["qkv"].unflatten(-1, (-1, size)).split((given["heads"], kv_heads, kv_heads), dim=1)
    places = given["positions"].tolist()
    k = rotate(k[None], given["table"][places], given["interleaved"])[0]
    for name, new in (("key", k.float()), ("value", v.float())):
        cache, scales = given[name + "s"], given[name + "_scales"]
        stored = torch.stack([cache[row, :, place].float() for row, place in enumerate(places)])
        if scales is None:
            step = new.abs() * torch.finfo(found.dtype).eps
        else:
            stored *= torch.stack([scales[row, :, place, None] for row, place in enumerate(places)])
            largest = new.abs().amax(-1, keepdim=True)
            step = largest / 127 if cache.dtype == torch.int8 else new.abs() / 8 + largest / 448 / 512
        assert ((stored - new).abs() <= step * 1.01 + 1e-6).all(), name
        for of, tensor in ((name + "s", cache), (name + "_scales", scales)):
            if tensor is not None:
                for row, place in enumerate(places):
                    before[of][row, :, place] = tensor[row, :, place]
                assert torch.equal(bits(tensor), bits(before[of])), of
    return found


@pytest.mark.parametrize(("dtype", "cache"), BOTH)
@pytest.mark.parametrize("size", [16, 32, 48, 64, 80, 96, 128, 192, 256])
def test_head_dims(size, dtype, cache):
    for rotary, interleaved in ((size, False), (size // 2, True), (2, False), (size, True)):
        check(problem([0, 1, 40, 300], dtype, cache, 2, 3, size, rotary, interleaved=interleaved))


@pytest.mark.parametrize(("dtype", "cache"), BOTH)
@pytest.mark.parametrize("group", [1, 2, 7, 8, 9, 16, 17, 32, 33, 64])
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
    for name in ("keys", "values"):
        given[name][1, :, :200] = torch.zeros(2, 200, 128, device="cuda").to(cache)
    if cache != dtype:
        for name in SCALES:
            given[name][1, :, :200] = 0.0
    given["qkv"].zero_()
    assert torch.equal(decode_attention(**given), torch.zeros(2, 32, 128, device="cuda", dtype=dtype))


@pytest.mark.parametrize(("dtype", "cache"), BOTH)
def test_other_strides(dtype, cache):
    given = problem([300, 64], dtype, cache)
    wanted = decode_attention(**copy(given))
    by_token = copy(given)
    for name in ("keys", "values"):
        by_token[name] = given[name].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(decode_attention(**by_token), wanted)
    joined = copy(given)
    pair = torch.stack((given["keys"].view(torch.uint8), given["values"].view(torch.uint8)), dim=2).view(cache)
    joined["keys"], joined["values"] = pair[:, :, 0], pair[:, :, 1]
    assert torch.equal(decode_attention(**joined), wanted)
    wide = copy(given)
    wide["qkv"] = torch.cat((given["qkv"], given["qkv"]), dim=1)[:, : given["qkv"].shape[1]]
    assert torch.equal(decode_attention(**wide), wanted)
    for name in ("keys", "values"):
        assert torch.equal(bits(by_token[name]), bits(wide[name]))
        assert torch.equal(bits(joined[name]), bits(wide[name]))


@pytest.mark.parametrize(("dtype", "cache"), BOTH)
def test_the_same_bits_at_every_run_and_alone(dtype, cache):
    lengths = [4095, 0, 63, 64, 500, 511, 512, 513, 2047, 3000, *torch.randint(0, 4096, (22,)).tolist()]
    given = problem(lengths, dtype, cache, limit=4096)
    whole = decode_attention(**given)
    assert all(torch.equal(decode_attention(**given), whole) for _ in range(5))
    for row in range(10):
        names = ["qkv", "positions", "keys", "values"] + ([] if cache == dtype else [*SCALES])
        alone = given | {name: given[name][row : row + 1] for name in names}
        assert torch.equal(decode_attention(**alone)[0], whole[row]), lengths[row]
        several = given | {name: repeated(given[name][row : row + 1], 6) for name in names}
        assert torch.equal(decode_attention(**several), whole[row].expand(6, -1, -1)), lengths[row]


CUTS = [  # what the model of time thinks a chunk, a global sum and a cluster's cost; whether blocks may form clusters
    (1.0, 0.0, 9.0, True),  # a unit a block
    (1.0, 99.0, 0.0, True),  # clusters
    (0.0, 0.0, 0.0, False),  # a group of units a block, global
]


@pytest.mark.parametrize(("chunk", "globally", "clustered", "clusters"), CUTS)
@pytest.mark.parametrize(("dtype", "cache"), BOTH)
def test_every_way_to_cut_gives_the_same_bits(dtype, cache, chunk, globally, clustered, clusters, monkeypatch):
    given = problem([4095, 1000, 70, 0], dtype, cache)
    wanted = decode_attention(**given)
    device = attention._device(torch.device("cuda", torch.cuda.current_device()))
    monkeypatch.setattr(attention, "_CHUNK_TIME", chunk)
    monkeypatch.setattr(attention, "_GLOBAL_TIME", globally)
    monkeypatch.setattr(attention, "_CLUSTER_TIME", clustered)
    monkeypatch.setattr(attention, "_device", lambda _: replace(device, clusters=device.clusters and clusters))
    try:
        for stages in (2, 3, 4):
            for combiners in (1, 3, 16):
                for name in ("_STAGES", "_STAGES_CROWDED"):
                    monkeypatch.setattr(attention, name, {16: stages, 8: stages})
                monkeypatch.setattr(attention, "_COMBINERS", combiners)
                attention.plan.cache_clear()
                assert torch.equal(decode_attention(**given), wanted)
    finally:
        monkeypatch.undo()
        attention.plan.cache_clear()


@pytest.mark.parametrize(("dtype", "cache"), BOTH)
def test_a_captured_graph_and_a_second_stream(dtype, cache):
    given = problem([100, 4000, 600], dtype, cache, limit=4096)
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
        assert (out.double() - wanted).norm() / wanted.norm() < torch.finfo(dtype).eps
        other["positions"] += 1


def test_many_launches_leave_the_counters_at_zero():
    given = problem([8191], torch.float16, torch.float16)
    device = attention._device(given["qkv"].device)
    assert attention.plan(2, 16, 128, 16, 8192, device).combiners > 0
    wanted = decode_attention(**given)
    for _ in range(200):
        found = decode_attention(**given)
    assert torch.equal(found, wanted)
    assert not attention.counters(given["qkv"].device, 2).any()


def test_nothing_to_do():
    given = problem([3], torch.float16, torch.float16)
    none = given | {"qkv": given["qkv"][:0], "positions": given["positions"][:0]}
    assert decode_attention(**none).shape == (0, 32, 128)


def test_what_a_gpu_rejects():
    given = problem([3], torch.float16, torch.float16, size=24, rotary=24)
    with pytest.raises(UsageError, match="head_dim is 24"):
        decode_attention(**given)
    given = problem([3], torch.float16, torch.float16, group=65)
    with pytest.raises(UsageError, match="65 queries share"):
        decode_attention(**given)
    given = problem([3], torch.float16, torch.float16)
    flat = torch.zeros(given["keys"].numel() + 1, device="cuda", dtype=torch.float16)
    with pytest.raises(TensorError, match="multiples of 16 bytes"):
        decode_attention(**(given | {"keys": flat[1:].view(given["keys"].shape)}))
    with pytest.raises(TensorError, match="qkv is float32"):
        decode_attention(**(given | {"qkv": given["qkv"].float()}))
