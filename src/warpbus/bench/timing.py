"""Fair timing: contenders take turns on the same cold data, and every sample is kept.

- On a GPU each contender's calls are captured into a CUDA graph, which takes the host out of the measurement, and go
  over so many sets of buffers that what a call reads has left the L2 cache since it was last used.
- The contenders' samples alternate (A B A B), so that clocks and temperature drift alike for all of them.
- Data are random: multiplying zeros draws less power, and a GPU that is short of power then runs faster than it would.
"""

import math
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.capture import capture
from warpbus.errors import DeviceError

Inputs = tuple[Any, ...]
Call = Callable[..., Any]

# More nodes make a graph slow to capture. Cases below 2 x L2 / MAX_SETS bytes stay in L2: they measure the launch.
MAX_SETS = 2048


@dataclass(frozen=True)
class TimingEffort:
    """How long to measure.

    Attributes:
        samples: of each contender, at most.
        sample_seconds: the least duration of one sample, in calls that are repeated.
        seconds: of a contender's samples together; slow calls get fewer samples, at least 3.
    """

    samples: int
    sample_seconds: float
    seconds: float

    def repeats(self, call_seconds: float) -> int:
        """Calls in one sample."""
        return max(1, math.ceil(self.sample_seconds / call_seconds))

    def rounds(self, sample_seconds: float) -> int:
        """Samples, of which each takes so long."""
        return max(min(3, self.samples), min(self.samples, int(self.seconds / sample_seconds)))


