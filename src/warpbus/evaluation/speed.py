"""How fast a model generates and how much memory that takes, measured in a process of its own.

A fresh process, since a peak of memory cannot be taken back: side by side in one process, each model would show the
peak of those before it.
"""

import json
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
        tokens_per_second: the median of several runs, without the reading of the prompt.
        peak_bytes: the GPU memory allocated at most, or on the CPU the process's resident memory at most.
        device: its name.
    """

    tokens_per_second: float
    peak_bytes: int
    device: str


def measure_speed(model: Path, *, device: str = "auto", dtype: str = "auto", tokens: int = 32) -> Speed:
    """Generate `tokens` tokens, at least 2, in a fresh process.

    Raises:
        WarpbusError: if that process fails; the message is its own.
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
    """What the fresh process does: arguments are model, device, dtype and tokens; prints a `Speed` as JSON."""
    model, device, dtype, tokens = sys.argv[1:]
    try:
        print(json.dumps(asdict(_measure(model, device, dtype, int(tokens)))))
    except WarpbusError as error:
        sys.exit(str(error))


def _measure(model: str, device: str, dtype: str, tokens: int) -> Speed:
    llm = LLM(model, device=device, dtype=dtype)
    # Ids rather than a text, so that every model is given the same; stop tokens would end a run early.
    prompt = [[*range(10, 26), *llm.tokenizer.prompt_suffix]]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    llm.generate(prompt, params)
    rates = []
    for _ in range(_RUNS):
        completion = llm.generate(prompt, params)[0]
        # The first token comes with the prompt: its time is not in these seconds.
        rates.append((len(completion.token_ids) - 1) / completion.decode_seconds)
    if llm.device.type == "cuda":
        peak, name = torch.cuda.max_memory_allocated(llm.device), torch.cuda.get_device_name(llm.device)
    else:
        peak, name = _peak_resident_bytes(), "cpu"
    return Speed(statistics.median(rates), peak, name)


def _peak_resident_bytes() -> int:
    # Not getrusage: its maximum survives exec, and is then that of the process which started this one.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
