"""From poems to a table: a mixture of experts is trained, quantized by every algorithm, and compared with itself.

    python benchmarks/poet_moe_training.py --train poems-train.jsonl.xz [--model poet-moe] [--steps 3000] [--minutes 9]
        [--device cuda] [--workers 16] [--work DIR] [--output benchmarks/results]

The data are those of `python -m warpbus.demo.recipe`, with the vocabulary of glm-poet. A few steps are timed first;
then as many are trained as leave time to quantize and compare within `--minutes`, at most `--steps`. poet-moe has a
layer of multi-token prediction: the share of its drafts that the model accepts is measured after training. What is
measured then, and the table for docs/moe.md, are those of poet_moe.py; the records say how the model was
trained.

A work directory that is given stays: the same command goes on where it ended, with data, checkpoint or model.
"""

import argparse
import itertools
import json
import multiprocessing
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from poet_moe import measured, records, table

from warpbus.bench.records import RESULTS, Parameter, write
from warpbus.cuda.devices import resolve_device
from warpbus.demo import data_path, model_path
from warpbus.demo.poems import Poem
from warpbus.demo.recipe import config, converse, read_poems
from warpbus.engine.engine import request
from warpbus.engine.loading import build_engine, open_model
from warpbus.engine.options import ServiceOptions
from warpbus.errors import DataError, UsageError, WarpbusError
from warpbus.models.templates import load_template
from warpbus.models.tokenizers import load_tokenizer
from warpbus.train.dataset import tokenize

MODELS = ("poet-moe", "poet-moe-small")
VOCABULARY = ("tokenizer.model", "tokenizer_config.json", "generation_config.json")
PROBE = 12  # steps that are timed
SETTLED = 6  # of them, the last ones, after compilation
PROBE_LINES, RATE_LINES = 20_000, 2_000  # of the data: for these steps, and to time the tokenizer
AT_ONCE, ANSWER = 4, 64  # requests that draft at once, and the most tokens of their answers


def prepared(work: Path, train: Path, model: str, renderings: int, limit: int | None) -> None:
    """Write the conversations and the directory that training starts from; one process per rendering."""
    start = work / "start"
    start.mkdir(parents=True)
    for name in VOCABULARY:
        shutil.copy(model_path() / name, start)
    vocabulary = json.loads((model_path() / "config.json").read_text())["vocab_size"]
    (start / "config.json").write_text(json.dumps(config(vocabulary, model), indent=2) + "\n")
    parts = [work / f"train-{number}.jsonl.part" for number in range(renderings)]
    with multiprocessing.get_context("spawn").Pool(renderings) as pool:
        counts = pool.starmap(render, [(train, limit, number + 1, part) for number, part in enumerate(parts)])
    partial = work / "train.jsonl.part"
    with partial.open("wb") as file:
        for part in parts:
            with part.open("rb") as own:
                shutil.copyfileobj(own, file)
            part.unlink()
    if not counts[0]:
        raise DataError(f"{train}: holds no usable poem: expected those of docs/moe.md")
    partial.rename(work / "train.jsonl")
    print(f"{counts[0]:,} poems, {renderings} conversations of each", flush=True)


def render(train: Path, limit: int | None, seed: int, output: Path) -> int:
    """Write a conversation about each poem; how many there are."""
    poems, rng = list(itertools.islice(read_poems(train), limit)), random.Random(seed)
    with output.open("w", encoding="utf-8") as file:
        for poem in poems:
            file.write(rendered(poem, poems, rng) + "\n")
    return len(poems)


def rendered(poem: Poem, poems: list[Poem], rng: random.Random) -> str:
    return json.dumps({"messages": converse(poem, rng, rng.choice(poems))}, ensure_ascii=False)


def beginning(data: Path, output: Path, lines: int) -> Path:
    """Write the first lines of a file to another one."""
    with data.open("rb") as file, output.open("wb") as out:
        out.writelines(itertools.islice(file, lines))
    return output


