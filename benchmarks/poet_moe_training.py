"""From poems to a table: a mixture of experts is trained, quantized by every algorithm, and compared with itself.

    python benchmarks/poet_moe_training.py --train poems-train.jsonl.xz [--model poet-moe] [--steps 3000] [--minutes 9]
        [--device cuda] [--work DIR] [--output benchmarks/results]

The data are those of `python -m warpbus.demo.recipe`, with the vocabulary of glm-poet. A few steps are timed first;
then as many are trained as leave time to quantize and compare within `--minutes`, at most `--steps`. What is measured,
and the table for docs/quantization.md, are those of poet_moe.py; the records say how the model was trained.

A work directory that is given stays: the same command goes on where it ended.
"""

import argparse
import itertools
import json
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
from warpbus.demo import data_path, model_path
from warpbus.demo.poems import Poem
from warpbus.demo.recipe import config, converse, read_poems
from warpbus.errors import DataError, UsageError, WarpbusError

MODELS = ("poet-moe", "poet-moe-small")
VOCABULARY = ("tokenizer.model", "tokenizer_config.json", "generation_config.json")
PROBE = 12  # steps that are timed
SETTLED = 6  # of them, the last ones, after compilation
TOKENS_OF_POEM = 60  # in a conversation, about


def prepared(work: Path, train: Path, model: str, renderings: int, limit: int | None) -> None:
    """Write the conversations and the directory that training starts from."""
    poems = list(itertools.islice(read_poems(train), limit))
    if not poems:
        raise DataError(f"{train}: holds no usable poem: expected those of docs/moe.md")
    start = work / "start"
    start.mkdir(parents=True)
    for name in VOCABULARY:
        shutil.copy(model_path() / name, start)
    vocabulary = json.loads((model_path() / "config.json").read_text())["vocab_size"]
    (start / "config.json").write_text(json.dumps(config(vocabulary, model), indent=2) + "\n")
    rng = random.Random(1)
    partial = work / "train.jsonl.part"
    with partial.open("w", encoding="utf-8") as file:
        for poem in itertools.chain.from_iterable(itertools.repeat(poems, renderings)):
            file.write(rendered(poem, poems, rng) + "\n")
    partial.rename(work / "train.jsonl")
    print(f"{len(poems):,} poems, {renderings} conversations of each", flush=True)


def rendered(poem: Poem, poems: list[Poem], rng: random.Random) -> str:
    return json.dumps({"messages": converse(poem, rng, rng.choice(poems))}, ensure_ascii=False)


def trained(work: Path, output: Path, steps: int, options: argparse.Namespace) -> None:
    """Train the model for so many steps, in a process of its own; the same command resumes it."""
    command = [sys.executable, "-m", "warpbus", "train", work / "start", output, "--data", work / "train.jsonl"]
    command += ["--valid", data_path("validation.jsonl"), "--steps", steps, "--warmup", max(1, steps // 10)]
    command += ["--rows", options.rows, "--rows-at-once", options.rows, "--length", options.length]
    command += ["--learning-rate", options.learning_rate, "--weight-decay", options.weight_decay]
    command += ["--valid-every", max(PROBE, steps // 10), "--workers", options.workers, "--device", options.device]
    finished = subprocess.run([*map(str, command), *["--compile"] * options.compile])
    if finished.returncode:
        raise UsageError(f"training ended with exit code {finished.returncode}: see above")


def affordable(work: Path, started: float, options: argparse.Namespace) -> int:
    """How many steps there is time for."""
    probe = work / "probe"
    if not probe.exists():
        trained(work, probe, PROBE, options)
    log = json.loads((probe / "training-log.json").read_text())
    each = median(entry["seconds"] for entry in log[-SETTLED:])
    # Loading, compiling and tokenizing take the second time about as long as the first.
    around = max(0.0, options.minutes * 60 - options.reserve - 2 * (time.monotonic() - started))
    steps = min(options.steps, int(around / each))
    print(f"a step takes {each:.3f} s: {steps:,} of {options.steps:,} steps", flush=True)
    if steps < PROBE:
        raise UsageError(f"--minutes {options.minutes}: there is no time to train: give more, or fewer --rows")
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="poems to train on (jsonl.xz)")
    parser.add_argument("--model", choices=MODELS, default="poet-moe")
    parser.add_argument("--steps", type=int, default=3000, help="at most so many")
    parser.add_argument("--minutes", type=float, default=9.0, help="that all of it may take")
    parser.add_argument("--reserve", type=float, default=200.0, help="seconds of them for quantizing and comparing")
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
            tokens = options.steps * options.rows * options.length
            count = sum(1 for _ in itertools.islice(read_poems(options.train), options.poems))
            renderings = min(8, -(-tokens // max(1, count * TOKENS_OF_POEM)))
            prepared(work, options.train, options.model, renderings, options.poems)
        begun = time.monotonic()
        model, chosen = work / options.model, work / "steps.json"
        if not chosen.exists():
            chosen.write_text(json.dumps(affordable(work, begun, replaced(options, begun - started))))
        if not model.exists():
            trained(work, model, json.loads(chosen.read_text()), options)
        summary = json.loads((model / "training.json").read_text())
        print(f"trained {summary['settings']['steps']:,} steps in {summary['seconds']:.0f} s", flush=True)
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
        }
        print("\n".join(table(runs, found)))
        print(write(records(runs, found, common, command_of(sys.argv[1:]), options.device), options.output))
        print(f"all of it took {time.monotonic() - started:.0f} s")


def replaced(options: argparse.Namespace, seconds: float) -> argparse.Namespace:
    """The options with the time that is left after so many seconds."""
    return argparse.Namespace(**{**vars(options), "minutes": options.minutes - seconds / 60})


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