FULL = TimingEffort(samples=21, sample_seconds=5e-3, seconds=3.0)
QUICK = TimingEffort(samples=5, sample_seconds=1e-3, seconds=0.5)


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, a number for each sample, and how they were taken.

    `method` is "graph" (replays of a CUDA graph between two events), "events" (calls from Python between two events) or
    "clock" (the host's clock, on the CPU or where a call waits for the GPU itself).
    """

    seconds: tuple[float, ...]
    method: str

    @property
    def median(self) -> float:
        """Of the samples, in seconds."""
        return statistics.median(self.seconds)


def measure(
    contenders: Sequence[Call], make: Callable[[], Inputs], effort: TimingEffort = FULL, touched: int | None = None
) -> list[Timing]:
    """Time contenders that do the same work.

    Args:
        contenders: each is called with one set of inputs, `call(*inputs)`.
        make: a new set of random inputs. If the first tensor among them is on a GPU, the GPU is timed; otherwise the
            host's clock is read, which is right for the CPU and for calls that end by copying from a GPU.
        effort: how long to measure.
        touched: bytes that the contender which needs least of a set reads and writes in a call; all of the inputs and
            the smallest output where it is `None`.

    Raises:
        DeviceError: if the inputs and outputs do not fit the device's memory.
    """
    try:
        first = make()
        device = next((each.device for each in first if isinstance(each, Tensor)), torch.device("cpu"))
        if device.type != "cuda":
            return _by_clock(contenders, first, make, effort)
        with torch.cuda.device(device):
            return _on_gpu(contenders, first, make, effort, touched)
    except RuntimeError as error:
        # On the CPU torch has no type for it.
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            where = "GPU" if isinstance(error, torch.OutOfMemoryError) else "CPU"
            raise DeviceError(
                f"the memory of the {where} does not hold this case: free some of it, or give a smaller --size"
            ) from None
        raise


def number_of_sets(touched: int, held: int, cache_bytes: int, free_bytes: int) -> int:
    """Sets of buffers of which a contender's part is twice the cache, or as many as half of the free memory holds.

    Args:
        touched: bytes that one call reads and writes.
        held: bytes that a set takes in all, with the outputs of every contender.
    """
    wanted = math.ceil(2 * cache_bytes / max(touched, 1))
    affordable = int(free_bytes / 2 / max(held, 1))
    return max(1, min(max(wanted, 2), affordable, MAX_SETS))


def _by_clock(
    contenders: Sequence[Call], first: Inputs, make: Callable[[], Inputs], effort: TimingEffort
) -> list[Timing]:
    outputs, estimates = [], []
    for call in contenders:
        start = time.perf_counter()
        outputs.append(_bytes(call(*first)))
        estimates.append(time.perf_counter() - start)
    touched, cache = _bytes(first) + min(outputs), cpu_cache_bytes()
    # Data that do not fit the cache twice are cold without a second set.
    sets = 1 if touched > 2 * cache else number_of_sets(touched, touched, cache, _available_bytes())
    buffers = [first, *(make() for _ in range(sets - 1))]
    plan = []
    for call, estimate in zip(contenders, estimates, strict=True):
        # A first call may have compiled or allocated something; one that is slow for another reason is not repeated.
        seconds = estimate if estimate > effort.seconds else min(_clocked(call, buffers, 1) for _ in range(2))
        plan.append((call, effort.repeats(seconds), seconds))
    rounds = min(effort.rounds(repeats * seconds) for _, repeats, seconds in plan)
    samples: list[list[float]] = [[] for _ in contenders]
    for _ in range(rounds):
        for taken, (call, repeats, _) in zip(samples, plan, strict=True):
            taken.append(_clocked(call, buffers, repeats))
    return [Timing(tuple(taken), "clock") for taken in samples]


def _clocked(call: Call, buffers: Sequence[Inputs], repeats: int) -> float:
    sets = len(buffers)
    start = time.perf_counter()
    for index in range(repeats):
        call(*buffers[index % sets])
    return max(time.perf_counter() - start, 1e-9) / repeats


def _on_gpu(
    contenders: Sequence[Call], first: Inputs, make: Callable[[], Inputs], effort: TimingEffort, touched: int | None
) -> list[Timing]:
    # The first calls compile and tune.
    outputs = [_bytes(call(*first)) for call in contenders]
    torch.cuda.synchronize()
    # Else what earlier cases have left in torch's own cache would count as taken.
    torch.cuda.empty_cache()
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    held = _bytes(first) + sum(outputs)
    touched = _bytes(first) + min(outputs) if touched is None else touched
    buffers = [first]
    buffers += [make() for _ in range(number_of_sets(touched, held, cache, torch.cuda.mem_get_info()[0]) - 1)]
    repeats = [_gpu_repeats(call, buffers, effort) for call in contenders]
    # One that cannot be captured puts all of them on the slower footing: they stay comparable.
    method = "events" if any(_waits(call, first) for call in contenders) else "graph"
    prepare = _captured if method == "graph" else _looped
    runs = [prepare(call, buffers, count) for call, count in zip(contenders, repeats, strict=True)]
    spans = [_timed(run) for run in runs]
    rounds = min(effort.rounds(span) for span in spans)
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in runs]
    # Nothing waits for the GPU in between, so that it is never idle when a sample begins; the first round fills it.
    for turn in range(rounds + 1):
        for taken, run in zip(events, runs, strict=True):
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            run()
            pair[1].record()
            if turn:
                taken.append(pair)
    torch.cuda.synchronize()
    return [
        Timing(tuple(start.elapsed_time(end) / 1e3 / count for start, end in taken), method)
        for taken, count in zip(events, repeats, strict=True)
    ]


def _gpu_repeats(call: Call, buffers: Sequence[Inputs], effort: TimingEffort) -> int:
    estimate = _timed(_looped(call, buffers, 1))
    if estimate < effort.sample_seconds:
        estimate = min(_timed(_looped(call, buffers, 3)) / 3 for _ in range(2))
    wanted = effort.repeats(estimate)
    if wanted == 1:
        return 1
    # Whole rounds over the buffers, so that each is used equally often.
    return math.ceil(wanted / len(buffers)) * len(buffers)


def _waits(call: Call, inputs: Inputs) -> bool:
    """Whether a call waits for the GPU, which cannot be captured. Found out before, since a capture that fails leaves
    torch's allocator and generators as if it still went on."""
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode calls itself a prototype
            torch.cuda.set_sync_debug_mode("error")
            call(*inputs)
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return False


def _timed(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return max(start.elapsed_time(end), 1e-4) / 1e3


def _looped(call: Call, buffers: Sequence[Inputs], repeats: int) -> Callable[[], object]:
    def run() -> None:
        # As many outputs are alive at once as there are sets, so that writes are rotated like reads.
        kept: deque[Any] = deque(maxlen=len(buffers))
        for index in range(repeats):
            kept.append(call(*buffers[index % len(buffers)]))

    return run


def _captured(call: Call, buffers: Sequence[Inputs], repeats: int) -> Callable[[], object]:
    run = _looped(call, buffers, repeats)
    with capture() as graph:
        run()
    return graph.replay


def _bytes(made: Any) -> int:
    """Of the tensors in it, also in tuples and dataclasses."""
    if isinstance(made, Tensor):
        return made.nbytes
    if is_dataclass(made):
        return sum(_bytes(getattr(made, field.name)) for field in fields(made))
    return sum(_bytes(each) for each in made) if isinstance(made, tuple) else 0


def cpu_cache_bytes() -> int:
    """The last-level cache of the first core, from the kernel; 32 MiB where it does not say."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text(encoding="ascii").strip()
    except OSError:
        return 32 * 2**20
    return int(text.removesuffix("K")) * 1024 if text.endswith("K") else 32 * 2**20


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
