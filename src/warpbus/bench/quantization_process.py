"""One quantization in a process of its own, so that no run warms the next, and where its time went."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from warpbus.errors import DeviceError
from warpbus.formats import Checkpoint
from warpbus.models import read_config
from warpbus.quantization import Calibration, Progress, Report, quantize

# As the command line does it: the other processes start before torch is loaded.
_PROGRAM = """
import json, sys
from warpbus.quantization.prestart import start_processes
asked = json.loads(sys.argv[1])
start_processes(**asked["where"])
from warpbus.bench.quantization_process import main
main(asked)
"""

START, END = "start", "end"
"""The stages before and after those of `Report.stages`."""


@dataclass(frozen=True)
class Timed:
    """A run.

    Attributes:
        seconds: from the start of its process to that process's end.
        stages: the parts of a run: `START` (Python, imports, the look at the model, the other processes), the stages
            of the report, `END` (giving the model its name, and the ends of all processes). They add up to `seconds`.
        report: of `quantize`.
    """

    seconds: float
    stages: Mapping[str, float]
    report: Report


def random_calibration(vocabulary: int, samples: int, seqlen: int) -> Calibration:
    """Sequences of random tokens, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    ids: list[list[int]] = torch.randint(vocabulary, (samples, seqlen), generator=generator).tolist()
    return Calibration(tuple(map(tuple, ids)))


def timed_run(
    model: Path,
    output: Path,
    *,
    scheme: str,
    algorithm: str,
    samples: int,
    seqlen: int,
    device: str,
    count: int,
    progress: Callable[[int, int], None],
) -> Timed:
    """Quantize a model on random tokens in a fresh process.

    Args:
        device: "cuda" or "cpu".
        count: how many GPUs, or processes on the CPU, share the work.
        progress: called with the matrices that are done and with all.

    Raises:
        DeviceError: if that process fails; the message is its own.
    """
    asked = {"model": str(model), "output": str(output), "scheme": scheme, "algorithm": algorithm}
    on_gpus = device == "cuda"
    where = {"device": device, "gpus": str(count) if on_gpus else "all", "processes": 1 if on_gpus else count}
    asked_json = json.dumps({**asked, "samples": samples, "seqlen": seqlen, "where": where})
    said: list[str] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        started = time.time()
        with subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, asked_json], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    said.append(line)
                    if line.startswith("["):
                        progress(*json.loads(line))
            except BaseException:
                process.kill()
                raise
        seconds = time.time() - started
        if process.returncode:
            errors.seek(0)
            last = errors.read().strip().splitlines() or ["it said nothing"]
            raise DeviceError(f"bench quantize: {count} at work: {last[-1]}")
    found = json.loads(said[-1])
    report = Report.from_json(found["report"])
    reported = found["began"] + report.seconds - started  # the stages end there
    start = max(0.0, reported - sum(report.stages.values()))
    return Timed(seconds, {START: start, **report.stages, END: max(0.0, seconds - reported)}, report)


def main(asked: Mapping[str, Any]) -> None:
    """The main function of that process: prints its progress, `[done, total]`, and at last the result."""
    vocabulary = read_config(Checkpoint(asked["model"], weights=False)).vocab_size
    data = random_calibration(vocabulary, asked["samples"], asked["seqlen"])
    began = time.time()
    report = quantize(
        asked["model"],
        asked["output"],
        scheme=asked["scheme"],
        algorithm=asked["algorithm"],
        calibration=data,
        samples=asked["samples"],
        seqlen=asked["seqlen"],
        progress=Progress(matrix=lambda done, total, result: print(json.dumps([done, total]), flush=True)),
        **asked["where"],
    )
    print(json.dumps({"began": began, "report": report.to_json()}))
