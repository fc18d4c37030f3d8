"""A cache of 4-bit codes on the CPU: the rotation, the codes, and attention over them against float64."""

import pytest
import torch
from torch.library import opcheck

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops import attention
from warpbus.kernels.ops.attention import decode_attention, has_kernel
from warpbus.kernels.ops.cache import gather_cache
from warpbus.kernels.ops.rope import rope_and_cache
from warpbus.kernels.reference.cache import INT4, hadamard, quantize
from warpbus.models.layers.rope import rotate

NAMES = ("keys", "values", "key_scales", "value_scales")
NOWHERE = 2**31 - 1  # an entry of a block table that may not be used


def matrix(size):
    """The Hadamard matrix of a vector in float64, blocks of it on the diagonal."""
    block = torch.ones(1, 1, dtype=torch.float64)
    while len(block) < size & -size:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1))) * 0.5**0.5
    return torch.block_diag(*[block] * (size // len(block)))


@pytest.mark.parametrize("size", [1, 2, 6, 16, 80, 96, 128, 256])
def test_rotation(size):
    torch.manual_seed(size)
    x = torch.randn(3, 5, size)
    torch.testing.assert_close(hadamard(x).double(), x.double() @ matrix(size), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=1e-5, atol=1e-5)
    halves = hadamard(x.bfloat16())
    assert halves.dtype == torch.bfloat16
    torch.testing.assert_close(halves.double(), x.bfloat16().double() @ matrix(size), rtol=2**-8, atol=1e-5)


def numbers(packed, scales):
    """What codes and scales stand for, in float64, in the basis of the model."""
    codes = torch.stack((packed.long() % 16, packed.long() // 16), dim=-1).flatten(-2)
    return (codes.double() - 7.5) * scales.double()[..., None] @ matrix(codes.shape[-1])


@pytest.mark.parametrize("size", [2, 64, 80, 128])
def test_codes(size):
    torch.manual_seed(size)
    x = torch.randn(50, 3, size)
    x[0], x[1, 0] = 0, 1e-30
    x[2, 0, 1:] = 0  # an outlier
    packed, scales = quantize(x, INT4)
    assert (packed.dtype, packed.shape, scales.shape) == (torch.uint8, (50, 3, size // 2), (50, 3))
    rotated = x.double() @ matrix(size)
    torch.testing.assert_close(scales.double(), rotated.abs().amax(-1) / 8, rtol=1e-5, atol=0)
    # No element of the rotated vector is farther from its code than half an interval.
    error = (numbers(packed, scales) - x.double()) @ matrix(size)
    assert (error.abs() <= scales.double()[..., None] * 0.5001).all()
    assert (scales[0] == 0).all()
    assert (quantize(torch.full((1, size), float("nan")), INT4)[1]).isnan().all()


def test_the_rotation_keeps_outliers_from_the_others():
    """With a channel 30 times as large as the others, as keys have it."""
    torch.manual_seed(1)
    x = torch.randn(1000, 128)
    x[:, 5] *= 30
    others = torch.arange(128) != 5

    def error(found):
        return ((found - x.double())[:, others].norm() / x[:, others].norm()).item()

    plain = x.double() @ matrix(128)  # its rotation is x itself
    unrotated = numbers(*quantize(plain.float(), INT4)) @ matrix(128)
    assert error(numbers(*quantize(x, INT4))) < 0.4 < 0.9 < error(unrotated)


def empty(blocks, kv_heads, block, size):
    """Keys, values and their scales, the second of three layers; codes of all ones, and NaN."""
    shape = (blocks, 3, 2, kv_heads, block)
    codes, scales = torch.full((*shape, size // 2), 255, dtype=INT4)[:, 1], torch.full(shape, float("nan"))[:, 1]
    return dict(zip(NAMES, (codes[:, 0], codes[:, 1], scales[:, 0], scales[:, 1]), strict=True))


def angles(positions, rotary):
    turns = torch.rand(positions, rotary // 2) * 6.3
    return torch.cat((turns.cos(), turns.sin()), dim=-1)


def written(lengths, kv_heads=2, group=3, size=32, rotary=16, block=16, dtype=torch.float32, interleaved=True):
    """Sequences that `rope_and_cache` has written, and what went in: the arguments of attention of each one's last
    token, and its keys and values in float64 `[kv_heads, tokens, d]`."""
    heads, longest = kv_heads * group, max(lengths)
    stored = empty(sum(lengths) // block + len(lengths) + 3, kv_heads, block, size)
    table, blocks = angles(longest, rotary), torch.full((len(lengths), longest // block + 2), NOWHERE)
    free, last, went_in = (torch.randperm(len(stored["keys"]) - 1) + 1).tolist(), [], []
    for row, tokens in enumerate(lengths):
        count = -(-tokens // block)
        blocks[row, :count] = torch.tensor([free.pop() for _ in range(count)])
        qkv, at = torch.randn(tokens, (heads + 2 * kv_heads) * size).to(dtype), torch.arange(tokens)
        slots = blocks[row, at // block] * block + at % block
        rope_and_cache(qkv, table, at.int(), slots, *stored.values(), heads=heads, interleaved=interleaved)
        parts = qkv.double().unflatten(-1, (-1, size)).split((heads, kv_heads, kv_heads), dim=1)
        cos, sin = table[:tokens, None].double().chunk(2, dim=-1)
        went_in.append((rotate(parts[1], (cos, sin), interleaved).transpose(0, 1), parts[2].transpose(0, 1)))
        last.append(qkv[-1])
    given = {
        "qkv": torch.stack(last),
        "table": table,
        "positions": torch.tensor(lengths, dtype=torch.int32) - 1,
        "blocks": blocks.int(),
        **stored,
        "heads": heads,
        "interleaved": interleaved,
        "limit": longest,
        "stored": True,
    }
    return given, went_in


def rows_of(given, row, tokens):
    """Keys and values of a row as the codes have them, float64 `[kv_heads, tokens, d]` each."""
    block, at = given["keys"].shape[2], torch.arange(tokens)
    places = given["blocks"][row, at // block].long(), slice(None), at % block
    return [numbers(given[name][places], given[name[:-1] + "_scales"][places]).transpose(0, 1) for name in NAMES[:2]]


def expected(given):
    kv_heads, size = given["keys"].shape[1], 2 * given["keys"].shape[3]
    q = given["qkv"].double().unflatten(-1, (-1, size))[:, : given["heads"]]
    cos, sin = given["table"][given["positions"].long(), None].double().chunk(2, dim=-1)
    q, out = rotate(q, (cos, sin), given["interleaved"]), []
    for row, position in enumerate(given["positions"].tolist()):
        keys, values = rows_of(given, row, position + 1)
        scores = q[row].unflatten(0, (kv_heads, -1)) @ keys.transpose(-1, -2) * size**-0.5
        out.append((scores.softmax(-1) @ values).flatten(0, 1))
    return torch.stack(out)


SHAPES = [(2, 3, 32, 16, 16), (1, 9, 64, 64, 32), (3, 1, 80, 6, 16), (2, 2, 6, 2, 16), (1, 4, 128, 64, 256)]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", [True, False])
def test_attention_against_float64(kernel, dtype, interleaved, monkeypatch):
    if not kernel:
        monkeypatch.setattr(attention, "is_available", lambda: False)
    for shape in SHAPES:
        torch.manual_seed(3)
        given, went_in = written([1, 4, 16, 17, 43], *shape, dtype=dtype, interleaved=interleaved)
        before = {name: given[name].clone() for name in NAMES}
        found, wanted = decode_attention(**given), expected(given)
        assert found.dtype == dtype
        assert (found.double() - wanted).norm() / wanted.norm() < 4 * torch.finfo(dtype).eps
        for name in NAMES:
            assert torch.equal(given[name].view(torch.uint8), before[name].view(torch.uint8)), name
        for row, both in enumerate(went_in):  # the codes are those of what went in, to 4 bits
            for codes, plain in zip(rows_of(given, row, both[0].shape[1]), both, strict=True):
                assert (codes - plain).norm() / plain.norm() < 0.15


def test_a_row_alone_and_in_a_batch():
    given, _ = written([7, 3, 40])
    whole = decode_attention(**given)
    for row in range(3):
        alone = {name: given[name][row : row + 1] for name in ("qkv", "positions", "blocks")}
        assert torch.equal(decode_attention(**(given | alone)), whole[row : row + 1])
    none = {name: given[name][:0] for name in ("qkv", "positions", "blocks")}
    assert decode_attention(**(given | none)).shape == (0, 6, 32)
    assert decode_attention(**{**given, **none, "qkv": given["qkv"][:0].half()}).shape == (0, 6, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [6, 32, 80, 128])
def test_what_is_read_again(size, dtype):
    given, _ = written([43], size=size, rotary=2, dtype=dtype)
    for tokens in (1, 16, 43):
        for name, wanted in zip(NAMES, rows_of(given, 0, tokens), strict=False):
            found = gather_cache(given[name], given[name[:-1] + "_scales"], given["blocks"][0], tokens, dtype)
            assert (found.dtype, found.shape) == (dtype, (tokens, 2, size))
            assert found.is_contiguous()
            torch.testing.assert_close(found.double().transpose(0, 1), wanted, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_only_the_slots_of_the_tokens_are_written():
    stored = empty(3, 2, 16, 32)
    slots, qkv = torch.tensor([40, 3, 17]), torch.randn(3, 8 * 32)
    rope_and_cache(qkv, angles(9, 8), slots.int() % 9, slots, *stored.values(), heads=4, interleaved=True)
    for name, tensor in stored.items():
        by_token = tensor.transpose(1, 2).flatten(0, 1)
        others = torch.ones(48, dtype=torch.bool).index_fill(0, slots, False)
        untouched = by_token[others]
        assert untouched.isnan().all() if "scales" in name else (untouched == 255).all()
        assert by_token[slots].float().isfinite().all()


def test_what_is_refused():
    given, _ = written([20])
    with pytest.raises(UsageError, match="is written by rope_and_cache: call it, give stored"):
        decode_attention(**given | {"stored": False})
    with pytest.raises(TensorError, match=r"key_scales does not go with a cache of torch\.uint8"):
        decode_attention(**given | {"key_scales": None})
    with pytest.raises(TensorError, match=r"qkv has shape \[1, 318\]"):
        decode_attention(**given | {"qkv": given["qkv"][:, 2:]})
    rope = given["qkv"], given["table"], given["positions"], torch.zeros(1, dtype=torch.int64)
    fixed = torch.ones(2), torch.ones(2)
    with pytest.raises(TensorError, match=r"fixed_scales do not go with a cache of torch\.uint8"):
        rope_and_cache(*rope, *(given[name] for name in NAMES), fixed, heads=6, interleaved=True)


def test_registered_as_torch_wants():
    given, _ = written([3, 9])
    opcheck(torch.ops.warpbus.decode_attention.default, (*given.values(), False))
    cache = given["keys"].nan_to_num(), torch.ones(given["keys"].shape[:3])
    opcheck(torch.ops.warpbus.gather_cache.default, (*cache, given["blocks"][1], 9, torch.float16))
    compiled = torch.compile(lambda arguments: decode_attention(**arguments) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(given), decode_attention(**given) + 1)


@pytest.mark.parametrize(("size", "wanted"), [(128, True), (96, True), (80, False), (16, False), (288, False)])
def test_which_heads_have_a_kernel(size, wanted, monkeypatch):
    monkeypatch.setattr("warpbus.kernels.ops.attention.architecture", lambda device: "sm_90a")
    assert has_kernel(torch.float16, size, torch.device("cuda"), INT4) is wanted
