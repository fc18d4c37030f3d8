"""Warpbus beside vLLM on one GPU: both engines, and both servers over HTTP, with one model directory.

    python benchmarks/beside_vllm.py MODEL --vllm ~/vllm/bin/python
    python benchmarks/beside_vllm.py MODEL --vllm ~/vllm/bin/python --part http --clients 64,256
    python benchmarks/beside_vllm.py MODEL --vllm ~/vllm/bin/python --activation-dtype auto,fp8

MODEL is a checkpoint that both load, such as what `warpbus quantize` writes in the format compressed-tensors; its
weights may be random. `--vllm` is a Python that has vLLM. The engines run one after the other, each in a process of its
own (`beside_vllm_worker.py`). So do the servers, which get their requests from the same client, `vllm bench serve`: 512
tokens in and 128 out, twice as many requests as clients, the first round of each load not counted. Prefix caching is
off. All samples are kept, and their medians compared. Records go to benchmarks/results.
"""

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from warpbus.bench.cases import versions
from warpbus.bench.records import RESULTS, Parameter, Peer, Record, now, ratio, write
from warpbus.cuda.dtype_names import ACTIVATION_DTYPES
from warpbus.errors import DeviceError, WarpbusError

WORKER = Path(__file__).with_name("beside_vllm_worker.py")
VLLM = ("-m", "vllm.entrypoints.cli.main")
NAME = "model"  # of the model in both servers
STARTING = 600.0  # seconds that a server may take
METRICS = {  # of `vllm bench serve`: what it is, metric, unit
    "output_throughput": ("output", "speed", "tokens/s"),
    "mean_ttft_ms": ("first token, mean", "latency", "ms"),
    "p99_itl_ms": ("between tokens, p99", "latency", "ms"),
}

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Measured:
    """One case of both: a record without what all records share."""

    case: Mapping[str, Parameter]
    activations: str  # of our prompts: one of ACTIVATION_DTYPES
    metric: str
    unit: str
    ours: list[float]
    theirs: list[float]
    version: str  # of vLLM


def last_line(text: str) -> str:
    """What a program said last, usually why it failed."""
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def run_engine(command: Sequence[str]) -> tuple[str, Samples]:
    """The version and the samples of an engine. Raises DeviceError with its last line if it fails."""
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise DeviceError(f"{command[2]}: {last_line(finished.stderr)}")
    said = json.loads(finished.stdout.strip().splitlines()[-1])
    return said["version"], said["samples"]


@contextmanager
def server(command: Sequence[str], port: int) -> Iterator[None]:
    """A server in a process group of its own, from its first answer on; ended at last."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            until = time.monotonic() + STARTING
            while not answers(port):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise DeviceError(
                        f"{shlex.join(command)}: {(log.read().strip().splitlines() or ['no answer'])[-1]}"
                    )
                time.sleep(0.5)
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    os.killpg(process.pid, number)
                    try:
                        process.wait(60)
                    except subprocess.TimeoutExpired:
                        continue


def answers(port: int) -> bool:
    """Whether a server completes a prompt of one token."""
    body = json.dumps({"model": NAME, "prompt": [5], "max_tokens": 1}).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def load(options: argparse.Namespace, port: int, clients: int, seed: int) -> Mapping[str, float]:
    """What `vllm bench serve` measures of a server."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            options.vllm,
            *VLLM,
            "bench",
            "serve",
            "--backend",
            "openai",
            "--base-url",
            f"http://127.0.0.1:{port}",
        ]
        command += ["--endpoint", "/v1/completions", "--model", NAME, "--tokenizer", str(options.model)]
        command += [
            "--dataset-name",
            "random",
            "--random-input-len",
            str(options.prompt),
            "--random-output-len",
            str(options.answer),
        ]
        command += ["--num-prompts", str(2 * clients), "--max-concurrency", str(clients), "--seed", str(seed)]
        command += ["--percentile-metrics", "ttft,itl"]
        command += ["--save-result", "--result-dir", directory, "--result-filename", "load.json"]
        finished = subprocess.run(command, capture_output=True, text=True)
        if finished.returncode:
            raise DeviceError(f"vllm bench serve: {last_line(finished.stderr)}")
        found: dict[str, float] = json.loads((Path(directory) / "load.json").read_text(encoding="utf-8"))
        if found["completed"] != 2 * clients:
            raise DeviceError(f"vllm bench serve: {found['completed']} of {2 * clients} requests were answered")
        return found


