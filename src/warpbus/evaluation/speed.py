"""Measures generation speed and peak memory of a model in a separate process.

Peak memory cannot be reset: in one process, each model would show the peak of those before it.
"""

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from warpbus.cuda.energy import EnergyMeter
from warpbus.engine import LLM, SamplingParams
from warpbus.errors import WarpbusError

# Runs go on until there are so many and they took so long: other programs on the machine disturb some of short runs.
_FEWEST_RUNS, _MOST_RUNS = 3, 20
_SECONDS = 2.0


@dataclass(frozen=True)
class Speed:
    """Greedy decoding of one sequence.

    Attributes:
        tokens_per_second: of the fastest of several runs, without prefill; other programs only make runs slower.
        peak_bytes: peak GPU memory allocated, or on the CPU the peak resident memory of the process.
        device: its name.
        joules_per_token: energy of the GPU during these runs, with the prefill; None where it was not measured.
        slowest: the tokens per second of the slowest run.
    """

    tokens_per_second: float
    peak_bytes: int
    device: str
    joules_per_token: float | None = None
    slowest: float | None = None


def measure_speed(model: Path, *, device: str = "auto", dtype: str = "auto", tokens: int = 32) -> Speed:
    """Generate `tokens` tokens, at least 2, in a fresh process.

    Raises:
        WarpbusError: the process failed; the message is that of the process.
    """
    code = "from warpbus.evaluation.speed import main; main()"
    command = [sys.executable, "-c", code, str(model), device, dtype, str(tokens)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        said = finished.stderr.strip().splitlines() or ["it said nothing"]
        ended = f"signal {-finished.returncode}, " if finished.returncode < 0 else ""
        raise WarpbusError(f"{model}: the speed could not be measured: {ended}{said[-1]}")
    return Speed(**json.loads(finished.stdout.splitlines()[-1]))


def main() -> None:
    """The main function of the process: arguments are model, device, dtype and tokens; prints a `Speed` as JSON."""
    model, device, dtype, tokens = sys.argv[1:]
    try:
        print(json.dumps(asdict(_measure(model, device, dtype, int(tokens)))))
    except WarpbusError as error:
        sys.exit(str(error))


def _measure(model: str, device: str, dtype: str, tokens: int) -> Speed:
    llm = LLM(model, device=device, dtype=dtype)
    # Token ids instead of text, so that all models get the same prompt; stop tokens would end a run early.
    prompt = [[*range(10, 26), *llm.tokenizer.prompt_suffix]]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    llm.generate(prompt, params)
    rates: list[float] = []
    started = time.monotonic()
    with EnergyMeter([llm.device]) as energy:
        while len(rates) < _FEWEST_RUNS or (len(rates) < _MOST_RUNS and time.monotonic() - started < _SECONDS):
            completion = llm.generate(prompt, params)[0]
            # The first token is computed by the prefill, whose time is not counted.
            rates.append((len(completion.token_ids) - 1) / completion.decode_seconds)
    joules = None if energy.total is None else energy.total / (len(rates) * tokens)
    if llm.device.type == "cuda":
        peak, name = torch.cuda.max_memory_allocated(llm.device), torch.cuda.get_device_name(llm.device)
    else:
        peak, name = _peak_resident_bytes(), "cpu"
    return Speed(max(rates), peak, name, joules, min(rates))


def _peak_resident_bytes() -> int:
    # Not getrusage: its maximum survives exec and may be that of the parent process.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
