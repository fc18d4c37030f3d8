"""PyTorch's database of operators over a pool, compared with the same device without a pool: how many are right.

    python benchmarks/pool_operators.py
    python benchmarks/pool_operators.py --device cuda --processes 16

All samples of all operators in five dtypes, forward, backward and in place, take some ten minutes per core. Results
go to build/pool-operators-DEVICE.jsonl as they come, one operator and dtype per line; a run that was stopped goes on
there (`--fresh` begins again). The records go to benchmarks/results. `--only fft logsigmoid` computes the operators
whose names contain one of these words, from the beginning and without records. The exit code is 1 if an operator gives
other numbers than the device itself, or an error that the table in docs/remote_gpu.md does not have.
"""

import argparse
import json
import os
import platform
import queue
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import warpbus
from warpbus.bench.records import RESULTS, Peer, Record, now, ratio, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cpu" / "pool"))
from pool_direct import connected
from pool_operator_database import DIRECTIONS, DTYPES, check, documented_refusals, entries, expected, title

VERDICTS = ("right", "refused", "wrong", "failed", "crashed")
SECONDS_EACH = 600

Key = tuple[str, str]
"""An operator's title and the name of a dtype."""


def jobs(device: str, words: list[str]) -> list[Key]:
    """All that is to be computed: the operators whose names contain one of the words."""
    found = [(title(entry), str(dtype)[6:]) for dtype in DTYPES for entry in entries(dtype, device)]
    return [key for key in found if any(word in key[0] for word in words)]


class DeviceBrokenError(Exception):
    """After an error of CUDA a process computes nothing more."""


def entry_of(key: Key, device: str) -> tuple[Any, torch.dtype]:
    """An operator of the database, and the dtype."""
    dtype = getattr(torch, key[1])
    (found,) = (each for each in entries(dtype, torch.device(device).type) if title(each) == key[0])
    return found, dtype


def worker(keys: list[Key], samples: int, device: str, results: Any) -> None:
    """Compute one after the other, in a process that a crash may end."""
    torch.set_num_threads(1)
    refusals = documented_refusals()
    # Before the pool's device is registered: PyTorch then computes gradients there, and on no GPU of this process.
    rights = {key: expected(*entry_of(key, device), range(samples), device) for key in keys} if device != "cpu" else {}
    for key in keys:
        with connected(1 << 30, device):
            outcomes = check(
                *entry_of(key, device),
                lambda message: any(each in message for each in refusals),
                range(samples),
                rights.pop(key, None),
                device,
            )
        if any("CUDA error" in each for outcome in outcomes.values() for each in outcome.messages.values()):
            raise DeviceBrokenError
        results.send(
            {
                direction: {"verdict": each.verdict, "samples": dict(each.counts), "messages": each.messages}
                for direction, each in outcomes.items()
            }
        )


def computed(keys: list[Key], samples: int, device: str) -> Iterator[tuple[Key, dict[str, Any]]]:
    """The outcomes, in order."""
    context, position = get_context("spawn"), 0
    while position < len(keys):
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=worker, args=(keys[position:], samples, device, sending))
        process.start()
        sending.close()
        try:
            while position < len(keys):
                if not receiving.poll(SECONDS_EACH):
                    process.kill()
                outcome = receiving.recv()
                yield keys[position], outcome
                position += 1
        except EOFError:
            process.join()
            message = {"crashed": f"the process ended with code {process.exitcode}"}
            crashed = {"verdict": "crashed", "samples": {"crashed": 1}, "messages": message}
            yield keys[position], {"forward": crashed}
            position += 1
        process.join()


def computed_in_parallel(
    keys: list[Key], samples: int, device: str, processes: int
) -> Iterator[tuple[Key, dict[str, Any]]]:
    """The outcomes, in the order in which they come. The processes are divided among the GPUs of the machine."""
    found: queue.SimpleQueue[tuple[Key, dict[str, Any]]] = queue.SimpleQueue()
    gpus = torch.cuda.device_count() if device == "cuda" else 0

    def collect(number: int) -> None:
        for each in computed(keys[number::processes], samples, f"cuda:{number % gpus}" if gpus else device):
            found.put(each)

    for number in range(processes):
        threading.Thread(target=collect, args=(number,), daemon=True).start()
    for _ in keys:
        yield found.get()


