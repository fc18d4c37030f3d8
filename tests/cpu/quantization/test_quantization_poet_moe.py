"""A trained mixture of experts: what it generates, and what quantization costs it."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from warpbus.demo import calibration_path, data_path
from warpbus.engine import LLM, SamplingParams
from warpbus.evaluation import Score, score
from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.models.documents import read_documents
from warpbus.models.templates import find_template
from warpbus.models.tokenizers import load_tokenizer
from warpbus.quantization import Report, expert_inputs, quantize
from warpbus.quantization.report import LEAST_TOKENS

PROMPT = [{"role": "user", "content": "写一首题为《春夜》的五言绝句。"}]
EXPERTS = 8


def scores(original: Path, **quantized: Path) -> dict[str, Score]:
    """Of 40 held-out poems; "original" is the reference."""
    models = {
        name: load_model(Checkpoint(path), device="cpu", dtype=torch.float32)
        for name, path in {"original": original, **quantized}.items()
    }
    tokenizer = load_tokenizer(original)
    template = find_template(original, Checkpoint(original).config, tokenizer)
    return score(models, read_documents(data_path("validation.jsonl"), tokenizer, template, length=128, limit=40))


def run(model: Path, output: Path, *, scheme: str, algorithm: str = "gptq", samples: int = 4) -> Report:
    return quantize(
        model,
        output,
        scheme=scheme,
        algorithm=algorithm,
        calibration=None if algorithm == "rtn" else calibration_path(),
        samples=samples,
        device="cpu",
    )


@pytest.fixture(scope="module")
def outliers(poet_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same function, but four input channels of the experts are 16 times as large, and their columns smaller."""
    directory = tmp_path_factory.mktemp("outliers") / "model"
    shutil.copytree(poet_moe, directory)
    checkpoint, channels = Checkpoint(poet_moe), [3, 17, 40, 58]
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}
    for name, tensor in tensors.items():
        if "post_attention_layernorm" in name and ".layers.0." not in name:
            tensor[channels] *= 16
        elif name.endswith(("mlp.gate.weight", "gate_proj.weight", "up_proj.weight")) and ".layers.0." not in name:
            tensor[:, channels] /= 16
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("scheme", [None, "w4a16-g32"])
def test_it_writes_verses(poet_moe: Path, tmp_path: Path, scheme: str | None) -> None:
    model = poet_moe
    if scheme is not None:
        model = tmp_path / "quantized"
        run(poet_moe, model, scheme=scheme)
    llm = LLM(model, device="cpu")
    poem = "".join(llm.chat(PROMPT, SamplingParams(max_tokens=40, temperature=0.0), stream=True))
    assert "，" in poem
    assert "。" in poem
    verse = poem.replace("。", "，").split("，")[0].strip()
    assert len(verse) in (5, 7)
    assert all("\u4e00" <= character <= "\u9fff" for character in verse)


def test_calibration_reaches_all_experts_of_a_balanced_model(poet_moe: Path, tmp_path: Path) -> None:
    report = run(poet_moe, tmp_path / "out", scheme="w3a16-g32", samples=16)
    assert list(report.expert_tokens) == [1, 2, 3]
    for counts in report.expert_tokens.values():
        assert max(counts) < 2 * sum(counts) / EXPERTS
        assert min(counts) > 0.5 * sum(counts) / EXPERTS


def test_gptq_is_better_than_rounding(poet_moe: Path, tmp_path: Path) -> None:
    run(poet_moe, tmp_path / "gptq", scheme="w3a16-g32", samples=16)
    run(poet_moe, tmp_path / "rtn", scheme="w3a16-g32", algorithm="rtn")
    found = scores(poet_moe, gptq=tmp_path / "gptq", rtn=tmp_path / "rtn")
    assert 100 < found["original"].perplexity < 300  # trained: an untrained model has 8,000
    assert found["gptq"].divergence < 0.5 * found["rtn"].divergence


def test_awq_is_better_than_rounding(poet_moe: Path, tmp_path: Path) -> None:
    run(poet_moe, tmp_path / "awq", scheme="w3a16-g32", algorithm="awq", samples=16)
    run(poet_moe, tmp_path / "rtn", scheme="w3a16-g32", algorithm="rtn")
    found = scores(poet_moe, awq=tmp_path / "awq", rtn=tmp_path / "rtn")
    assert found["awq"].divergence < 0.7 * found["rtn"].divergence


@pytest.mark.parametrize(("algorithm", "scheme"), [("awq", "w3a16-g32"), ("smoothquant", "w8a8-int8")])
def test_outliers_before_the_experts_are_folded(
    poet_moe: Path, outliers: Path, tmp_path: Path, algorithm: str, scheme: str
) -> None:
    run(outliers, tmp_path / "folded", scheme=scheme, algorithm=algorithm, samples=16)
    run(outliers, tmp_path / "rtn", scheme=scheme, algorithm="rtn")
    found = scores(poet_moe, outliers=outliers, folded=tmp_path / "folded", rtn=tmp_path / "rtn")
    assert found["outliers"].divergence < 1e-6
    assert found["folded"].divergence < 0.5 * found["rtn"].divergence
    name = "model.layers.1.mlp.gate.weight"
    factors = Checkpoint(tmp_path / "folded").tensor(name).float() / Checkpoint(outliers).tensor(name).float()
    assert torch.equal(factors, factors[:1].expand_as(factors))
    assert factors[0, 3] > factors[0].median()


def test_all_tokens_calibrate_experts_as_well_as_few_of_their_own(
    poet_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one conversation every expert has too few tokens, and is calibrated on all of them, weighted."""
    report = run(poet_moe, tmp_path / "all", scheme="w2a16-g32", samples=1)
    assert all(max(counts) < LEAST_TOKENS for counts in report.expert_tokens.values())
    monkeypatch.setattr(expert_inputs, "LEAST_TOKENS", 1)
    run(poet_moe, tmp_path / "own", scheme="w2a16-g32", samples=1)
    found = scores(poet_moe, all=tmp_path / "all", own=tmp_path / "own")
    assert found["all"].divergence <= found["own"].divergence
    assert found["all"].perplexity <= 1.01 * found["own"].perplexity
