"""How fast a model generates and how much memory that takes, measured in a process of its own.

    python -m warpbus.evaluation.speed MODEL DEVICE DTYPE TOKENS

A fresh process, since a peak of memory cannot be taken back: side by side in one process, each model would show the
peak of those before it.
"""

import json
import resource
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from warpbus.engine import LLM, SamplingParams
from warpbus.errors import WarpbusError

_RUNS = 3


@dataclass(frozen=True)
class Speed:
    """Greedy decoding of one sequence.

    Attributes:
        tokens_per_second: the median of several runs.
        peak_bytes: the GPU memory allocated at most, or on the CPU the process's resident memory at most.
        device: its name.
    """

    tokens_per_second: float
    peak_bytes: int
    device: str


def measure_speed(model: Path, *, device: str = "auto", dtype: str = "auto", tokens: int = 64) -> Speed:
    """Generate `tokens` tokens in a fresh process.

    Raises:
        WarpbusError: if that process fails; the message is its own.
    """
    command = [sys.executable, "-m", "warpbus.evaluation.speed", str(model), device, dtype, str(tokens)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        said = finished.stderr.strip().splitlines() or [f"exit code {finished.returncode}"]
        raise WarpbusError(f"{model}: the speed could not be measured: {said[-1]}")
    return Speed(**json.loads(finished.stdout.splitlines()[-1]))


def _measure(model: str, device: str, dtype: str, tokens: int) -> Speed:
    llm = LLM(model, device=device, dtype=dtype)
    # Ids rather than a text, so that every model is given the same, and no stop token ends the run early.
    prompt = [[10 + index % 100 for index in range(16)]]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    llm.generate(prompt, params)
    rates = []
    for _ in range(_RUNS):
        completion = llm.generate(prompt, params)[0]
        rates.append(len(completion.token_ids) / completion.decode_seconds)
    if llm.device.type == "cuda":
        peak, name = torch.cuda.max_memory_allocated(llm.device), torch.cuda.get_device_name(llm.device)
    else:
        peak, name = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "cpu"
    return Speed(statistics.median(rates), peak, name)


if __name__ == "__main__":
    try:
        print(json.dumps(asdict(_measure(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))))
    except WarpbusError as error:
        sys.exit(str(error))
