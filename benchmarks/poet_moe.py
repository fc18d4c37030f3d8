"""What quantization costs a mixture of experts: each algorithm that supports experts, at each scheme.

    python benchmarks/poet_moe.py MODEL [--schemes w4a16-g128 w3a16-g128] [--samples 256 8] [--limit 200]
        [--device cuda] [--output benchmarks/results]

MODEL is a trained mixture of experts with the vocabulary of glm-poet: poet_moe_training.py trains one and measures it.
Each quantized model is compared with MODEL on held-out poems and on questions for the next couplet. The table is
Markdown, for docs/moe.md; "few tokens" is the share of the experts that too few calibration tokens reached.

Where too few calibration tokens reach some experts, a row "reached experts only" shows what calibrating all experts is
worth: the same model, but with those experts rounded to nearest, as quantizers do that skip them.

With --output, records are written to that directory, too.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import warpbus
from warpbus.bench.cases import versions
from warpbus.bench.records import Parameter, Peer, Record, now, ratio, write
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
        samples: conversations that it was calibrated on; 0 for none.
        output: its directory.
        sparse: share of the experts that too few calibration tokens reached.
        seconds: wall-clock time of `quantize`.
    """

    scheme: str
    algorithm: str
    samples: int
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


def quantized(model: Path, directory: Path, scheme: str, algorithm: str, samples: int, device: str) -> list[Run]:
    """Quantize the model into a new directory below `directory`.

    Returns:
        the run; and where too few tokens reached some experts, the same with these experts rounded to nearest, for
        which the run of "rtn" has to be there already.
    """
    samples = 0 if algorithm == "rtn" else samples
    output = directory / f"{scheme}-{algorithm}-{samples}"
    started = time.perf_counter()
    report = quantize(
        model,
        output,
        scheme=scheme,
        algorithm=algorithm,
        calibration=calibration_path() if samples else None,
        samples=samples or 1,
        device=device,
    )
    seconds = time.perf_counter() - started
    print(f"{output.name}: quantized in {seconds:.0f} s", flush=True)
    runs = [Run(scheme, algorithm, samples, output, sparse_share(report), seconds)]
    if runs[0].sparse and not METHODS[algorithm].folds:  # else other experts' norms would not fit
        only = directory / f"{output.name}-reached"
        skip_sparse(report, output, directory / f"{scheme}-rtn-0", only)
        runs.append(replace(runs[0], algorithm=f"{algorithm}, reached experts only", output=only))
    return runs


def skip_sparse(report: Report, calibrated: Path, rounded: Path, output: Path) -> None:
    """Copy a calibrated model, with the experts that too few tokens reached taken from another of the same scheme."""
    sparse = tuple(
        f"model.layers.{layer}.mlp.experts.{expert}."
        for layer, experts in report.sparse_experts.items()
        for expert in experts
    )
    shutil.copytree(calibrated, output)
    other, replaced = Checkpoint(rounded), 0
    for file in sorted(output.glob("*.safetensors")):
        tensors = load_file(file)
        own = [name for name in tensors if name.startswith(sparse)]
        save_file(tensors | {name: other.tensor(name).clone() for name in own}, file, metadata={"format": "pt"})
        replaced += len(own)
    if not replaced:
        raise UsageError(f"{calibrated}: has no tensors {sparse[0]}*: expected those of an expert")


def sparse_share(report: Report) -> float:
    """The share of the experts that too few calibration tokens reached."""
    experts = sum(map(len, report.expert_tokens.values()))
    return sum(map(len, report.sparse_experts.values())) / experts if experts else 0.0


def table(runs: Sequence[Run], evaluations: Sequence[Evaluation]) -> list[str]:
    """The lines of the table; `evaluations` begin with the original."""
    original, *others = evaluations
    lines = [
        "| | scheme | samples | perplexity | KL | same first choice | next couplet | few tokens | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| original | {original.scheme} | | {original.perplexity:.2f} | | | {original.accuracy:.1%} | | |",
    ]
    for run, found in zip(runs, others, strict=True):
        few, samples = (f"{run.sparse:.0%}", run.samples) if run.samples else ("", "")
        quality = f"{found.perplexity:.2f} | {found.divergence:.4f} | {found.agreement:.1%} | {found.accuracy:.1%}"
        lines.append(f"| {run.algorithm} | {run.scheme} | {samples} | {quality} | {few} | {run.seconds:.0f} |")
    return lines


def measured(
    model: Path, schemes: Sequence[str], samples: Sequence[int], limit: int, device: str
) -> tuple[list[Run], list[Evaluation]]:
    """Quantize the model in all ways, and compare each with it: the runs, and the evaluations, the original first.

    Args:
        samples: numbers of conversations to calibrate on.
        limit: held-out poems, and questions.
    """
    with tempfile.TemporaryDirectory() as directory:
        runs = [
            run
            for scheme in schemes
            for algorithm in algorithms(model, scheme)
            for count in (samples if algorithm != "rtn" else [0])
            for run in quantized(model, Path(directory), scheme, algorithm, count, device)
        ]
        named = [(f"{run.scheme} {run.algorithm} {run.samples}", run.output) for run in runs]
        found = evaluate(
            [("original", model), *named],
            data=data_path("validation.jsonl"),
            questions=data_path("next-verse.jsonl"),
            limit=limit,
            speed=False,
            device=resolve_device(device),
        )
    return runs, found


def records(
    runs: Sequence[Run], found: Sequence[Evaluation], common: Mapping[str, Parameter], command: str, device: str
) -> list[Record]:
    """A record per run.

    Args:
        found: the evaluations, the original first.
        common: parameters of all cases.
    """
    original, *others = found
    made, place, date = [], resolve_device(device), now()
    for run, own in zip(runs, others, strict=True):
        case: dict[str, Parameter] = {
            **common,
            "scheme": run.scheme,
            "algorithm": run.algorithm,
            "samples": run.samples,
            "few_tokens": run.sparse,
            "kl": own.divergence,
            "agreement": own.agreement,
            "accuracy": own.accuracy,
            "quantize_seconds": run.seconds,
        }
        made.append(
            Record(
                bench="poet-moe",
                case=case,
                metric="perplexity",
                unit="perplexity",
                ours=own.perplexity,
                peer=Peer("the original", f"warpbus {warpbus.__version__}", original.perplexity),
                ratio=ratio("perplexity", own.perplexity, original.perplexity),
                floor=None,
                samples={"ours": [own.perplexity], "peer": [original.perplexity]},
                device="cpu" if place.type == "cpu" else torch.cuda.get_device_name(place),
                versions=versions(),
                date=date,
                command=command,
            )
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of a trained mixture of experts")
    parser.add_argument("--schemes", nargs="+", default=["w4a16-g128", "w3a16-g128"])
    parser.add_argument("--samples", type=int, nargs="+", default=[256, 8], help="conversations to calibrate on")
    parser.add_argument("--limit", type=int, default=200, help="held-out poems, and questions")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, help="the directory of the records")
    options = parser.parse_args()

    runs, found = measured(options.model, options.schemes, options.samples, options.limit, options.device)
    print("\n".join(table(runs, found)))
    if options.output is not None:
        words = ["python benchmarks/poet_moe.py", options.model.name, "--schemes", *options.schemes]
        words += ["--samples", *map(str, options.samples), "--limit", str(options.limit)]
        common = {"model": options.model.name, "documents": options.limit}
        print(write(records(runs, found, common, " ".join(words), options.device), options.output))


if __name__ == "__main__":
    try:
        main()
    except WarpbusError as error:
        sys.exit(f"error: {error}")
