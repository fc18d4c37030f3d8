"""Count the source files and functions of the package that three tasks pass through, on the CPU and in one process.

    .venv/bin/python scripts/trace_files.py [--json]

- load: `LLM(...)` of a quantized model, from the bytes of its files to weights that a kernel reads;
- decode step: one token of one sequence, from the scheduler to text;
- GPTQ layer: one decoder layer calibrated, quantized and handed to the writer.

The model is the packaged demo: `rtn` quantizes it for the first two tasks. A profiler notes each call of a function
whose source is in the package. It sees the main thread; the threads that read the next layer and write the last one are
not in the figures. Imports, class bodies, lambdas and comprehensions do not count. Run it before and after a
restructuring: fewer files mean that a reader opens fewer files to follow the task.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import CO_NEWLOCALS
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import warpbus
from warpbus.demo import calibration_path, model_path
from warpbus.dist import Group
from warpbus.quantization import driver

PACKAGE = str(Path(warpbus.__file__).parent)
SCHEME = "w4a16-g128"
DECODE_STEPS = 8
CALIBRATION = {"samples": 4, "seqlen": 128}
GOALS = {"load": 35, "decode step": 20, "GPTQ layer": 28}


@dataclass
class Trace:
    """The calls of a task.

    Attributes:
        repeats: how many times the task is in the trace; `calls` are per task.
        counts: calls of each function.
        on: whether calls are counted at the moment.
    """

    repeats: int = 1
    counts: Counter[CodeType] = field(default_factory=Counter)
    on: bool = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Called by the interpreter."""
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(PACKAGE):
            is_function = code.co_flags & CO_NEWLOCALS and not code.co_name.startswith("<")
            if is_function and "__module__" not in code.co_names[:2]:  # a class body sets it first
                self.counts[code] += 1

    @property
    def files(self) -> list[str]:
        """Paths within the package."""
        return sorted({str(Path(code.co_filename).relative_to(PACKAGE)) for code in self.counts})

    def figures(self) -> dict[str, Any]:
        """What `--json` prints of the task."""
        calls = self.counts.total() // self.repeats
        return {"files": len(self.files), "functions": len(self.counts), "calls": calls, "paths": self.files}


@contextmanager
def profiled(trace: Trace) -> Iterator[None]:
    """The interpreter reports the calls of this thread to `trace`."""
    sys.setprofile(trace)
    try:
        yield
    finally:
        sys.setprofile(None)


class OneProcess:
    """In place of `Processes`: runs the job of a quantization here, where the profiler sees it.

    Messages to the starting process are its work, not the job's: the profiler is off while they are received.
    """

    def __init__(self, function: Callable[..., None], *, receive: Callable[[object], None], **_: object) -> None:
        self._function, self._receive = function, receive

    def __enter__(self) -> "OneProcess":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, *arguments: object) -> None:
        """Call the function as the only process of a group."""
        self._function(Group(0, 1, torch.device("cpu")), self._send, *arguments)

    def _send(self, message: object) -> None:
        profiler = sys.getprofile()
        sys.setprofile(None)
        self._receive(message)
        sys.setprofile(profiler)


def trace_load(model: Path) -> Trace:
    """A quantized model is loaded."""
    trace = Trace(on=True)
    make = warpbus.LLM  # imports the engine before the trace begins
    with profiled(trace):
        make(str(model), device="cpu")
    return trace


def trace_decode(model: Path) -> Trace:
    """Some tokens of one sequence, after the prompt and the first tokens."""
    trace = Trace(repeats=DECODE_STEPS)
    llm = warpbus.LLM(str(model), device="cpu")
    params = warpbus.SamplingParams(max_tokens=2 * DECODE_STEPS, ignore_eos=True, seed=0)
    with profiled(trace):
        for count, _ in enumerate(llm.generate("春夜", params, stream=True), start=1):
            trace.on = DECODE_STEPS // 2 <= count < DECODE_STEPS // 2 + DECODE_STEPS
    return trace


def trace_gptq(output: Path) -> Trace:
    """All layers after the first, from the last matrix of one layer to the last matrix of the next."""
    trace = Trace()
    finished = Counter[int]()

    def matrix(done: int, total: int, result: Any) -> None:
        finished[result.layer] += 1
        trace.on = done < total and finished[0] == max(finished.values())
        trace.repeats = max(result.layer, 1)

    with profiled(trace):
        quantize(output, "gptq", progress=driver.Progress(matrix=matrix), calibration=calibration_path(), **CALIBRATION)
    return trace


def quantize(output: Path, algorithm: str, **options: Any) -> None:
    """Quantize the demo in this process."""
    driver.Processes, original = OneProcess, driver.Processes  # type: ignore[misc, assignment]
    try:
        driver.quantize(model_path(), output, scheme=SCHEME, algorithm=algorithm, device="cpu", **options)
    finally:
        driver.Processes = original  # type: ignore[misc]


def main(arguments: list[str]) -> None:
    """Print a table, or with `--json` the figures and the files of each task."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory, "rtn")
        quantize(model, "rtn")
        traces = {
            "load": trace_load(model),
            "decode step": trace_decode(model),
            "GPTQ layer": trace_gptq(Path(directory, "gptq")),
        }
    figures = {task: trace.figures() for task, trace in traces.items()}
    if arguments == ["--json"]:
        print(json.dumps(figures, indent=2))
        return
    print(f"{'task':<12} {'files':>6} {'goal':>5} {'functions':>10} {'calls':>7}")
    for task, row in figures.items():
        print(f"{task:<12} {row['files']:>6} {GOALS[task]:>5} {row['functions']:>10} {row['calls']:>7}")


if __name__ == "__main__":
    main(sys.argv[1:])
