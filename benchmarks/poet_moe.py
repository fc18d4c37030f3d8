"""What quantization costs a mixture of experts: each algorithm that supports experts, at each scheme.

    python benchmarks/poet_moe.py MODEL [--schemes w4a16-g128 w3a16-g128] [--samples 256] [--limit 200] [--device cuda]

MODEL is a trained mixture of experts with the vocabulary of glm-poet (docs/moe.md shows how to train one). Each
quantized model is compared with MODEL on held-out poems and on questions for the next couplet. The table is Markdown,
for docs/quantization.md.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from warpbus.cuda.devices import resolve_device
from warpbus.demo import calibration_path, data_path
from warpbus.errors import UsageError, WarpbusError
from warpbus.evaluation import Evaluation, evaluate
from warpbus.formats import Checkpoint
from warpbus.models import read_config
from warpbus.qtensor import Scheme
from warpbus.quantization import Report, quantize
from warpbus.quantization.methods import METHODS, suits


@dataclass(frozen=True)
class Run:
    """A quantized model.

    Attributes:
        scheme, algorithm: how it was quantized.
        output: its directory.
        sparse: share of the experts that too few calibration tokens reached.
        seconds: wall-clock time of `quantize`.
    """

    scheme: str
    algorithm: str
    output: Path
    sparse: float
    seconds: float


def algorithms(model: Path, scheme: str) -> list[str]:
    """The algorithms that can quantize a model to a scheme.

    Raises:
        UsageError: the model has no experts.
    """
    config = read_config(Checkpoint(model))
    if not config.has_experts:
        raise UsageError(f"{model}: has no experts: give a mixture of experts")
    calibrated = [name for name, method in METHODS.items() if method.fits(Scheme.parse(scheme)) and suits(name, config)]
    return ["rtn", *calibrated]


def quantized(model: Path, directory: Path, scheme: str, algorithm: str, samples: int, device: str) -> Run:
    """Quantize the model into a new directory below `directory`."""
    output = directory / f"{scheme}-{algorithm}"
    started = time.perf_counter()
    report = quantize(
        model,
        output,
        scheme=scheme,
        algorithm=algorithm,
        calibration=None if algorithm == "rtn" else calibration_path(),
        samples=samples,
        device=device,
    )
    return Run(scheme, algorithm, output, sparse_share(report), time.perf_counter() - started)


def sparse_share(report: Report) -> float:
    """The share of the experts that too few calibration tokens reached."""
    experts = sum(map(len, report.expert_tokens.values()))
    return sum(map(len, report.sparse_experts.values())) / experts if experts else 0.0


def table(runs: Sequence[Run], measured: Sequence[Evaluation]) -> list[str]:
    """The lines of the table; `measured` begins with the original."""
    original, *others = measured
    lines = [
        "| | scheme | perplexity | KL | same first choice | next couplet | experts with few tokens | seconds |",
        "|---|---|---|---|---|---|---|---|",
        f"| original | {original.scheme} | {original.perplexity:.2f} | | | {original.accuracy:.1%} | | |",
    ]
    for run, found in zip(runs, others, strict=True):
        few = "" if run.algorithm == "rtn" else f"{run.sparse:.0%}"
        quality = f"{found.perplexity:.2f} | {found.divergence:.4f} | {found.agreement:.1%} | {found.accuracy:.1%}"
        lines.append(f"| {run.algorithm} | {run.scheme} | {quality} | {few} | {run.seconds:.0f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of a trained mixture of experts")
    parser.add_argument("--schemes", nargs="+", default=["w4a16-g128", "w3a16-g128"])
    parser.add_argument("--samples", type=int, default=256, help="conversations to calibrate on")
    parser.add_argument("--limit", type=int, default=200, help="held-out poems, and questions")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()

    device = resolve_device(options.device)
    with tempfile.TemporaryDirectory() as directory:
        runs = [
            quantized(options.model, Path(directory), scheme, algorithm, options.samples, options.device)
            for scheme in options.schemes
            for algorithm in algorithms(options.model, scheme)
        ]
        measured = evaluate(
            [("original", options.model), *((f"{run.scheme} {run.algorithm}", run.output) for run in runs)],
            data=data_path("validation.jsonl"),
            questions=data_path("next-verse.jsonl"),
            limit=options.limit,
            speed=False,
            device=device,
        )
    print("\n".join(table(runs, measured)))


if __name__ == "__main__":
    try:
        main()
    except WarpbusError as error:
        sys.exit(f"error: {error}")
