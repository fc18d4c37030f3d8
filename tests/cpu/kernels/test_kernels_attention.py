"""decode_attention: the reference against float64, how rows are cut, and what is rejected."""

import pytest
import torch
from torch.library import opcheck

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops import attention
from warpbus.kernels.ops.attention import AttentionDevice, cuts, decode_attention, has_kernel, plan
from warpbus.kernels.ops.rope import rope_and_cache
from warpbus.kernels.reference.cache import quantize

H100 = AttentionDevice(132, 233472)
A100 = AttentionDevice(108, 167936)
RTX4090 = AttentionDevice(128, 102400)
RTX5090 = AttentionDevice(170, 102400)
DEVICES = [H100, A100, RTX4090, RTX5090]
CODES = [torch.int8, torch.float8_e4m3fn]
NOWHERE = 2**31 - 1  # an entry of a block table that may not be used


def angles(positions, rotary):
    turns = torch.rand(positions, rotary // 2) * 6.3
    return torch.cat((turns.cos(), turns.sin()), dim=-1)


def poisoned_cache(blocks, kv_heads, block, size, dtype):
    """Keys, values and their scales of the second of three layers, full of NaN, or of codes that have NaN as scales."""
    shape = (blocks, 3, 2, kv_heads, block)
    if dtype in CODES:
        data, scales = torch.full((*shape, size), 0x7F, dtype=torch.uint8).view(dtype), torch.full(shape, float("nan"))
    else:
        data, scales = torch.full((*shape, size), float("nan"), dtype=dtype), None
    return data[:, 1, 0], data[:, 1, 1], *((None, None) if scales is None else (scales[:, 1, 0], scales[:, 1, 1]))


def problem(positions, kv_heads=2, group=3, size=16, rotary=8, block=16, dtype=torch.float32, cache=None):
    """Arguments of the operator; whatever has not been written before a row's position is poison."""
    heads, rows, longest = kv_heads * group, len(positions), max(positions)
    count = longest // block + 2
    used = [position // block + 1 for position in positions]
    stored = cache or dtype
    caches = poisoned_cache(sum(used) + 3, kv_heads, block, size, stored)
    table, free = torch.full((rows, count), NOWHERE, dtype=torch.int32), (torch.randperm(sum(used)) + 2).tolist()
    for row, blocks in enumerate(used):
        table[row, :blocks] = torch.tensor([free.pop() for _ in range(blocks)])
        for at in range(positions[row]):
            for tensor, scale in zip(caches[:2], caches[2:], strict=True):
                vector = torch.randn(kv_heads, size).to(dtype)
                if scale is not None:
                    vector, scale[table[row, at // block], :, at % block] = quantize(vector, stored)
                tensor[table[row, at // block], :, at % block] = vector
    return {
        "qkv": torch.randn(rows, (heads + 2 * kv_heads) * size).to(dtype),
        "table": angles(longest + 7, rotary),
        "positions": torch.tensor(positions, dtype=torch.int32),
        "blocks": table,
        "keys": caches[0],
        "values": caches[1],
        "key_scales": caches[2],
        "value_scales": caches[3],
        "heads": heads,
        "interleaved": True,
        "limit": longest + 1,
        "stored": False,
    }


def row_of(given, name, row, tokens):
    """The first tokens of a row, `[kv_heads, tokens, ...]`, found one by one."""
    cache, block = given[name], given["keys"].shape[2]
    found = [cache[given["blocks"][row, at // block], :, at % block] for at in range(tokens)]
    return torch.stack(found, dim=1) if found else cache[0, :, :0]


def bits(tensor):
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


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
        past = []
        for name in ("key", "value"):
            cached = row_of(given, name + "s", row, position).double()
            if given[name + "_scales"] is not None:
                cached = cached * row_of(given, name + "_scales", row, position)[..., None].double()
            past.append(cached)
        for head in range(kv_heads * group):
            kv = head // group
            key = turned(parts[row, kv_heads * group + kv], table, given["interleaved"])
            keys = torch.cat((past[0][kv], key[None]))
            values = torch.cat((past[1][kv], parts[row, kv_heads * (group + 1) + kv].double()[None]))
            query = turned(parts[row, head], table, given["interleaved"])
            out[row, head] = (keys @ query * size**-0.5).softmax(0) @ values
    return out


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_against_float64(dtype, interleaved):
    torch.manual_seed(1)
    for kv_heads, group, size, rotary, block in ((2, 3, 16, 8, 16), (1, 4, 32, 32, 32), (3, 1, 8, 6, 16)):
        given = problem([0, 4, 15, 16, 43], kv_heads, group, size, rotary, block, dtype=dtype)
        given["interleaved"] = interleaved
        wanted = expected(given, kv_heads, group, size)
        found = decode_attention(**given)
        assert found.dtype == dtype
        error = (found.double() - wanted).norm() / wanted.norm()
        assert error < 2 * torch.finfo(dtype).eps, error


@pytest.mark.parametrize("cache", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_codes_within_their_precision(dtype, cache):
    torch.manual_seed(2)
    given = problem([3, 30], dtype=dtype, cache=cache)
    wanted = expected(given, 2, 3, 16)
    found = decode_attention(**given)
    # Only the new token is seen unquantized by `expected`: int8 keeps 7 bits of it and e4m3 3.
    assert (found.double() - wanted).norm() / wanted.norm() < (0.01 if cache == torch.int8 else 0.05)


def test_writes_the_new_token_and_nothing_else():
    torch.manual_seed(3)
    for cache in (None, *CODES):
        given = problem([2, 21], cache=cache)
        names = ["keys", "values"] + ([] if cache is None else ["key_scales", "value_scales"])
        before = {name: given[name].clone() for name in names}
        decode_attention(**given)
        _, k, v = given["qkv"].view(2, -1, 16).split((6, 2, 2), dim=1)
        for row, position in ((0, 2), (1, 21)):
            block, place = given["blocks"][row, position // 16], position % 16
            rotated = torch.stack([turned(k[row, head], given["table"][position], True) for head in (0, 1)])
            for name, new in (("keys", rotated.float()), ("values", v[row])):
                stored = given[name][block, :, place].float()
                if cache is not None:
                    stored = stored * given[name[:-1] + "_scales"][block, :, place, None]
                torch.testing.assert_close(stored, new, atol=1e-6 if cache is None else 0.2, rtol=0)
            for name in names:
                before[name][block, :, place] = given[name][block, :, place]
        for name in names:
            assert torch.equal(bits(given[name]), bits(before[name])), name


def test_a_row_alone_and_in_a_batch():
    torch.manual_seed(4)
    given = problem([7, 3, 40], dtype=torch.float16)
    whole = decode_attention(**given)
    for row in range(3):
        alone = {name: given[name][row : row + 1] for name in ("qkv", "positions", "blocks")}
        torch.testing.assert_close(decode_attention(**(given | alone)), whole[row : row + 1])


@pytest.mark.parametrize("cache", [None, *CODES])
def test_stored_tokens_of_one_sequence_equal_one_after_another(cache):
    torch.manual_seed(5)
    # Four tokens that follow 30 others of one sequence, and one of another sequence.
    given = problem([30, 30, 30, 30, 9], cache=cache)
    given["blocks"][:4] = given["blocks"][0].clone()
    given["blocks"][:4, 2] = 1  # of nobody so far
    given |= {"positions": torch.tensor([30, 31, 32, 33, 9], dtype=torch.int32), "limit": 34}
    names = ("keys", "values", "key_scales", "value_scales")
    apart = given | {name: None if given[name] is None else given[name].clone() for name in names}
    wanted = []
    for row in range(5):
        one = {name: given[name][row : row + 1] for name in ("qkv", "positions", "blocks")}
        wanted.append(decode_attention(**(apart | one)))
    slots = given["blocks"].gather(1, given["positions"].long()[:, None] // 16)[:, 0].long() * 16
    rope_and_cache(
        given["qkv"],
        given["table"],
        given["positions"],
        slots + given["positions"] % 16,
        *(given[name] for name in names),
        heads=6,
        interleaved=True,
    )
    before = {name: given[name].clone() for name in names if given[name] is not None}
    given["qkv"][:, 6 * 16 :] = float("nan")  # keys and values are not looked at
    found = decode_attention(**(given | {"stored": True}))
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-5, atol=1e-6)
    for name, tensor in before.items():
        assert torch.equal(bits(given[name]), bits(tensor)), name
        assert torch.equal(bits(apart[name]), bits(tensor)), name


def test_no_rows():
    given = problem([3])
    none = {name: given[name][:0] for name in ("qkv", "positions", "blocks")}
    assert decode_attention(**(given | none)).shape == (0, 6, 16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize(("size", "group"), [(16, 1), (64, 64), (96, 7), (128, 16), (128, 65), (256, 32)])
def test_cuts_cover_every_row(size, group, bits, device):
    for pairs in (1, 2, 16, 64, 4096):
        for limit in (1, 63, 64, 65, 512, 1024, 4096, 5000, 131072):
            possible = cuts(pairs, group, size, bits, limit, device)
            assert plan(pairs, group, size, bits, limit, device) in possible
            for cut in possible:
                a_chunk = 32 if size > 128 else 64
                assert (cut.blocks - 1) * cut.chunks * a_chunk < limit <= cut.blocks * cut.chunks * a_chunk
                assert (cut.blocks - 1) * cut.parts_per_block < cut.parts <= cut.blocks * cut.parts_per_block
                assert cut.shared <= device.shared - 1024
                assert 2 <= cut.stages <= 4
                assert cut.tiles == -(-group // 16)


def test_the_tree_of_sums_depends_on_the_limit_alone():
    for limit in (100, 1024, 4096, 4097, 100_000):
        possible = [
            cut
            for pairs in (1, 8, 64, 1024)
            for group in (1, 16, 33)
            for device in DEVICES
            for cut in cuts(pairs, group, 128, 16, limit, device)
        ]
        assert len({cut.chunks_per_unit for cut in possible}) == 1
        (in_group,) = {cut.units_per_group for cut in possible}
        assert in_group <= 4
        for cut in possible:
            # A part is a unit, and then the block's only one, a group, or a quarter; see csrc/attention/combine.cuh.
            assert cut.units_per_part in (1, in_group, 4 * in_group)
            assert cut.parts <= 16 * (in_group // cut.units_per_part or 1)
            assert cut.parts_per_block == 1 or cut.units_per_part >= in_group


def test_rows_and_context_decide_the_cut():
    def chosen(batch, limit=4096, bits=16):
        return plan(2 * batch, 16, 128, bits, limit, H100)

    assert (chosen(1).blocks, chosen(1).combiners, chosen(1).late) == (64, 16, True)
    for bits, stages in ((16, 3), (8, 4)):
        for batch, blocks, parts in ((8, 16, 16), (16, 8, 16), (32, 4, 4), (64, 2, 4), (128, 1, 4)):
            cut = chosen(batch, bits=bits)
            assert (cut.blocks, cut.parts, cut.stages, cut.combiners, cut.late) == (blocks, parts, stages, 4, False)
            assert cut.waves == 1
    assert chosen(512).combiners == 1  # not all blocks run at once: none may wait for others
    assert [chosen(1, limit).blocks for limit in (64, 512, 1024, 2048)] == [1, 8, 16, 32]
    assert [chosen(1, limit).late for limit in (64, 512, 1024, 2048)] == [False, False, False, True]


def test_one_block_never_sums_dozens_of_parts():
    for device in DEVICES:
        for pairs in range(1, 200):
            assert all(cut.combiners != 1 or cut.parts <= 16 for cut in cuts(pairs, 16, 128, 16, 4096, device))


@pytest.mark.parametrize(("size", "registers"), [(64, 168), (128, 168), (256, 255)])
def test_blocks_that_wait_for_others_fit_the_gpu(size, registers):
    for device in DEVICES:
        for pairs in (1, 2, 4, 8, 64, 512):
            for limit in (100, 4096, 100_000):
                for cut in cuts(pairs, 40, size, 16, limit, device):
                    of_one = min(device.shared // (cut.shared + 1024), 65536 // (128 * registers))
                    assert of_one >= 1
                    if cut.combiners > 1:
                        assert 3 * pairs * cut.blocks <= device.multiprocessors * of_one


@pytest.mark.parametrize(
    ("dtype", "size", "arch", "wanted"),
    [
        (torch.float16, 128, "sm_80", True),
        (torch.bfloat16, 256, "sm_120a", True),
        (torch.float16, 16, "sm_90a", True),
        (torch.float16, 24, "sm_90a", False),
        (torch.float16, 272, "sm_90a", False),
        (torch.float32, 64, "sm_90a", False),
        (torch.float16, 64, "sm_75", False),
    ],
)
def test_which_heads_have_a_kernel(dtype, size, arch, wanted, monkeypatch):
    monkeypatch.setattr(attention, "architecture", lambda device: arch)
    assert has_kernel(dtype, size, torch.device("cuda")) is wanted
    assert not has_kernel(dtype, size, torch.device("cpu"))


def cache(**changes):
    return {name: torch.zeros(5, 2, 16, 16, **changes) for name in ("keys", "values")}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"qkv": torch.zeros(2, 159)}, TensorError, r"qkv has shape \[2, 159\]"),
        ({"qkv": torch.zeros(2, 160, dtype=torch.int32)}, TensorError, "qkv is int32, expected float32"),
        ({"heads": 5}, TensorError, "heads a multiple of kv_heads"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, TensorError, "one for each of the 2 rows"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, TensorError, "positions are torch.int64"),
        ({"blocks": torch.zeros(3, 2, dtype=torch.int32)}, TensorError, "one for each of the 2 rows"),
        ({"blocks": torch.zeros(2, 2, dtype=torch.int64)}, TensorError, "blocks are torch.int64, expected torch.int32"),
        ({"blocks": torch.zeros(2, 2, dtype=torch.int32).T}, TensorError, "give 1 as the last one"),
        ({"table": torch.zeros(40, 7)}, TensorError, "table has 7 columns"),
        ({"table": torch.zeros(40, 18)}, TensorError, "table has 18 columns"),
        ({"table": torch.zeros(40, 8).half()}, TensorError, "table is float16, expected float32"),
        ({"keys": torch.zeros(3, 2, 16)}, TensorError, r"keys has shape \[3, 2, 16\]"),
        ({"keys": torch.zeros(3, 2, 24, 16)}, TensorError, "keys has blocks of 24 tokens: give a power of two"),
        ({"keys": torch.zeros(3, 2, 8, 16)}, TensorError, "keys has blocks of 8 tokens: give a power of two"),
        ({"values": torch.zeros(6, 2, 16, 16)}, TensorError, "that of keys"),
        ({"values": cache(dtype=torch.int8)["values"]}, TensorError, "give both caches in one dtype"),
        (cache(dtype=torch.float16), TensorError, "keys is torch.float16"),
        (cache(dtype=torch.int8), TensorError, "key_scales does not go with a cache of torch.int8"),
        ({"key_scales": torch.zeros(5, 2, 16)}, TensorError, "key_scales does not go with a cache of torch.float32"),
        ({"limit": 33}, UsageError, "limit is 33, with blocks for 32 tokens and a table of 22 positions"),
        ({"limit": 0}, UsageError, "limit is 0"),
    ],
)
def test_what_is_rejected(changes, error, message):
    given = problem([3, 15])
    assert given["keys"].shape == (5, 2, 16, 16)
    with pytest.raises(error, match=message):
        decode_attention(**(given | changes))


@pytest.mark.parametrize("stored", [False, True])
def test_registered_as_an_operator(stored):
    given = problem([3, 9]) | {"stored": stored, "inputs_ready": not stored}
    if stored:
        given["keys"].zero_()
        given["values"].zero_()
    opcheck(torch.ops.warpbus.decode_attention.default, tuple(given.values()))
    compiled = torch.compile(lambda arguments: decode_attention(**arguments) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(given), decode_attention(**given) + 1)
