"""mla_attention: the reference against float64, and what is rejected."""

import pytest
import torch
from torch.library import opcheck

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops.mla import mla_attention

NOWHERE = 2**31 - 1  # an entry of a block table that may not be used


def problem(positions, *, heads=3, size=24, value_dim=16, block=16, dtype=torch.float32):
    """Arguments of the operator; whatever no row attends to is NaN, or an entry that may not be used."""
    used = [position // block + 1 for position in positions]
    latents = torch.full((sum(used) + 2, 3, 1, 1, block, size), float("nan"), dtype=dtype)[:, 1, 0]
    table = torch.full((len(positions), max(used, default=0) + 1), NOWHERE, dtype=torch.int32)
    free = (torch.randperm(sum(used)) + 1).tolist()
    for row, position in enumerate(positions):
        table[row, : used[row]] = torch.tensor([free.pop() for _ in range(used[row])])
        for at in range(position + 1):
            latents[table[row, at // block], 0, at % block] = torch.randn(size).to(dtype)
    return {
        "q": torch.randn(len(positions), heads, size).to(dtype),
        "positions": torch.tensor(positions, dtype=torch.int32),
        "blocks": table,
        "latents": latents,
        "value_dim": value_dim,
        "scale": 0.3,
        "limit": max(positions, default=0) + 1,
    }


def exact(asked):
    """Row by row in float64."""
    latents, block = asked["latents"].double(), asked["latents"].shape[2]
    found = []
    for q, position, table in zip(asked["q"].double(), asked["positions"].tolist(), asked["blocks"], strict=True):
        keys = torch.stack([latents[table[at // block], 0, at % block] for at in range(position + 1)])
        weights = (q @ keys.T * asked["scale"]).softmax(-1)
        found.append(weights @ keys[:, : asked["value_dim"]])
    return torch.stack(found)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("positions", [[0], [15, 16, 17], [40, 0, 31, 63]], ids=str)
def test_rows_attend_to_their_own_latents(positions, dtype, tolerance):
    asked = problem(positions, dtype=dtype)
    found = mla_attention(**asked)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact(asked), rtol=tolerance, atol=tolerance)


def test_a_limit_above_the_positions_changes_nothing():
    asked = problem([5, 20])
    found = mla_attention(**asked)
    assert torch.equal(mla_attention(**{**asked, "limit": 48}), found)


def test_rows_attend_to_selected_latents_only():
    asked = problem([40, 17])
    selected = torch.rand(2, 48) < 0.5
    selected[:, 3] = True
    found = mla_attention(**asked, selected=selected)
    for row, position in enumerate((40, 17)):
        kept = selected[row, : position + 1].nonzero()[:, 0]
        keys = torch.stack(
            [asked["latents"][asked["blocks"][row, at // 16], 0, at % 16] for at in kept.tolist()]
        ).double()
        weights = (asked["q"][row].double() @ keys.T * 0.3).softmax(-1)
        torch.testing.assert_close(found[row].double(), weights @ keys[:, :16], rtol=1e-5, atol=1e-5)


def test_sizes_of_the_published_models_and_no_rows():
    asked = problem([33], heads=20, size=576, value_dim=512, block=32)
    torch.testing.assert_close(mla_attention(**asked).double(), exact(asked), rtol=1e-4, atol=1e-5)
    empty = problem([])
    assert mla_attention(**{**empty, "limit": 16}).shape == (0, 3, 16)


def test_the_operator_is_registered():
    opcheck(torch.ops.warpbus.mla_attention.default, (*problem([5, 20]).values(), None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 24)}, r"q"),
        ({"q": torch.zeros(2, 3, 20)}, r"latents have shape .* 20\] on cpu"),
        ({"latents": torch.zeros(4, 2, 16, 24)}, r"latents have shape \[4, 2, 16, 24\]"),
        ({"latents": torch.zeros(4, 1, 12, 24)}, r"latents has blocks of 12 tokens"),
        ({"latents": torch.zeros(4, 1, 16, 24).half()}, r"latents is torch.float16"),
        ({"latents": torch.zeros(4, 1, 16, 24).to(torch.int8)}, r"scales does not go with a cache of torch.int8"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, r"positions are torch.int64, expected torch.int32"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, r"positions"),
        ({"selected": torch.ones(2, 20, dtype=torch.bool)}, r"selected is torch.bool \[2, 20\] .* \[2, 32\] on cpu"),
        ({"selected": torch.ones(2, 32)}, r"selected is torch.float32"),
        ({"blocks": torch.zeros(3, 2, dtype=torch.int32)}, r"blocks"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(TensorError, match=rf"^mla_attention: {message}"):
        mla_attention(**{**problem([5, 20]), **changes})


@pytest.mark.parametrize(("changes"), [{"limit": 0}, {"limit": 49}, {"value_dim": 0}, {"value_dim": 25}], ids=str)
def test_sizes_that_do_not_fit_are_refused(changes):
    (name,) = changes
    with pytest.raises(UsageError, match=rf"^mla_attention: {name} is {changes[name]}"):
        mla_attention(**{**problem([5, 20]), **changes})
