"""What each scheme and algorithm costs in quality: a model quantized by all of them, on poems that none has seen.

    python benchmarks/quality.py
    python benchmarks/quality.py --schemes w4a16-g128,w3a16-g128 --runs rtn,awq:128,gptq:128,gptq:1024 --work models
    python benchmarks/quality.py --peers autoround:128,llmcompressor-gptq-mse:128,hqq --peer-python peers/bin/python
    python benchmarks/quality.py --model poet-moe-small --schemes w4a16-g64,w3a16-g64 --peers autoround:128
    python benchmarks/quality.py --schemes w4a16-g64-asym --runs gptq:128 --peers autoround:128 --seed 1

The model is glm-poet or another one with its vocabulary, such as `tests/poet-moe-small` with the tokenizer of glm-poet.
A run is an algorithm, after a plus its effort if that is not normal (`gptq+high:128`), and after a colon how many
conversations it is calibrated on. All are made as `warpbus quantize`
makes them and are scored together with the original on the same held-out poems. The intervals hold 95 % of 2,000
resamples of the poems, the same resamples for both models of a comparison. The records go to benchmarks/results, the
tables for docs/quantization_quality.md to the terminal. With --work the models stay, and finished ones are not made
again.
The records of a scheme and seed replace those of an earlier run once all its models are scored; the others stay.

--seed draws other conversations from the same file, for all programs: how much the figures depend on them.

--peers has other programs quantize the same model on the same conversations (benchmarks/quality_peers.py), on the same
device. Each is compared with this package's run on the same number of conversations that has the least divergence; one
that needs no conversations, with the best of all runs. Where a peer fails, the table has the last line of its output.
"""

import argparse
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

import warpbus
from warpbus.bench.records import RESULTS, Parameter, Peer, Record, now, ratio, read, results_path, write
from warpbus.demo import calibration_path, data_path, model_path
from warpbus.errors import UsageError
from warpbus.evaluation import Score, confidence, score
from warpbus.evaluation.intervals import Interval
from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.models.documents import Document, read_documents
from warpbus.models.templates import find_template
from warpbus.models.tokenizers import load_tokenizer
from warpbus.quantization import quantize

LENGTH = 512
SCHEMES = "w4a16-g128,w4a16-g128-asym,w3a16-g128,w3a16-g128-asym,w2a16-g64,w2a16-g64-asym"
RUNS = "rtn,gptq:128,gptq:1024"
HEADING = """\
| scheme | algorithm | samples | perplexity | 95 % interval | KL | agrees |
|---|---|---|---|---|---|---|"""
BESIDE = """\
| scheme | ours | peer | perplexity of ours, less the peer's: 95 % interval | KL of ours, less the peer's |
|---|---|---|---|---|"""


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


def place(scheme: str, run: Run, seed: int, work: Path) -> Path:
    return work / (f"{scheme}-{run.algorithm}-{run.samples}" + (f"-seed-{seed}" if seed else ""))


def made(model: Path, scheme: str, run: Run, seed: int, work: Path, device: str) -> Path:
    """The quantized model."""
    output = place(scheme, run, seed, work)
    if not output.exists():
        algorithm, _, effort = run.algorithm.partition("+")
        quantize(
            model,
            output,
            scheme=scheme,
            algorithm=algorithm,
            effort=effort or "normal",
            calibration=calibration_path(),
            samples=run.samples or 1,
            seed=seed,
            device=device,
        )
    return output


def made_by_peer(model: Path, scheme: str, run: Run, seed: int, work: Path, device: str, python: str) -> Path:
    """The values of another program's quantized weights, as a float32 checkpoint; it is not there if it failed."""
    output = place(scheme, run, seed, work)
    if not output.exists():
        command = [python, str(Path(__file__).resolve().with_name("quality_peers.py")), "--model", str(model)]
        command += ["--peer", run.algorithm, "--scheme", scheme, "--samples", str(run.samples)]
        command += ["--seed", str(seed), "--device", device, "--output", str(output)]
        with log(output).open("w", encoding="utf-8") as file:
            # In `work`, because some programs write logs to the directory where they run.
            subprocess.run(command, cwd=work, stdout=file, stderr=subprocess.STDOUT, check=False)
    return output


