"""The cases of `mla` on the CPU: shapes, bytes, and the same answer as the peer's from the same numbers."""

from dataclasses import replace

import pytest
import torch

from warpbus.bench import latents
from warpbus.bench.cases import Run
from warpbus.bench.latents import MLA
from warpbus.errors import UsageError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(latents, "copy_bandwidth", lambda device: 1e9)


def settings(**changes):
    return Run(**{"device": CPU, "command": "warpbus bench x", "quick": True, **changes})


def test_how_many_cases_there_are():
    assert len(MLA.cases(settings(quick=False))) == 2 * 3 * 3
    assert len(MLA.cases(settings())) == 2 * 3
    assert len(MLA.cases(settings(sizes=(100,), variants=("fp8",)))) == 3
    assert len(MLA.cases(settings(quick=False, variants=("sparse", "sparse-fp8")))) == 2 * 3 * 3
    with pytest.raises(
        UsageError, match=r"--variant int8: there is no such variant: choose among auto, fp8, sparse, sparse-fp8$"
    ):
        MLA.cases(settings(variants=("int8",)))


@pytest.mark.parametrize(("variant", "a_token", "tolerance"), [("auto", 1152, 0.02), ("fp8", 656, 0.06)])
def test_both_answer_from_the_same_numbers(variant, a_token, tolerance):
    case = MLA.cases(settings(sizes=(70,), variants=(variant,)))[1]()
    assert case.parameters == {
        "shape": "glm-4.7-flash",
        "heads": 20,
        "context": 70,
        "batch": 8,
        "dtype": "bfloat16",
        "variant": variant,
    }
    assert case.touched == 8 * 70 * a_token + 20 * 256 * 512 * 2 + 8 * 20 * (576 + 256) * 2
    given = case.make()
    assert all(isinstance(each, torch.Tensor) for each in given)  # by whose device the GPU's time is measured
    cache, table = given[3:]
    assert cache.shape == (24, 1, 32, a_token if variant == "fp8" else 576)
    assert sorted(table.flatten().tolist()) == list(range(24))
    answer, (rival,) = case.ours(*given), case.rivals
    expected = rival.call(*given).float()
    assert answer.shape == expected.shape == (8, 20, 256)
    assert (answer.float() - expected).norm() / expected.norm() < tolerance
    cache.view(torch.uint8)[table[3, 2].long()] = 0  # the last tokens of a sequence
    assert ((case.ours(*given) == answer).flatten(1).all(1) == torch.arange(8).ne(3)).all()


@pytest.mark.parametrize(
    ("variant", "dtype", "a_token", "tolerance"),
    # In float32 the peer selects the same tokens; in bfloat16 it rounds its scores.
    [("sparse", torch.float32, 2304, 1e-4), ("sparse-fp8", torch.bfloat16, 656, 0.5)],
)
@pytest.mark.parametrize("context", [70, 20])
def test_both_attend_to_selected_tokens(monkeypatch, variant, dtype, a_token, tolerance, context):
    monkeypatch.setattr(latents, "_INDEXER", replace(latents._INDEXER, top_k=40))
    case = MLA.cases(settings(sizes=(context,), variants=(variant,), dtype=dtype))[1]()
    assert (case.parameters["shape"], case.parameters["heads"], case.parameters["variant"]) == ("glm-5", 64, variant)
    size, others = dtype.itemsize, 64 * 256 * 512 + 8 * 64 * (576 + 256)
    assert case.touched == 8 * (context * 128 * size + min(40, context) * a_token) + others * size
    given = case.make()
    answer, (rival,) = case.ours(*given), case.rivals
    expected = rival.call(*given).float()
    assert answer.shape == expected.shape == (8, 64, 256)
    assert (answer.float() - expected).norm() / expected.norm() < tolerance
