"""decode_attention: the reference against float64, how rows are cut, and what is rejected."""

import pytest
import torch

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops.attention import Device, decode_attention, plan
from warpbus.kernels.reference.rope import quantize

H100 = Device(132, 233472, clusters=True)
RTX4090 = Device(128, 102400, clusters=False)
CODES = [torch.int8, torch.float8_e4m3fn]


def angles(positions, rotary):
    turns = torch.rand(positions, rotary // 2) * 6.3
    return torch.cat((turns.cos(), turns.sin()), dim=-1)


def problem(positions, kv_heads=2, group=3, size=16, rotary=8, capacity=12, dtype=torch.float32, cache=None):
    """Arguments of the operator, with NaN wherever the cache has not been written."""
    heads, rows = kv_heads * group, len(positions) + 1
    stored = cache or dtype
    keys, values = (torch.full((rows, kv_heads, capacity, size), float("nan")) for _ in range(2))
    scales = [None, None] if cache is None else [torch.full((rows, kv_heads, capacity), float("nan")) for _ in range(2)]
    caches = [torch.zeros_like(keys, dtype=stored) if stored == torch.int8 else keys.to(stored), values.to(stored)]
    if stored == torch.int8:
        caches[1] = caches[0].clone()
    for row, position in enumerate(positions):
        for tensor, scale in zip(caches, scales, strict=True):
            past = torch.randn(kv_heads, position, size)
            if scale is not None:
                past, scale[row, :, :position] = quantize(past.to(dtype), stored)
            tensor[row, :, :position] = past.to(stored)
    return {
        "qkv": torch.randn(len(positions), (heads + 2 * kv_heads) * size).to(dtype),
        "table": angles(capacity, rotary),
        "positions": torch.tensor(positions, dtype=torch.int32),
        "keys": caches[0],
        "values": caches[1],
        "key_scales": scales[0],
        "value_scales": scales[1],
        "heads": heads,
        "interleaved": True,
        "limit": max(positions) + 1,
    }


def turned(head, table, interleaved):
    """A head's vector rotated in float64, dimension by dimension."""
    half = len(table) // 2
    out = head.double().clone()
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        cos, sin = table[i].double(), table[half + i].double()
        out[first] = head[first].double() * cos - head[second].double() * sin
        out[second] = head[second].double() * cos + head[first].double() * sin
    return out


def expected(given, kv_heads, group, size):
    """Attention head by head in float64; the cache is read before the operator writes it."""
    out = torch.empty(len(given["positions"]), kv_heads * group, size, dtype=torch.float64)
    parts = given["qkv"].view(len(out), -1, size)
    for row, position in enumerate(given["positions"].tolist()):
        table = given["table"][position]
        for head in range(kv_heads * group):
            kv = head // group
            past = []
            for name in ("key", "value"):
                cached = given[name + "s"][row, kv, :position].double()
                scales = given[name + "_scales"]
                past.append(cached if scales is None else cached * scales[row, kv, :position, None].double())
            key = turned(parts[row, kv_heads * group + kv], table, given["interleaved"])
            keys = torch.cat((past[0], key[None]))
            values = torch.cat((past[1], parts[row, kv_heads * (group + 1) + kv].double()[None]))
            query = turned(parts[row, head], table, given["interleaved"])
            out[row, head] = (keys @ query * size**-0.5).softmax(0) @ values
    return out


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_against_float64(dtype, interleaved):
    torch.manual_seed(1)
    for kv_heads, group, size, rotary in ((2, 3, 16, 8), (1, 4, 32, 32), (3, 1, 8, 6)):
        given = problem([0, 4, 11], kv_heads, group, size, rotary, dtype=dtype) | {"interleaved": interleaved}
        wanted = expected(given, kv_heads, group, size)
        found = decode_attention(**given)
        assert found.dtype == dtype
        error = (found.double() - wanted).norm() / wanted.norm()
        assert error < 2 * torch.finfo(dtype).eps, error


@pytest.mark.parametrize("cache", CODES)
def test_codes_within_their_precision(cache):
    torch.manual_seed(2)
    given = problem([3, 9], cache=cache)
    wanted = expected(given, 2, 3, 16)
    found = decode_attention(**given)
    # Only the new token is seen unquantized by `expected`: int8 keeps 7 bits of it and e4m3 3.
    assert (found.double() - wanted).norm() / wanted.norm() < (0.01 if cache == torch.int8 else 0.05)


def test_writes_the_new_token_and_nothing_else():
    torch.manual_seed(3)
    for cache in (None, *CODES):
        given = problem([2, 5], cache=cache)
        names = ["keys", "values"] + ([] if cache is None else ["key_scales", "value_scales"])
        before = {name: given[name].clone() for name in names}
        decode_attention(**given)
        _, k, v = given["qkv"].view(2, -1, 16).split((6, 2, 2), dim=1)
        rotated = torch.stack(
            [torch.stack([turned(k[r, h], given["table"][p], True) for h in (0, 1)]) for r, p in ((0, 2), (1, 5))]
        )
        for row, position in ((0, 2), (1, 5)):
            for name, new in (("keys", rotated.float()), ("values", v)):
                stored = given[name][row, :, position].float()
                if cache is not None:
                    stored = stored * given[name[:-1] + "_scales"][row, :, position, None]
                torch.testing.assert_close(stored, new[row].float(), atol=1e-6 if cache is None else 0.2, rtol=0)
                before[name][row, :, position] = given[name][row, :, position]
            for name in names[2:]:
                before[name][row, :, position] = given[name][row, :, position]
        for name in names:
            bits = torch.uint8 if given[name].element_size() == 1 else torch.int32
            assert torch.equal(given[name].view(bits), before[name].view(bits)), name


def test_a_row_alone_and_in_a_batch():
    torch.manual_seed(4)
    given = problem([7, 3, 11], dtype=torch.float16)
    whole = decode_attention(**given)
    for row in range(3):
        alone = {name: given[name][row : row + 1] for name in ("qkv", "positions", "keys", "values")}
        torch.testing.assert_close(decode_attention(**(given | alone)), whole[row : row + 1])


@pytest.mark.parametrize("device", [H100, RTX4090])
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize(("size", "group"), [(16, 1), (64, 64), (96, 7), (128, 16), (128, 64), (256, 32)])
def test_cuts_cover_every_row(size, group, bits, device):
    for pairs in (1, 2, 16, 64, 4096):
        for limit in (1, 63, 64, 65, 4096, 5000, 131072):
            cut = plan(pairs, group, size, bits, limit, device)
            chunk = 32 if size > 128 else 64
            block = chunk * cut.chunks_per_unit * cut.units_per_block
            assert (cut.parts - 1) * block < limit <= cut.parts * block
            # A warp keeps 8 parts in registers, scratch has room for 8 groups of 8, and a cluster for 8 blocks.
            assert cut.in_group <= 8
            assert cut.parts <= 8 * cut.in_group
            assert cut.cluster in ((1, 2, 4, 8) if device.clusters else (1,))
            if cut.combiners == 0:
                assert device.clusters
                assert cut.in_group == 1
                assert cut.parts <= cut.cluster < 2 * cut.parts
            assert cut.shared <= device.shared - 1024
            assert 2 <= cut.stages <= 4
            assert cut.threads in range(128, 513, 128)


def test_units_and_groups_depend_on_the_limit_alone():
    for limit in (100, 1024, 4096, 4097, 100_000):
        cuts = [plan(pairs, 16, 128, 16, limit, device) for pairs in (1, 8, 64, 1024) for device in (H100, RTX4090)]
        assert len({cut.chunks_per_unit for cut in cuts}) == 1
        assert len({cut.in_group * cut.units_per_block for cut in cuts}) == 1


def test_where_clusters_combine():
    assert all(plan(2, 16, 128, 16, limit, H100).combiners == 0 for limit in (64, 256, 1024))
    assert plan(8, 16, 128, 16, 1024, H100).cluster == 8
    assert plan(2, 16, 128, 16, 32768, H100).combiners == 16  # few rows, long contexts: more blocks than a cluster has
    assert all(plan(pairs, 16, 128, 16, 4096, H100).cluster == 1 for pairs in (16, 64, 1024))  # they would fill the GPU


def test_one_block_never_sums_dozens_of_parts():
    for device in (H100, RTX4090):
        for pairs in range(1, 200):
            cut = plan(pairs, 16, 128, 16, 4096, device)
            assert cut.combiners != 1 or cut.parts <= 8


def test_blocks_that_wait_for_others_fit_the_gpu():
    for pairs in (1, 2, 4, 8, 64, 512):
        for limit in (100, 4096, 100_000):
            cut = plan(pairs, 16, 128, 16, limit, H100)
            if cut.combiners > 1:
                assert pairs * cut.parts <= H100.multiprocessors * (H100.shared // (cut.shared + 1024))


@pytest.mark.parametrize(
    ("size", "group", "message"), [(20, 4, "head_dim is 20"), (320, 1, "up to 256"), (128, 65, "65 queries share")]
)
def test_heads_without_a_kernel(size, group, message):
    with pytest.raises(UsageError, match=message):
        plan(1, group, size, 16, 100, H100)


def cache(**changes):
    return {name: torch.zeros(3, 2, 12, 16, **changes) for name in ("keys", "values")}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"qkv": torch.zeros(2, 159)}, TensorError, r"qkv has shape \[2, 159\]"),
        ({"qkv": torch.zeros(2, 160, dtype=torch.int32)}, TensorError, "qkv is int32, expected float32"),
        ({"qkv": torch.zeros(4, 160), "positions": torch.zeros(4, dtype=torch.int32)}, TensorError, "at least b rows"),
        ({"heads": 5}, TensorError, "heads a multiple of kv_heads"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, TensorError, "one for each of the 2 rows"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, TensorError, "positions are torch.int64"),
        ({"table": torch.zeros(12, 7)}, TensorError, "table has 7 columns"),
        ({"table": torch.zeros(12, 18)}, TensorError, "table has 18 columns"),
        ({"table": torch.zeros(12, 8).half()}, TensorError, "table is float16, expected float32"),
        ({"keys": torch.zeros(3, 2, 12)}, TensorError, r"keys have shape \[3, 2, 12\]"),
        ({"values": torch.zeros(3, 2, 13, 16)}, TensorError, "that of keys"),
        (cache(dtype=torch.float16), TensorError, "keys are torch.float16"),
        (cache(dtype=torch.int8), TensorError, "key_scales does not go with a cache of torch.int8"),
        ({"key_scales": torch.zeros(3, 2, 12)}, TensorError, "key_scales does not go with a cache of torch.float32"),
        ({"limit": 13}, UsageError, "limit is 13, with a cache of 12 and a table of 12 positions"),
        ({"limit": 0}, UsageError, "limit is 0"),
    ],
)
def test_what_is_rejected(changes, error, message):
    given = problem([3, 9])
    with pytest.raises(error, match=message):
        decode_attention(**(given | changes))


def test_registered_as_an_operator():
    given = problem([3, 9])
    torch.library.opcheck(torch.ops.warpbus.decode_attention.default, tuple(given.values()))
    compiled = torch.compile(lambda arguments: decode_attention(**arguments) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(given), decode_attention(**given) + 1)
