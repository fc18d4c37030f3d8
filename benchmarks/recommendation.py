"""Whether the recommended way to quantize is the best: glm-poet quantized by every candidate, against the choice.

    python benchmarks/recommendation.py --samples 128 --documents 200 --json benchmarks/results/recommendation-cpu.json

Every candidate quantizes the packaged model as `warpbus quantize` does; its perplexity on held-out poems is measured.
For each goal the recommendation is held against all candidates that are as good a choice by what the goal asks for
(no more bytes for size, no more time a token for speed, anything for quality): its perplexity has to be the least of
these, or within 1 %. The exit code is 1 if it is not.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import warpbus
from warpbus.demo import calibration_path, data_path, model_path
from warpbus.evaluation import score
from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.models.documents import Document, read_documents
from warpbus.models.templates import find_template
from warpbus.models.tokenizers import load_tokenizer
from warpbus.quantization import quantize
from warpbus.quantization.recommend import GOALS, Trial, choose
from warpbus.quantization.trials import try_candidates

ALLOWED = 0.01
LENGTH = 512


@dataclass(frozen=True)
class Measured:
    """What a candidate's whole model is like."""

    perplexity: float
    divergence: float
    seconds: float


def documents(count: int) -> list[Document]:
    """Held-out poems."""
    model = model_path()
    tokenizer = load_tokenizer(model)
    template = find_template(model, Checkpoint(model).config, tokenizer)
    return read_documents(data_path("validation.jsonl"), tokenizer, template, length=LENGTH, limit=count)


def measure(trial: Trial, samples: int, texts: list[Document]) -> Measured:
    """Quantize the whole model by a candidate, and measure it."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "model"
        started = time.perf_counter()
        quantize(
            model_path(),
            output,
            scheme=trial.scheme,
            algorithm=trial.algorithm,
            calibration=calibration_path(),
            samples=samples,
            device="cpu",
        )
        seconds = time.perf_counter() - started
        models = {
            name: load_model(Checkpoint(path), device="cpu", dtype=torch.float32)
            for name, path in (("original", model_path()), ("quantized", output))
        }
        found = score(models, texts)["quantized"]
    return Measured(found.perplexity, found.divergence or 0.0, seconds)


def rivals(goal: str, chosen: Trial, trials: tuple[Trial, ...]) -> list[Trial]:
    """The candidates that would have served the goal as well."""
    if goal == "speed":
        return [trial for trial in trials if trial.token_seconds <= chosen.token_seconds]
    if goal == "size":
        return [trial for trial in trials if trial.nbytes <= chosen.nbytes]
    return list(trials)


def judged(trials: tuple[Trial, ...], measured: dict[str, Measured]) -> list[dict[str, Any]]:
    """For each goal: what is recommended, and how far its perplexity is from the best of its rivals."""
    found = []
    for goal in GOALS:
        chosen, reason = choose(trials, goal=goal)
        best = min(rivals(goal, chosen, trials), key=lambda trial: measured[trial.name].perplexity)
        ours, least = measured[chosen.name].perplexity, measured[best.name].perplexity
        row = {"goal": goal, "recommended": chosen.name, "reason": reason, "best": best.name}
        found.append(row | {"perplexity": ours, "best_perplexity": least, "above": ours / least - 1})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    recommendation = try_candidates(
        model_path(), calibration=calibration_path(), samples=arguments.samples, device="cpu"
    )
    texts = documents(arguments.documents)
    measured = {}
    for trial in recommendation.trials:
        measured[trial.name] = measure(trial, arguments.samples, texts)
        print(f"{trial.name:28} error {trial.error:.4f} {measured[trial.name]}", flush=True)
    goals = judged(recommendation.trials, measured)
    for row in goals:
        print(f"{row['goal']}: {row['recommended']}, {row['above']:.2%} above the best ({row['best']})")
    if arguments.json is not None:
        rows = [asdict(trial) | asdict(measured[trial.name]) for trial in recommendation.trials]
        result = {
            "bench": "recommendation",
            "case": {"model": "glm-poet", "samples": arguments.samples, "documents": arguments.documents},
            "layers": recommendation.layers,
            "candidates": rows,
            "goals": goals,
            "device": "cpu",
            "versions": {
                "warpbus": warpbus.__version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": " ".join(["python", "benchmarks/recommendation.py", *sys.argv[1:]]),
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(any(row["above"] > ALLOWED for row in goals))


if __name__ == "__main__":
    main()
