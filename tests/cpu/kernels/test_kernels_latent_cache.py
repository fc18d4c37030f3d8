"""The FP8 cache of latents: what is stored, the references that write and read it, and what is rejected."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from latent_cases import exact_attention, exact_latents, latent_problem, listed, queries_problem
from torch.library import opcheck

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops.latent_cache import gather_latents
from warpbus.kernels.ops.mla import mla_attention, mla_queries, mla_rope_and_cache
from warpbus.kernels.reference.latent_cache import LATENT_CODES, dequantize, quantize, token_bytes

SMALL = {"heads": 3, "nope": 10, "rope": 8, "rank": 16, "value": 12}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def scales_of(cached, rank=512):
    groups = -(-rank // 128)
    return cached[:, rank : rank + 4 * groups].contiguous().view(torch.float32)


@pytest.mark.parametrize(
    ("rank", "rope", "dtype", "size"),
    [
        (512, 64, torch.bfloat16, 512 + 16 + 128),
        (512, 64, torch.float32, 512 + 16 + 256),
        (16, 8, torch.float16, 16 + 16 + 16),
        (20, 3, torch.float32, 32 + 16 + 16),
        (640, 64, torch.float16, 640 + 32 + 128),
    ],
)
def test_a_token_takes_few_bytes(rank, rope, dtype, size):
    assert token_bytes(rank, rope, dtype) == size
    assert quantize(torch.zeros(3, rank + rope, dtype=dtype), rank).shape == (3, size)


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 2**32), exponent=st.integers(-12, 12), rank=st.sampled_from([16, 20, 128, 200, 512]))
def test_rounding_is_that_of_e4m3_with_the_smallest_power_of_two(dtype, seed, exponent, rank):
    draw = torch.Generator().manual_seed(seed)
    latent = (torch.randn(5, rank + 8, generator=draw) * 2.0**exponent).to(dtype)
    cached = quantize(latent, rank)
    stored = exact_latents(cached.view(LATENT_CODES), rank, 8, dtype)
    assert torch.equal(stored[:, rank:], latent[:, rank:].double())
    wide, groups = latent[:, :rank].double(), -(-rank // 128)
    at = -(-rank // 16) * 16
    scales = cached[:, at : at + 4 * groups].contiguous().view(torch.float32).double()
    assert (scales.frexp().mantissa == 0.5).all()
    padded = torch.nn.functional.pad(wide, (0, -rank % 128)).unflatten(1, (groups, 128))
    largest = padded.abs().amax(-1)
    assert (largest <= 448 * scales).all()
    assert ((largest > 224 * scales) | (scales == 2.0**-24)).all()
    # Half a unit in the last place: 2^-4 of a number, or 2^-10 scales of a subnormal one.
    spread = scales.repeat_interleave(128, dim=1)[:, :rank]
    assert ((stored[:, :rank] - wide).abs() <= torch.maximum(wide.abs() / 16, spread * 2.0**-10)).all()
    # In 16 bits products are rounded below the smallest number of float16 only.
    read = dequantize(cached, rank, 8, dtype)
    assert torch.equal(read, stored.to(dtype))


def test_features_beyond_the_scales():
    latent = torch.zeros(4, 576)
    latent[1, :3] = torch.tensor([1e6, -1e6, float("inf")])
    latent[1, 3] = 5000.0
    latent[2, 5] = 1e-11
    latent[3, 200] = float("nan")
    latent[3, 7] = 1.0
    found = dequantize(quantize(latent, 512), 512, 64, torch.float32)
    assert torch.equal(found[0], latent[0])
    assert found[1, :4].tolist() == [57344.0, -57344.0, 57344.0, 5120.0]
    assert found[2, 5] == 0  # less than half of 2^-33
    assert found[3, 7] == 1
    assert found[3, 128:256].isnan().all()
    assert not found[3, 256:].any()
    assert (scales_of(quantize(latent, 512))[0] == 2.0**-24).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [True, False])
def test_new_latents_are_rounded(dtype, interleaved):
    plain = queries_problem(4, dtype=dtype, interleaved=interleaved, **SMALL)
    asked = {**plain, "latents": queries_problem(4, dtype=dtype, coded=True, **SMALL)["latents"]}
    before = asked["latents"].view(torch.uint8).clone()
    assert torch.equal(mla_queries(**asked), mla_queries(**plain))
    where = asked["slots"] // 16, 0, asked["slots"] % 16
    expected = quantize(plain["latents"][where], 16)
    assert torch.equal(asked["latents"].view(torch.uint8)[where], expected)
    before[where] = expected
    assert torch.equal(asked["latents"].view(torch.uint8), before)
    del asked["kv_b"]
    asked["latents"].view(torch.uint8).fill_(255)
    found = mla_rope_and_cache(asked.pop("q").clone(), **asked)
    assert torch.equal(found, dequantize(expected, 16, 8, dtype))
    assert torch.equal(asked["latents"].view(torch.uint8), before)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("positions", [[0], [15, 16, 17], [40, 0, 31, 63]], ids=str)
def test_rows_attend_to_their_own_latents(positions, dtype, tolerance):
    asked = latent_problem(positions, dtype=dtype, coded=True, **SMALL)
    found = mla_attention(**asked)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact_attention(asked), rtol=tolerance, atol=tolerance)
    asked = listed(asked, [position // 2 + 1 for position in positions])
    torch.testing.assert_close(mla_attention(**asked).double(), exact_attention(asked), rtol=tolerance, atol=tolerance)


def test_outputs_are_close_to_those_of_exact_latents(seed):
    """Of the published sizes and random latents: what is lost is about a tenth of one output's size at most."""
    asked = latent_problem([300, 40])
    rounded = {**asked, "latents": torch.empty(*asked["latents"].shape[:3], 784, dtype=LATENT_CODES)}
    rounded["latents"].view(torch.uint8).copy_(quantize(asked["latents"].flatten(0, 2), 512).view(-1, 1, 16, 784))
    exact = exact_attention(asked)
    error = (mla_attention(**rounded).double() - exact).norm() / exact.norm()
    assert 0.001 < error < 0.06


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 16, 33])
def test_a_sequence_is_gathered(dtype, coded, tokens):
    asked = latent_problem([32, 5], dtype=dtype, coded=coded, **SMALL)
    found = gather_latents(asked["latents"], asked["blocks"][0, :3], tokens, 16, 8, dtype)
    assert found.shape == (tokens, 1, 24)
    assert found.is_contiguous()
    expected = exact_latents(asked["latents"][asked["blocks"][0, :3].long(), 0], 16, 8, dtype).flatten(0, 1)[:tokens]
    assert torch.equal(found[:, 0], expected.to(dtype))


