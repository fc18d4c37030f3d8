"""Memory that comes and goes while an engine serves: its cache grows, and it sleeps and wakes."""

import time
from collections.abc import Callable, Mapping

import torch
from torch import nn

from warpbus.bench.cases import Result, Run
from warpbus.bench.records import Parameter
from warpbus.bench.serving_engine import decode_while_growing
from warpbus.bench.serving_load import prompt_end, random_prompts
from warpbus.engine.engine import Engine
from warpbus.engine.kv_cache import token_bytes
from warpbus.engine.offload import OffloadableModel

_SHORTEST_PROMPT = 32
_ROUNDS = 3
_MOST_STEPS = 1000  # with few sequences the cache grows by less in them
_CYCLES, _QUICK_CYCLES = 5, 2
_SMALL_CYCLES, _SMALL_QUICK_CYCLES = 1000, 20
_SMALL_SIDE = 5792  # of a square matrix in 16 bits: 64 MiB
_COPIES = 5


def growth_rows(run: Run, engine: Engine, parameters: Mapping[str, Parameter], grown: int) -> list[Result]:
    """The longest step while a full batch decodes and its cache grows by `grown` bytes, beside the median step."""
    config, rows = engine.model.config, engine.max_num_seqs
    per_token = token_bytes(config, engine.dtype, "auto")
    tokens = min(-(-grown // (per_token * rows)) + 8, _MOST_STEPS, engine.max_model_len - 2 * _SHORTEST_PROMPT)
    # Prompts of all lengths: else all would want their next blocks in the same steps.
    drawn = random_prompts(rows, 2 * _SHORTEST_PROMPT, config.vocab_size, 4, prompt_end(config))
    prompts = [each[_SHORTEST_PROMPT - at % _SHORTEST_PROMPT :] for at, each in enumerate(drawn)]
    found = [decode_while_growing(engine, prompts, tokens) for _ in range(1 if run.quick else _ROUNDS)]
    for each in found:
        run.note(
            f"growth: {each.grown / 1e9:.2f} GB in {len(each.growing)} of {len(each.growing) + len(each.others)} steps "
            f"of {rows} sequences; median {1e3 * each.median:.2f} ms, longest {1e3 * each.longest:.2f} ms, longest "
            f"with growth {1e3 * max(each.growing, default=0.0):.2f} ms"
        )
    return [
        Result(
            parameters={**parameters, "task": "growth", "sequences": rows, "timed": "clock"},
            metric="latency",
            unit="ms",
            ours=[1e3 * each.longest for each in found],
            peers=[("the median step", "without growth", [1e3 * each.median for each in found])],
            floor=None,
        )
    ]


def sleep_rows(
    run: Run, engine: Engine, offloadable: OffloadableModel, parameters: Mapping[str, Parameter]
) -> list[Result]:
    """How fast a model's weights leave and come back, beside a copy between pinned memory and the device."""
    engine.sleep()  # takes main memory for the copy
    engine.wake()
    sleeping, waking = [], []
    for _ in range(_QUICK_CYCLES if run.quick else _CYCLES):
        sleeping.append(offloadable.nbytes / _seconds(engine.sleep) / 1e9)
        waking.append(offloadable.nbytes / _seconds(engine.wake) / 1e9)
    size = min(offloadable.nbytes, 2**30)
    kept = torch.empty(size, dtype=torch.uint8, pin_memory=run.on_gpu)
    place = torch.empty(size, dtype=torch.uint8, device=run.device)
    down = [size / _copy_seconds(run, place, kept) / 1e9 for _ in range(_COPIES)]
    up = [size / _copy_seconds(run, kept, place) / 1e9 for _ in range(_COPIES)]
    return [
        Result(
            parameters={**parameters, "task": task, "megabytes": offloadable.nbytes // 10**6, "timed": "clock"},
            metric="bandwidth",
            unit="GB/s",
            ours=ours,
            peers=[("a pinned copy" if run.on_gpu else "a copy", f"torch {torch.__version__}", copies)],
            floor=None,
        )
        for task, ours, copies in (("sleep", sleeping, down), ("wake", waking, up))
    ]


def cycle_rows(run: Run) -> list[Result]:
    """The GPU memory that stays in use after many cycles of a small model, as the driver counts it."""
    if not run.on_gpu:
        return []
    cycles = _SMALL_QUICK_CYCLES if run.quick else _SMALL_CYCLES
    small = nn.Linear(_SMALL_SIDE, _SMALL_SIDE, bias=False, device=run.device, dtype=torch.float16)
    offloadable = OffloadableModel(small)
    offloadable.sleep()
    offloadable.wake()
    before = torch.cuda.mem_get_info(run.device)[0]
    for _ in range(cycles):
        offloadable.sleep()
        offloadable.wake()
    after, total = torch.cuda.mem_get_info(run.device)
    run.note(
        f"{cycles:,} cycles of {offloadable.nbytes / 1e6:.0f} MB left {before - after:,} bytes less free than before"
    )
    return [
        Result(
            parameters={"task": "cycles", "cycles": cycles, "megabytes": offloadable.nbytes // 10**6},
            metric="memory",
            unit="GB",
            ours=[(total - after) / 1e9],
            peers=[("before", "used, by the driver", [(total - before) / 1e9])],
            floor=None,
        )
    ]


def _seconds(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _copy_seconds(run: Run, source: torch.Tensor, target: torch.Tensor) -> float:
    def copy() -> None:
        target.copy_(source)
        if run.on_gpu:
            torch.cuda.synchronize(run.device)

    return _seconds(copy)
