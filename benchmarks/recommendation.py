"""Whether the recommended way to quantize is the best: glm-poet quantized by every candidate, against the choice.

    python benchmarks/recommendation.py

Every candidate quantizes the packaged model as `warpbus quantize` does; its perplexity on held-out poems is measured.
For each goal the recommendation is held against all candidates that are as good a choice by what the goal asks for
(no more bytes for size, no more time a token for speed, anything for quality): its perplexity has to be the least of
these, or within 1 %. The exit code is 1 if it is not. The records go to benchmarks/results: of each candidate against
the original, and of each goal's choice against the best of its rivals.
"""

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

import warpbus
from warpbus.bench.records import RESULTS, Parameter, Peer, Record, now, ratio, write
from warpbus.demo import calibration_path, data_path, model_path
from warpbus.evaluation import score
from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.models.documents import Document, read_documents
from warpbus.models.templates import find_template
from warpbus.models.tokenizers import load_tokenizer
from warpbus.quantization import quantize
from warpbus.quantization.options import QuantizationOptions
from warpbus.quantization.recommend import GOALS, Trial, choose
from warpbus.quantization.trials import try_candidates

ALLOWED = 0.01
LENGTH = 512


@dataclass(frozen=True)
class Measured:
    """What a candidate's whole model is like, and how many seconds it took to make."""

    perplexity: float
    original_perplexity: float
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
        found = score(models, texts)
    quantized = found["quantized"]
    return Measured(quantized.perplexity, found["original"].perplexity, quantized.divergence or 0.0, seconds)


def rivals(goal: str, chosen: Trial, trials: tuple[Trial, ...]) -> list[Trial]:
    """The candidates that would have served the goal as well."""
    if goal == "speed":
        return [trial for trial in trials if trial.token_seconds <= chosen.token_seconds]
    if goal == "size":
        return [trial for trial in trials if trial.nbytes <= chosen.nbytes]
    return list(trials)


def records(
    trials: tuple[Trial, ...], measured: Mapping[str, Measured], case: Mapping[str, Parameter], command: str
) -> list[Record]:
    """Of each candidate, the original as its peer; then of each goal's choice, the best of its rivals as its peer."""

    def record(details: Mapping[str, Parameter], ours: float, name: str, theirs: float) -> Record:
        return Record(
            bench="recommendation",
            case={"model": "glm-poet", **case, **details},
            metric="perplexity",
            unit="perplexity",
            ours=ours,
            peer=Peer(name, f"warpbus {warpbus.__version__}", theirs),
            ratio=ratio("perplexity", ours, theirs),
            floor=None,
            samples={"ours": [ours], "peer": [theirs]},
            device="cpu",
            versions={"warpbus": warpbus.__version__, "python": platform.python_version(), "torch": torch.__version__},
            date=now(),
            command=command,
        )

    made = []
    for trial in trials:
        found = measured[trial.name]
        details: dict[str, Parameter] = {"scheme": trial.scheme, "algorithm": trial.algorithm}
        details |= {"error": trial.error, "kl": found.divergence}
        made.append(record(details, found.perplexity, "the original", found.original_perplexity))
    for goal in GOALS:
        chosen, _ = choose(trials, goal=goal)
        best = min(rivals(goal, chosen, trials), key=lambda trial: measured[trial.name].perplexity)
        details = {"goal": goal, "scheme": chosen.scheme, "algorithm": chosen.algorithm}
        made.append(record(details, measured[chosen.name].perplexity, best.name, measured[best.name].perplexity))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64, help="calibration sequences")
    parser.add_argument("--documents", type=int, default=100, help="held-out poems")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the directory of the records")
    options = parser.parse_args()
    found = try_candidates(
        model_path(), calibration=calibration_path(), options=QuantizationOptions(samples=options.samples, device="cpu")
    )
    texts, measured = documents(options.documents), {}
    for trial in found.trials:
        measured[trial.name] = measure(trial, options.samples, texts)
        print(f"{trial.name:28} error {trial.error:.4f} {measured[trial.name]}", flush=True)
    case = {"samples": options.samples, "documents": options.documents}
    made = records(found.trials, measured, case, " ".join(["python", "benchmarks/recommendation.py", *sys.argv[1:]]))
    goals = [each for each in made if "goal" in each.case]
    for each in goals:
        print(
            f"{each.case['goal']}: {each.case['scheme']} by {each.case['algorithm']}, perplexity {each.ours:.2f}; "
            f"the best there is {each.peer.name}, {each.peer.value:.2f}"
        )
    print(write(made, options.output))
    sys.exit(any(each.ours > (1 + ALLOWED) * each.peer.value for each in goals))


if __name__ == "__main__":
    main()