def measure_server(
    command: Sequence[str], port: int, options: argparse.Namespace
) -> dict[tuple[int, str], list[float]]:
    """Samples by number of clients and key of `METRICS`."""
    samples: dict[tuple[int, str], list[float]] = {}
    with server(command, port):
        for clients in options.clients:
            for number in range(options.rounds + 1):
                found = load(options, port, clients, number)
                for key in METRICS if number else ():
                    samples.setdefault((clients, key), []).append(found[key])
    return samples


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def engines(options: argparse.Namespace) -> Iterator[Measured]:
    """Both engines: one sequence, many requests, a long prompt."""
    asked = [str(options.model), "--requests", ",".join(map(str, options.clients)), "--context", str(options.context)]
    asked += ["--prompt", str(options.prompt), "--answer", str(options.answer)]
    version, theirs = run_engine([options.vllm, str(WORKER), "vllm", *asked])
    for activations in options.activation_dtype:
        _, ours = run_engine([sys.executable, str(WORKER), "warpbus", *asked, "--activation-dtype", activations])
        for load, samples in ours.items():
            metric, unit = ("latency", "ms") if load == "first token" else ("speed", "tokens/s")
            case: dict[str, Parameter] = {"level": "engine", "load": load}
            yield Measured(case, activations, metric, unit, samples, theirs[load], version)


def servers(options: argparse.Namespace) -> Iterator[Measured]:
    """Both servers, with each number of clients."""
    most, port = str(max(options.clients)), free_port()
    shared = [str(options.model), "--served-model-name", NAME, "--port", str(port), "--max-num-seqs", most]
    shared += ["--max-model-len", str(options.context)]
    program = "import vllm; print(vllm.__version__)"
    version = subprocess.run([options.vllm, "-c", program], capture_output=True, text=True).stdout.strip().splitlines()
    command = [options.vllm, *VLLM, "serve", *shared, "--no-enable-prefix-caching"]
    theirs = measure_server([*command, "--gpu-memory-utilization", "0.85"], port, options)
    command = [sys.executable, "-m", "warpbus", "serve", *shared, "--no-prefix-caching"]
    for activations in options.activation_dtype:
        ours = measure_server([*command, "--activation-dtype", activations], port, options)
        for (clients, key), samples in ours.items():
            of, metric, unit = METRICS[key]
            case: dict[str, Parameter] = {"level": "http", "clients": clients, "of": of}
            yield Measured(case, activations, metric, unit, samples, theirs[clients, key], version[-1])


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def kinds(text: str) -> list[str]:
    if not set(text.split(",")) <= set(ACTIVATION_DTYPES):
        raise argparse.ArgumentTypeError(f"{text}: expected {' or '.join(ACTIVATION_DTYPES)}")
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint that both load")
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="the Python of an environment with vLLM")
    parser.add_argument("--part", default="engine,http", help="engine,http by default")
    parser.add_argument("--clients", type=numbers, default=[16, 64, 256], help="16,64,256 by default")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a request; 512 by default")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer; 128 by default")
    parser.add_argument("--context", type=int, default=8192, help="8192 by default")
    parser.add_argument("--rounds", type=int, default=2, help="over HTTP; 2 by default")
    parser.add_argument(
        "--activation-dtype",
        type=kinds,
        default=["auto"],
        help="of our prompts: auto (16 bits), fp8, int8; or auto,fp8",
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="the directory of the records")
    options = parser.parse_args()

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    words = [each for at, each in enumerate(sys.argv) if at and "--output" not in sys.argv[at - 1 : at + 1]]
    records = []
    for part in options.part.split(","):
        for found in {"engine": engines, "http": servers}[part](options):
            ours, theirs = median(found.ours), median(found.theirs)
            record = Record(
                bench="vllm",
                case={
                    "model": options.model.name,
                    "activation_dtype": found.activations,
                    "prompt": options.prompt,
                    "generated": options.answer,
                    **found.case,
                },
                metric=found.metric,
                unit=found.unit,
                ours=ours,
                peer=Peer("vLLM", found.version, theirs),
                ratio=ratio(found.metric, ours, theirs),
                floor=None,
                samples={"ours": found.ours, "peer": found.theirs},
                device=device,
                versions=versions(),
                date=now(),
                command=shlex.join(["python", "benchmarks/beside_vllm.py", *words]),
            )
            records.append(record)
            path = write(records, options.output)  # what is measured is kept if a later load fails or is stopped
            what = ", ".join([*map(str, found.case.values()), f"activations {found.activations}"])
            print(f"{what}: {ours:,.1f} {found.unit}, vLLM {theirs:,.1f}: {record.ratio:.2f} times as good", flush=True)
    print(path)


if __name__ == "__main__":
    try:
        main()
    except WarpbusError as error:
        sys.exit(f"error: {error}")