def log(output: Path) -> Path:
    """What the program printed that made a model."""
    return output.with_name(f"{output.name}.log")


def failure(output: Path) -> str:
    """Why a peer made no model: the last line that it printed."""
    lines = log(output).read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip().replace("|", "/") for line in reversed(lines) if line.strip()), "no output")


def scores(model: Path, paths: Mapping[str, Path], documents: list[Document], device: str) -> dict[str, Score]:
    """Those of the original and of each run."""
    models = {
        name: load_model(Checkpoint(path), device=device, dtype=torch.float32)
        for name, path in {"original": model, **paths}.items()
    }
    return score(models, documents)


def best(runs: Sequence[Run], found: Mapping[str, Score], peer: Run) -> Run:
    """This package's run that a peer is compared with: see above."""
    same = [run for run in runs if run.samples == peer.samples and peer.samples] or list(runs)
    return min(same, key=lambda run: found[str(run)].divergence)


def record(
    scheme: str,
    run: Run,
    found: Mapping[str, Score],
    peer: Peer,
    other: str,
    case: Mapping[str, Parameter],
    command: str,
    device: str,
) -> Record:
    """A run beside the original or a peer, which is called `other` among the scores."""
    own, original = found[str(run)], found["original"]
    sure, beside = confidence(own, original), confidence(own, found[other])
    if sure is None or beside is None:
        raise UsageError("intervals need several poems: give --documents 2 or more")
    limits = interval("change", sure.change) | interval("kl", sure.divergence)
    if other != "original":
        limits |= {"peer_kl": found[other].divergence, "peer_agreement": found[other].agreement}
        limits |= interval("change_beside_peer", beside.change) | interval("kl_beside_peer", beside.divergence)
    return Record(
        bench=bench(str(case["model"])),
        case={
            "scheme": scheme,
            "algorithm": run.algorithm,
            "samples": run.samples,
            **case,
            "kl": own.divergence,
            "agreement": own.agreement,
            **limits,
        },
        metric="perplexity",
        unit="perplexity",
        ours=own.perplexity,
        peer=peer,
        ratio=ratio("perplexity", own.perplexity, peer.value),
        floor=None,
        samples={"ours": [own.perplexity], "peer": [peer.value]},
        device=device,
        versions={"warpbus": warpbus.__version__, "python": platform.python_version(), "torch": torch.__version__},
        date=now(),
        command=command,
    )


def bench(model: str) -> str:
    """The name of the records, and of their file: each model has its own."""
    return "quality" if model == "glm-poet" else f"quality-{model}"


def earlier(path: Path) -> list[Record]:
    """The records of an earlier run."""
    return read(path) if path.exists() else []


def interval(name: str, limits: Interval) -> dict[str, float]:
    """The limits of a 95 % interval, as parameters of a case."""
    return {f"{name}_low": limits[0], f"{name}_high": limits[1]}


def row(scheme: str, run: Run, found: Mapping[str, Score]) -> str:
    """A line of the first table."""
    own, original = found[str(run)], found["original"]
    sure = confidence(own, original)
    assert sure is not None
    half = (sure.divergence[1] - sure.divergence[0]) / 2
    return (
        f"| {scheme} | {run.algorithm} | {run.samples or ''} | {own.perplexity:.2f} "
        f"({own.perplexity / original.perplexity - 1:+.2%}) | {sure.change[0]:+.2%} to {sure.change[1]:+.2%} "
        f"| {own.divergence:.4f} ± {half:.4f} | {own.agreement:.1%} |"
    )


def comparison(scheme: str, peer: Run, run: Run, found: Mapping[str, Score]) -> str:
    """A line of the second table."""
    sure = confidence(found[str(run)], found[str(peer)])
    assert sure is not None
    lower, upper = (f"{limit:+.2%}" for limit in sure.change)
    least, most = (f"{limit:+.4f}" for limit in sure.divergence)
    return f"| {scheme} | {run} | {peer} | {lower} to {upper} | {least} to {most} |"


