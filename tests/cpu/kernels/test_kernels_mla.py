"""mla_queries and mla_attention: the references against float64, what is rejected, and how kernels cut a row."""

import pytest
import torch
from latent_cases import exact_attention, exact_queries, latent_problem, listed, queries_problem
from torch.library import opcheck

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops.mla import has_kernel, mla_attention, mla_queries, mla_rope_and_cache
from warpbus.kernels.ops.mla_plan import LatentDevice, other_bytes, plan, wgmma_bytes

H100 = LatentDevice(132, 228 << 10, wgmma=True)
B200 = LatentDevice(148, 228 << 10, wgmma=False)
A100 = LatentDevice(108, 164 << 10, wgmma=False)
RTX_4090 = LatentDevice(128, 100 << 10, wgmma=False)
SMALL = {"heads": 3, "nope": 10, "rope": 8, "rank": 16, "value": 12}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("positions", [[0], [15, 16, 17], [40, 0, 31, 63]], ids=str)
def test_rows_attend_to_their_own_latents(positions, dtype, tolerance):
    asked = latent_problem(positions, dtype=dtype, **SMALL)
    found = mla_attention(**asked)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact_attention(asked), rtol=tolerance, atol=tolerance)


def test_a_limit_above_the_positions_changes_nothing():
    asked = latent_problem([5, 20], **SMALL)
    found = mla_attention(**asked)
    assert torch.equal(mla_attention(**{**asked, "limit": 48}), found)


def test_rows_attend_to_listed_latents_only():
    asked = latent_problem([40, 17, 0], **SMALL)
    some = listed(asked, [20, 7, 1])
    torch.testing.assert_close(mla_attention(**some).double(), exact_attention(some), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(mla_attention(**asked).double()[:2], exact_attention(some)[:2])
    every = listed(asked, [41, 18, 1])
    torch.testing.assert_close(mla_attention(**every).double(), exact_attention(asked), rtol=1e-5, atol=1e-5)


def test_sizes_of_the_published_models_and_no_rows():
    asked = latent_problem([33], block=32)
    torch.testing.assert_close(mla_attention(**asked).double(), exact_attention(asked), rtol=1e-4, atol=1e-4)
    empty = latent_problem([], **SMALL)
    assert mla_attention(**{**empty, "limit": 16}).shape == (0, 3, 12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("interleaved", [True, False])
def test_queries_are_absorbed_and_latents_stored(dtype, tolerance, interleaved):
    asked = queries_problem(4, dtype=dtype, interleaved=interleaved, **SMALL)
    before = asked["latents"].clone()
    queries, stored = exact_queries(asked)
    torch.testing.assert_close(mla_queries(**asked).double(), queries, rtol=tolerance, atol=tolerance)
    blocks, inside = asked["slots"] // 16, asked["slots"] % 16
    torch.testing.assert_close(asked["latents"][blocks, 0, inside].double(), stored, rtol=tolerance, atol=tolerance)
    before[blocks, 0, inside] = asked["latents"][blocks, 0, inside]
    torch.testing.assert_close(asked["latents"], before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("interleaved", [True, False])
def test_prompts_rotate_in_place(interleaved):
    asked = queries_problem(4, interleaved=interleaved, **SMALL)
    queries, stored = exact_queries(asked)
    own, nope = asked["q"].clone(), asked["q"][..., :10].clone()
    others = {name: asked[name] for name in asked if name not in ("q", "kv_b")}
    torch.testing.assert_close(mla_rope_and_cache(own, **others).double(), stored, rtol=1e-5, atol=1e-5)
    assert torch.equal(own[..., :10], nope)
    torch.testing.assert_close(own[..., 10:].double(), queries[..., 16:], rtol=1e-5, atol=1e-5)
    blocks, inside = asked["slots"] // 16, asked["slots"] % 16
    torch.testing.assert_close(asked["latents"][blocks, 0, inside].double(), stored, rtol=1e-5, atol=1e-5)
    with pytest.raises(TensorError, match=r"^mla_rope_and_cache: q has shape \[4, 3, 18\], strides"):
        mla_rope_and_cache(asked["q"].transpose(0, 1).contiguous().transpose(0, 1), **others)


def test_the_operators_are_registered():
    asked = {**latent_problem([5, 20], **SMALL), "listed": False, "inputs_ready": False}
    opcheck(torch.ops.warpbus.mla_attention.default, tuple(asked.values()))
    asked = queries_problem(2, **SMALL)
    asked["latents"].zero_()  # opcheck compares what is written, and NaN is not equal to itself
    opcheck(torch.ops.warpbus.mla_queries.default, tuple(asked.values()))
    del asked["kv_b"]
    opcheck(torch.ops.warpbus.mla_rope_and_cache.default, tuple(asked.values()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 24)}, r"q"),
        ({"q": torch.zeros(2, 3, 20)}, r"latents have shape .* 20\] torch.float32 or \[..., 48\] torch.float8_e4m3fn"),
        (
            {"latents": torch.zeros(4, 1, 16, 24).to(torch.float8_e4m3fn)},
            r"latents have shape \[4, 1, 16, 24\] torch.float8",
        ),
        ({"latents": torch.zeros(4, 2, 16, 24)}, r"latents have shape \[4, 2, 16, 24\]"),
        ({"latents": torch.zeros(4, 1, 12, 24)}, r"latents has blocks of 12 tokens"),
        ({"latents": torch.zeros(4, 1, 16, 24).half()}, r"latents is torch.float16"),
        ({"latents": torch.zeros(4, 1, 16, 24).to(torch.int8)}, r"scales does not go with a cache of torch.int8"),
        ({"kv_b": torch.zeros(3, 22, 32)}, r"kv_b has shape \[3, 22, 32\] and q"),
        ({"kv_b": torch.zeros(4, 22, 16)}, r"kv_b has shape \[4, 22, 16\]"),
        ({"kv_b": torch.zeros(3, 16, 22).mT}, r"kv_b has shape \[3, 22, 16\], strides"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, r"positions are torch.int64, expected torch.int32"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, r"positions"),
        ({"blocks": torch.zeros(3, 2, dtype=torch.int32)}, r"blocks"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(TensorError, match=rf"^mla_attention: {message}"):
        mla_attention(**{**latent_problem([5, 20], **SMALL), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 3, 8)}, r"q has shape \[2, 3, 8\]"),
        ({"q": torch.zeros(2, 3, 40)}, r"q has shape \[2, 3, 40\]"),
        ({"latent": torch.zeros(2, 20)}, r"latent has shape \[2, 20\], expected \[2, 24\]"),
        ({"norm": torch.zeros(8)}, r"norm has shape \[8\]"),
        ({"table": torch.zeros(64, 8).half()}, r"table is float16"),
        ({"latents": torch.zeros(4, 1, 16, 20)}, r"latents have shape \[4, 1, 16, 20\] torch.float32 and"),
        ({"kv_b": torch.zeros(2, 22, 16)}, r"kv_b has shape \[2, 22, 16\]"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, r"slots are torch.int32, expected torch.int64"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, r"positions"),
    ],
)
def test_new_tokens_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(TensorError, match=rf"^mla_queries: {message}"):
        mla_queries(**{**queries_problem(2, **SMALL), **changes})


