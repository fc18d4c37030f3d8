"""The cases of `moe` on the CPU: what they read, and the same answer as the peer's from the same weights."""

import pytest
import torch

from warpbus.bench import experts
from warpbus.bench.cases import Run
from warpbus.bench.experts import MOE
from warpbus.errors import UsageError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(experts, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(experts, "matrix_rate", lambda device, dtype: 1e12)
    monkeypatch.setattr(experts, "precision_rate", lambda device, precision: 2e12)
    monkeypatch.setitem(experts.SHAPES, "glm-4.7-flash", experts._Experts(256, 128, 6, 3))
    monkeypatch.setitem(experts.SHAPES, "qwen3-30b-a3b", experts._Experts(128, 128, 5, 2, shared=False))


def settings(**changes):
    return Run(**{"device": CPU, "command": "warpbus bench moe", "quick": True, **changes})


def test_how_many_cases_there_are():
    assert len(MOE.cases(settings(quick=False))) == 2 * 7
    assert len(MOE.cases(settings())) == 2 * 3
    with pytest.raises(UsageError, match="--variant glm-3: there is no such variant: choose among glm-"):
        MOE.cases(settings(variants=("glm-3",)))


@pytest.mark.parametrize(
    "name", ["glm-4.7-flash", "qwen3-30b-a3b", "glm-4.7-flash:16-bit", "qwen3-30b-a3b:16-bit", "glm-4.7-flash:w8a8-fp8"]
)
@pytest.mark.parametrize("tokens", [1, 17])
def test_the_peer_says_the_same(name, tokens):
    torch.manual_seed(0)
    (build,) = MOE.cases(settings(sizes=(tokens,), variants=(name,)))
    case = build()
    x, weights = case.make()
    ours, theirs = case.ours(x, weights), case.rivals[0].call(x, weights)
    assert ours.shape == theirs.shape == x.shape
    assert (ours - theirs).norm() < (0.1 if name.endswith("fp8") else 0.02) * theirs.norm()


@pytest.mark.parametrize(("form", "bits"), [("w4a16-g128", 4 + 16 / 128), ("16-bit", 16), ("w8a8-fp8", 8)])
def test_one_token_reads_its_experts_alone(form, bits):
    name = "glm-4.7-flash" if form == "w4a16-g128" else f"glm-4.7-flash:{form}"
    (build,) = MOE.cases(settings(sizes=(1,), variants=(name,)))
    case = build()
    each = 3 * 256 * 128 * bits / 8
    assert case.touched == int(3 * each) + 2 * 256 * 2
    assert case.parameters == {"shape": "glm-4.7-flash", "tokens": 1, "dtype": "bfloat16", "variant": form}
