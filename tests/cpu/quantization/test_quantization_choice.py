"""On glm-poet, what is recommended against what the candidates turn out to be: benchmarks/recommendation.py, reduced.

Rounding to nearest takes a second a model, so its schemes are all there; gptq is there for the scheme of most models.
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
from warpbus.qtensor import Scheme
from warpbus.quantization import quantize
from warpbus.quantization.recommend import GOALS, Trial, choose
from warpbus.quantization.trials import try_candidates

SAMPLES = 32


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    nearest = try_candidates(
        model_path(), calibration=calibration_path(), samples=SAMPLES, algorithm="rtn", device="cpu"
    )
    solved = try_candidates(
        model_path(),
        calibration=calibration_path(),
        samples=SAMPLES,
        scheme=Scheme(4, 128),
        algorithm="gptq",
        device="cpu",
    )
    return [*nearest.trials, *solved.trials]


@pytest.fixture(scope="module")
def perplexities(trials: list[Trial], tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    models = {}
    for trial in trials:
        out: Path = tmp_path_factory.mktemp("choice") / "model"
        quantize(
            model_path(),
            out,
            scheme=trial.scheme,
            algorithm=trial.algorithm,
            calibration=calibration_path(),
            samples=SAMPLES,
            device="cpu",
        )
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


def test_size_is_not_paid_for_with_three_bits(trials: list[Trial], perplexities: dict[str, float]) -> None:
    chosen, _ = choose(trials, goal="size")
    assert chosen.name == "w4a16-g128 by gptq"
    assert perplexities[chosen.name] < 0.95 * perplexities["w3a16-g128 by rtn"]