def held_out(model: Path, count: int) -> list[Document]:
    tokenizer = load_tokenizer(model)
    template = find_template(model, Checkpoint(model).config, tokenizer)
    return read_documents(data_path("validation.jsonl"), tokenizer, template, length=LENGTH, limit=count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=model_path(), help="its directory; without it, glm-poet")
    parser.add_argument("--schemes", default=SCHEMES, help="separated by commas")
    parser.add_argument("--runs", default=RUNS, help="separated by commas")
    parser.add_argument("--peers", default="", help="runs of other programs, separated by commas")
    parser.add_argument("--peer-python", default=sys.executable, help="the Python that has the other programs")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of all runs and of the scores")
    parser.add_argument("--jobs", type=int, default=1, help="models that are made at the same time")
    parser.add_argument("--documents", type=int, default=500, help="held-out poems")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of the conversations")
    parser.add_argument("--work", type=Path, help="a directory for the models, which stay there")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the directory of the records")
    options = parser.parse_args()
    runs = [Run.parse(text) for text in options.runs.split(",")]
    peers = [Run.parse(text) for text in options.peers.split(",") if text]
    model, schemes = options.model.resolve(), options.schemes.split(",")
    documents, records = held_out(model, options.documents), []
    # Without the directories of the models and of the Python, which are those of one machine.
    command = "python benchmarks/quality.py" + (f" --model {model.name}" if model.name != "glm-poet" else "")
    command += f" --schemes {options.schemes} --runs {options.runs}"
    command += f" --peers {options.peers}" if peers else ""
    command += f" --documents {options.documents}" + (f" --seed {options.seed}" if options.seed else "")
    command += f" --device {options.device}" if options.device != "cpu" else ""
    device = "cpu" if options.device == "cpu" else torch.cuda.get_device_name(options.device)
    before = earlier(results_path(options.output, bench(model.name), device))
    lines = []
    # New processes, because a forked one could not use CUDA.
    spawned = ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"))
    with tempfile.TemporaryDirectory() as directory, spawned as pool:
        work = (options.work or Path(directory)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        making: dict[tuple[str, Run], Future[Path]] = {}
        for scheme in schemes:
            shared = (options.seed, work, options.device)
            making |= {
                (scheme, peer): pool.submit(made_by_peer, model, scheme, peer, *shared, options.peer_python)
                for peer in peers
            }
            making |= {(scheme, run): pool.submit(made, model, scheme, run, *shared) for run in runs}
        for scheme in schemes:
            paths = {str(run): making[scheme, run].result() for run in runs + peers}
            for peer in peers:
                if not paths[str(peer)].exists():
                    lines.append(f"| {scheme} | | {peer} | {failure(paths.pop(str(peer)))} | |")
            finished = [peer for peer in peers if str(peer) in paths]
            found = scores(model, paths, documents, options.device)
            print(f"\n{HEADING}", *(row(scheme, run, found) for run in runs + finished), sep="\n", flush=True)
            case: dict[str, Parameter] = {"model": model.name, "documents": len(documents), "seed": options.seed}
            original = Peer("the original", f"warpbus {warpbus.__version__}", found["original"].perplexity)
            for run in runs:
                records.append(record(scheme, run, found, original, "original", case, command, device))
            for peer in finished:
                made_with = (paths[str(peer)] / "made_by.txt").read_text(encoding="utf-8")
                run = best(runs, found, peer)
                value = Peer(peer.algorithm, made_with, found[str(peer)].perplexity)
                beside = case | {"peer_samples": peer.samples}
                records.append(record(scheme, run, found, value, str(peer), beside, command, device))
                lines.append(comparison(scheme, peer, run, found))
            # Records of before there were seeds have that of 0.
            before = [
                each for each in before if (each.case["scheme"], each.case.get("seed", 0)) != (scheme, options.seed)
            ]
            print(write(before + records, options.output), flush=True)
    if lines:
        print(f"\n{BESIDE}", *lines, sep="\n")


if __name__ == "__main__":
    main()