def test_the_operator_is_registered():
    asked = latent_problem([32], coded=True, **SMALL)
    arguments = asked["latents"], asked["blocks"][0], 20, 16, 8, torch.float32
    checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"  # no schema's: it adds float8
    opcheck(torch.ops.warpbus.gather_latents.default, arguments, test_utils=checks)


def test_what_does_not_fit_is_refused():
    asked = latent_problem([32], coded=True, **SMALL)
    latents, blocks = asked["latents"], asked["blocks"][0]
    with pytest.raises(TensorError, match=r"^gather_latents: latents have shape .* 64\] torch.float8_e4m3fn and"):
        gather_latents(latents, blocks, 5, 16, 16, torch.float32)
    with pytest.raises(TensorError, match=r"^gather_latents: latents have shape .* or \[..., 48\] torch.float8_e4m3fn"):
        gather_latents(latents, blocks, 5, 16, 8, torch.float16)  # of float32 rotary keys
    with pytest.raises(TensorError, match=r"^gather_latents: dtype is torch.float64"):
        gather_latents(latents, blocks, 5, 16, 8, torch.float64)
    with pytest.raises(TensorError, match=r"^gather_latents: blocks are torch.int16"):
        gather_latents(latents, blocks.short(), 5, 16, 8, torch.float32)
    with pytest.raises(UsageError, match=r"^gather_latents: tokens is 500"):
        gather_latents(latents, blocks, 500, 16, 8, torch.float32)