def read_partial(path: Path, samples: int) -> dict[Key, dict[str, Any]]:
    """What an earlier run of as many samples has written; a line that it did not finish is left out."""
    found: dict[Key, dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                name, dtype, of, outcome = json.loads(line)
            except ValueError:
                continue
            if of == samples:
                found[name, dtype] = outcome
    return found


def records(outcomes: dict[Key, dict[str, Any]], samples: int, device: str, command: str) -> list[Record]:
    """Of each dtype and direction: the operators that are right, of those that the device computes."""
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    made = []
    for dtype in dict.fromkeys(dtype for _, dtype in outcomes):
        for direction in DIRECTIONS:
            each = [found[direction] for (_, of), found in outcomes.items() if of == dtype and direction in found]
            verdicts = Counter(found["verdict"] for found in each)
            counted = sum((Counter(found["samples"]) for found in each), Counter())
            compared = sum(verdicts[verdict] for verdict in VERDICTS)
            if not verdicts["right"]:
                continue
            made.append(
                Record(
                    bench="pool-operators",
                    case={
                        "dtype": dtype,
                        "direction": direction,
                        "most_samples": samples,
                        **{verdict: verdicts[verdict] for verdict in VERDICTS[1:]},
                        "equal_samples": counted["equal"],
                        "close_samples": counted["close"],
                    },
                    metric="agreement",
                    unit="operators",
                    ours=verdicts["right"],
                    peer=Peer(f"PyTorch on the {'CPU' if device == 'cpu' else 'GPU'}", torch.__version__, compared),
                    ratio=ratio("agreement", verdicts["right"], compared),
                    floor=None,
                    samples={"ours": [verdicts["right"]], "peer": [compared]},
                    device=name,
                    versions={
                        "warpbus": warpbus.__version__,
                        "python": platform.python_version(),
                        "torch": torch.__version__,
                    },
                    date=now(),
                    command=command,
                )
            )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=25, help="the most samples of an operator and dtype")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the pool")
    parser.add_argument("--processes", type=int, default=1, help="that compute at the same time")
    parser.add_argument("--partial", type=Path, help="results of a run that goes on")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="operators whose names contain one of the words")
    parser.add_argument("--fresh", action="store_true", help="begin again")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the directory of the records")
    options = parser.parse_args()
    path = options.partial or Path(f"build/pool-operators-{options.device}{'-only' if options.only else ''}.jsonl")
    if options.fresh or options.only:
        path.unlink(missing_ok=True)
    outcomes = read_partial(path, options.samples)
    path.parent.mkdir(parents=True, exist_ok=True)
    todo = [key for key in jobs(options.device, options.only or [""]) if key not in outcomes]
    found = computed_in_parallel(todo, options.samples, options.device, options.processes)
    with path.open("a", encoding="utf-8") as partial:
        for done, (key, outcome) in enumerate(found, 1):
            outcomes[key] = outcome
            partial.write(json.dumps([*key, options.samples, outcome]) + "\n")
            partial.flush()
            if sys.stderr.isatty():
                print(f"\r{done} of {len(todo)}: {' '.join(key):60.60}", end="", file=sys.stderr)
    command = " ".join(["python", "benchmarks/pool_operators.py", *sys.argv[1:]])
    made = records(outcomes, options.samples, options.device, command)
    bad = False
    for (name, dtype), found in outcomes.items():
        for direction, each in found.items():
            if each["verdict"] not in ("right", "skipped"):
                bad = bad or each["verdict"] != "refused"
                print(f"{name} {dtype} {direction}: {each['verdict']}: {each['messages'][each['verdict']]:.200}")
    for each in made:
        print(f"{each.case['dtype']} {each.case['direction']}: {each.ours:.0f} of {each.peer.value:.0f}")
    if not options.only:
        print(write(made, options.output))
    sys.exit(bad)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