@pytest.mark.parametrize(("changes"), [{"limit": 0}, {"limit": 49}, {"value_dim": 0}, {"value_dim": 25}], ids=str)
def test_sizes_that_do_not_fit_are_refused(changes):
    (name,) = changes
    with pytest.raises(UsageError, match=rf"^mla_attention: {name} is {changes[name]}"):
        mla_attention(**{**latent_problem([5, 20], **SMALL), **changes})


@pytest.mark.parametrize("device", [H100, B200, A100, RTX_4090], ids=["h100", "b200", "a100", "rtx4090"])
@pytest.mark.parametrize("heads", [1, 5, 10, 20, 40, 64, 128])
@pytest.mark.parametrize("limit", [1, 32, 33, 512, 513, 4096, 8192, 131_072, 200_000])
@pytest.mark.parametrize("coded", [False, True], ids=["elements", "fp8"])
def test_the_cut_of_a_row(device, heads, limit, coded):
    """Blocks have all keys and heads, fit the GPU, and what is summed depends on the limit alone."""
    cuts = [plan(rows, heads, limit, device, coded=coded) for rows in (1, 2, 8, 32, 64, 256)]
    for cut in cuts:
        assert cut.tiles * cut.tile_heads >= heads > (cut.tiles - 1) * cut.tile_heads
        assert cut.tile_heads <= cut.heads
        assert cut.blocks * cut.parts_per_block * cut.part_keys >= limit
        assert (cut.parts - 1) * cut.part_keys < limit
        assert cut.blocks == -(-cut.parts // cut.parts_per_block)
        assert cut.units_per_part in (1, 8)
        if device.wgmma:
            assert (cut.keys, cut.shared) == (64, wgmma_bytes(cut.heads))
        else:
            assert cut.shared - other_bytes(cut.heads, cut.keys) == cut.stages * cut.keys * 584 * 2
            assert cut.stages == 2 if coded else 3 <= cut.stages <= 5
        assert cut.shared + 1024 <= device.shared
    assert len({(cut.heads, cut.keys, cut.tile_heads, cut.chunks_per_unit) for cut in cuts}) == 1


def test_a_single_sequence_has_many_blocks_and_a_batch_one_wave():
    assert plan(1, 20, 4096, H100).blocks >= 32
    batch = plan(32, 20, 4096, H100)
    assert 100 <= 32 * batch.blocks <= 132
    assert batch.units_per_part == 8


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [((192, 64, 512, 256), True), ((192, 64, 512, 128), True), ((128, 64, 512, 128), False), ((10, 8, 16, 12), False)],
)
def test_there_are_kernels_for_the_published_models(monkeypatch, sizes, wanted):
    monkeypatch.setattr("warpbus.kernels.ops.mla.architecture", lambda device: "sm_90a")
    assert has_kernel(torch.bfloat16, *sizes, torch.device("cuda")) is wanted
    assert not has_kernel(torch.float32, *sizes, torch.device("cuda"))
    assert not has_kernel(torch.bfloat16, *sizes, torch.device("cpu"))
