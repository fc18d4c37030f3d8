"""On glm-poet, what is recommended against what the candidates turn out to be: benchmarks/recommendation.py, reduced.

Of rounding to nearest, which takes a second a model, all schemes but int8, whose products are slow on the CPU.
"""

from pathlib import Path

import pytest
import torch

from warpbus.demo import calibration_path, data_path, model_path
from warpbus.evaluation import score
from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.models.documents import read_documents
from warpbus.models.templates import find_template
from warpbus.models.tokenizers import load_tokenizer
from warpbus.quantization import quantize
from warpbus.quantization.options import QuantizationOptions
from warpbus.quantization.recommend import GOALS, Trial, choose
from warpbus.quantization.trials import try_candidates


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    found = try_candidates(
        model_path(),
        calibration=calibration_path(),
        algorithm="rtn",
        options=QuantizationOptions(samples=32, device="cpu"),
    )
    return [trial for trial in found.trials if trial.scheme != "w8a8-int8"]


@pytest.fixture(scope="module")
def perplexities(trials: list[Trial], tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    models = {}
    for trial in trials:
        out: Path = tmp_path_factory.mktemp("choice") / "model"
        quantize(model_path(), out, scheme=trial.scheme, algorithm=trial.algorithm, device="cpu")
        models[trial.name] = load_model(Checkpoint(out), device="cpu", dtype=torch.float32)
    tokenizer = load_tokenizer(model_path())
    template = find_template(model_path(), Checkpoint(model_path()).config, tokenizer)
    texts = read_documents(data_path("validation.jsonl"), tokenizer, template, length=512, limit=10)
    return {name: found.perplexity for name, found in score(models, texts).items()}


@pytest.mark.parametrize("goal", GOALS)
def test_the_choice_is_within_one_percent_of_the_best(
    goal: str, trials: list[Trial], perplexities: dict[str, float]
) -> None:
    chosen, _ = choose(trials, goal=goal)
    rivals = {
        "quality": trials,
        "speed": [trial for trial in trials if trial.token_seconds <= chosen.token_seconds],
        "size": [trial for trial in trials if trial.nbytes <= chosen.nbytes],
    }[goal]
    assert perplexities[chosen.name] <= 1.01 * min(perplexities[trial.name] for trial in rivals)


def test_errors_tell_which_is_better(trials: list[Trial], perplexities: dict[str, float]) -> None:
    by_error = [trial.name for trial in sorted(trials, key=lambda trial: trial.error)]
    assert by_error == sorted(by_error, key=lambda name: perplexities[name])