def trained(work: Path, output: Path, data: Path, steps: int, options: argparse.Namespace) -> None:
    """Train the model for so many steps, in a process of its own; the same command resumes it."""
    command = [sys.executable, "-m", "warpbus", "train", work / "start", output, "--data", data]
    command += ["--valid", data_path("validation.jsonl"), "--steps", steps, "--warmup", max(1, steps // 10)]
    command += ["--rows", options.rows, "--rows-at-once", options.rows, "--length", options.length]
    command += ["--learning-rate", options.learning_rate, "--weight-decay", options.weight_decay]
    command += ["--valid-every", max(PROBE, steps // 10), "--workers", options.workers, "--device", options.device]
    if has_drafts(work / "start"):
        command += ["--mtp-weight", options.mtp_weight]
    command += ["--save-every", max(PROBE, steps // 4)]
    if options.dtype is not None:
        command += ["--dtype", options.dtype]
    finished = subprocess.run([*map(str, command), *["--compile"] * options.compile])
    if finished.returncode:
        raise UsageError(f"training ended with exit code {finished.returncode}: see above")


def has_drafts(model: Path) -> bool:
    """Whether a directory announces a layer of multi-token prediction."""
    found = json.loads((model / "config.json").read_text(encoding="utf-8"))["num_nextn_predict_layers"]
    return bool(found)


def tokenizing(work: Path, workers: int) -> float:
    """About the seconds that tokenizing all data takes so many processes."""
    lines = sum(1 for _ in (work / "train.jsonl").open("rb"))
    sample = beginning(work / "train.jsonl", work / "rate.jsonl", RATE_LINES)
    started = time.monotonic()
    config = json.loads((work / "start" / "config.json").read_text(encoding="utf-8"))
    tokenize(sample, work / "start", config, length=512)
    return (time.monotonic() - started) * lines / min(lines, RATE_LINES) / workers


def affordable(work: Path, started: float, options: argparse.Namespace) -> int:
    """How many steps there is time for.

    Args:
        started: when all of it began, by `time.monotonic`.
    """
    probe, begun = work / "probe", time.monotonic()
    if not probe.exists():
        data = beginning(work / "train.jsonl", work / "probe.jsonl", PROBE_LINES)
        trained(work, probe, data, PROBE, options)
    log = json.loads((probe / "training-log.json").read_text())
    each = median(entry["seconds"] for entry in log[-SETTLED:])
    now = time.monotonic()
    # Starting and compiling take the second time as long as the first.
    before = now - begun + tokenizing(work, options.workers)
    left = max(0.0, options.minutes * 60 - options.reserve - (now - started) - before)
    steps = min(options.steps, int(left / each))
    print(f"a step takes {each:.3f} s: {steps:,} of {options.steps:,} steps", flush=True)
    if steps < PROBE:
        raise UsageError(f"--minutes {options.minutes}: there is no time to train: give more, or fewer --rows")
    return steps


def accepted(model: Path, device: str, limit: int) -> float:
    """The share of the drafts that are accepted, greedily, one draft per step, for held-out titles."""
    options = ServiceOptions(device=device, speculation="mtp:1", max_num_seqs=AT_ONCE, max_model_len=512)
    opened = open_model(model, resolve_device(device), options)
    engine = build_engine(opened, options)
    template = load_template(model, opened.checkpoint.config, load_tokenizer(model))
    lines = data_path("validation.jsonl").read_text(encoding="utf-8").splitlines()[:limit]
    prompts = [template.render(json.loads(line)["messages"][:1]) for line in lines]
    started = time.monotonic()
    for at in range(0, len(prompts), AT_ONCE):
        for prompt in prompts[at : at + AT_ONCE]:
            sequence = request(prompt, tokens=ANSWER)
            sequence.stop_ids = frozenset(opened.config.stop_ids)
            engine.add(sequence)
        while engine.has_work:
            engine.step()
    stats = engine.stats()
    share = stats.accepted / stats.drafted
    print(
        f"{share:.1%} of {stats.drafted:,} drafts were accepted: {len(prompts)} answers in "
        f"{time.monotonic() - started:.0f} s",
        flush=True,
    )
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="poems to train on (jsonl.xz)")
    parser.add_argument("--model", choices=MODELS, default="poet-moe")
    parser.add_argument("--steps", type=int, default=3000, help="at most so many")
    parser.add_argument("--minutes", type=float, default=9.0, help="that all of it may take")
    parser.add_argument("--reserve", type=float, default=200.0, help="seconds of them for quantizing and comparing")
    parser.add_argument("--renderings", type=int, default=3, help="conversations of each poem")
    parser.add_argument("--mtp-weight", type=float, default=0.3, help="of the loss of multi-token prediction")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of training; bfloat16 on a GPU")
    parser.add_argument("--rows", type=int, default=256, help="per step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=1.0)
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--workers", type=int, default=2, help="tokenizing processes")
    parser.add_argument("--poems", type=int, help="use this many only, to try it")
    parser.add_argument("--schemes", nargs="+", default=["w4a16-g128", "w3a16-g128"])
    parser.add_argument("--samples", type=int, nargs="+", default=[256, 8], help="conversations to calibrate on")
    parser.add_argument("--limit", type=int, default=200, help="held-out poems, and questions")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, help="a directory for data and models, which stay there")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the directory of the records")
    options = parser.parse_args()

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        work = options.work or Path(directory)
        if not (work / "train.jsonl").exists():
            shutil.rmtree(work / "start", ignore_errors=True)
            prepared(work, options.train, options.model, options.renderings, options.poems)
            print(f"data after {time.monotonic() - started:.0f} s", flush=True)
        model, chosen = work / options.model, work / "steps.json"
        if not chosen.exists():
            chosen.write_text(json.dumps(affordable(work, started, options)))
        if not model.exists():
            trained(work, model, work / "train.jsonl", json.loads(chosen.read_text()), options)
        summary = json.loads((model / "training.json").read_text())
        print(f"trained {summary['settings']['steps']:,} steps in {summary['seconds']:.0f} s", flush=True)
        drafts: dict[str, Parameter] = {}
        if has_drafts(model):
            share = accepted(model, options.device, options.limit)
            drafts = {"mtp_weight": options.mtp_weight, "mtp_loss": summary["mtp_loss"], "accepted_drafts": share}
        runs, found = measured(model, options.schemes, options.samples, options.limit, options.device)
        common: dict[str, Parameter] = {
            "model": options.model,
            "parameters": summary["parameters"],
            "steps": summary["settings"]["steps"],
            "tokens": summary["tokens"],
            "training_seconds": summary["seconds"],
            "valid_loss": summary["valid_loss"],
            "expert_load": summary["expert_load"],
            "documents": options.limit,
            **drafts,
        }
        print("\n".join(table(runs, found)))
        print(write(records(runs, found, common, command_of(sys.argv[1:]), options.device), options.output))
        print(f"all of it took {time.monotonic() - started:.0f} s")


def command_of(words: list[str]) -> str:
    """What to type to measure it again: without directories of this machine."""
    kept = [word for at, word in enumerate(words) if not {"--work", "--output"} & {*words[max(0, at - 1) : at + 1]}]
    kept = [Path(word).name if at and kept[at - 1] == "--train" else word for at, word in enumerate(kept)]
    return shlex.join(["python", "benchmarks/poet_moe_training.py", *kept])


if __name__ == "__main__":
    try:
        main()
    except WarpbusError as error:
        sys.exit(f"error: {error}")
