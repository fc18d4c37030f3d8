"""What each scheme and algorithm costs in quality: glm-poet quantized by all of them, on poems that none has seen.

    python benchmarks/quality.py
    python benchmarks/quality.py --schemes w4a16-g128,w3a16-g128 --runs rtn,awq:128,gptq:128,gptq:1024 --work models

A run is an algorithm and, after a colon, how many conversations it is calibrated on. All are made as `warpbus quantize`
makes them and are scored together with the original on the same held-out poems. The records go to benchmarks/results,
the table for docs/quantization.md to the terminal. With --work the models stay, and what is finished is not made again.
"""

import argparse
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import warpbus
from warpbus.bench.records import RESULTS, Peer, Record, now, ratio, write
from warpbus.demo import calibration_path, data_path, model_path
from warpbus.evaluation import score
from warpbus.evaluation.likelihood import Score
from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.models.documents import Document, read_documents
from warpbus.models.templates import find_template
from warpbus.models.tokenizers import load_tokenizer
from warpbus.quantization import quantize

LENGTH = 512
SCHEMES = "w4a16-g128,w4a16-g128-asym,w3a16-g128,w3a16-g128-asym,w2a16-g64,w2a16-g64-asym"
RUNS = "rtn,gptq:128,gptq:1024"


@dataclass(frozen=True)
class Run:
    """An algorithm, and how many conversations it is calibrated on; 0 if it needs none."""

    algorithm: str
    samples: int

    @classmethod
    def parse(cls, text: str) -> "Run":
        algorithm, _, samples = text.partition(":")
        return cls(algorithm, int(samples or 0))

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.samples}" if self.samples else self.algorithm


def made(scheme: str, run: Run, work: Path) -> Path:
    """The quantized model."""
    output = work / f"{scheme}-{run.algorithm}-{run.samples}"
    if not output.exists():
        quantize(
            model_path(),
            output,
            scheme=scheme,
            algorithm=run.algorithm,
            calibration=calibration_path(),
            samples=run.samples or 1,
            device="cpu",
        )
    return output


def scores(scheme: str, runs: Sequence[Run], documents: list[Document], work: Path) -> dict[str, Score]:
    """Those of the original and of each run."""
    paths = {"original": model_path()} | {str(run): made(scheme, run, work) for run in runs}
    models = {name: load_model(Checkpoint(path), device="cpu", dtype=torch.float32) for name, path in paths.items()}
    return score(models, documents)


def record(scheme: str, run: Run, found: Score, original: Score, documents: int, command: str) -> Record:
    return Record(
        bench="quality",
        case={
            "model": "glm-poet",
            "scheme": scheme,
            "algorithm": run.algorithm,
            "samples": run.samples,
            "documents": documents,
            "kl": found.divergence,
            "agreement": found.agreement,
        },
        metric="perplexity",
        unit="perplexity",
        ours=found.perplexity,
        peer=Peer("the original", f"warpbus {warpbus.__version__}", original.perplexity),
        ratio=ratio("perplexity", found.perplexity, original.perplexity),
        floor=None,
        samples={"ours": [found.perplexity], "peer": [original.perplexity]},
        device="cpu",
        versions={"warpbus": warpbus.__version__, "python": platform.python_version(), "torch": torch.__version__},
        date=now(),
        command=command,
    )


def held_out(count: int) -> list[Document]:
    model = model_path()
    tokenizer = load_tokenizer(model)
    template = find_template(model, Checkpoint(model).config, tokenizer)
    return read_documents(data_path("validation.jsonl"), tokenizer, template, length=LENGTH, limit=count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default=SCHEMES, help="separated by commas")
    parser.add_argument("--runs", default=RUNS, help="separated by commas")
    parser.add_argument("--documents", type=int, default=200, help="held-out poems")
    parser.add_argument("--work", type=Path, help="a directory for the models, which stay there")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the directory of the records")
    options = parser.parse_args()
    runs = [Run.parse(text) for text in options.runs.split(",")]
    documents, records = held_out(options.documents), []
    # Without the directory of the models, which is one of this machine.
    command = f"python benchmarks/quality.py --schemes {options.schemes} --runs {options.runs}"
    command += f" --documents {options.documents}"
    print("| scheme | algorithm | samples | perplexity | KL | agrees |\n|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for scheme in options.schemes.split(","):
            found = scores(scheme, runs, documents, options.work or Path(directory))
            original = found["original"]
            for run in runs:
                own = found[str(run)]
                change = own.perplexity / original.perplexity - 1
                print(
                    f"| {scheme} | {run.algorithm} | {run.samples or ''} | {own.perplexity:.2f} ({change:+.2%}) "
                    f"| {own.divergence:.4f} | {own.agreement:.1%} |",
                    flush=True,
                )
                records.append(record(scheme, run, own, original, len(documents), command))
    print(write(records, options.output))


if __name__ == "__main__":
    main()
