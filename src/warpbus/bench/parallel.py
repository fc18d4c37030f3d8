"""`parallel`: how long a token of one sequence takes when several GPUs share a model."""

import statistics
from collections.abc import Mapping
from functools import partial

import torch

import warpbus
from warpbus.bench.cases import Benchmark, Plot, Progress, Result, Run, Task
from warpbus.bench.ceilings import copy_bandwidth
from warpbus.bench.decode import step_bytes
from warpbus.bench.decoders import decode_once
from warpbus.bench.findings import scaling
from warpbus.bench.options import ParallelBenchOptions
from warpbus.bench.serving import SMALL, SMALL_SHAPE
from warpbus.cuda.dtype_names import short_name
from warpbus.dist import SHARES, Group, Send, launch
from warpbus.engine.engine import Engine
from warpbus.errors import UsageError
from warpbus.models import SHAPES, ModelConfig, random_model
from warpbus.qtensor import Scheme

_PROMPT = 128
_TOKENS, _QUICK_TOKENS = 128, 16
_ROUNDS, _QUICK_ROUNDS = 5, 2


def parallel_benchmark(work: ParallelBenchOptions, progress: Progress = lambda what, done, total: None) -> Benchmark:
    """The benchmark of some work; `progress` is called for each number of GPUs."""
    return Benchmark(
        "parallel",
        "One sequence with a model of random weights that several GPUs share",
        lambda run: _cases(run, work, progress),
        Plot(x=None, finding=scaling),
        takes=(),
    )


def _cases(run: Run, work: ParallelBenchOptions, progress: Progress) -> list[Task]:
    shapes = {**SHAPES, SMALL: SMALL_SHAPE}
    shape = work.shape or ("glm-4-9b" if run.on_gpu else SMALL)
    if shape not in shapes:
        raise UsageError(f"--shape {shape}: there is no such shape: choose among {', '.join(shapes)}")
    for option, value, least in (("layers", work.layers, 1), ("tokens", work.tokens, 2)):
        if value is not None and value < least:
            raise UsageError(f"--{option} {value}: it has to be at least {least}")
    if run.device.index:
        raise UsageError(f"--device {run.device}: GPUs are taken from the first one on: leave the number out")
    config = shapes[shape].resized(num_layers=work.layers)
    most = torch.cuda.device_count() if run.on_gpu else SHARES
    counts = work.counts or tuple(count for count in (1, 2, 4, 8) if count <= (most if run.on_gpu else 2))
    for count in counts:
        if not 1 <= count <= most:
            raise UsageError(f"--gpus {count}: give numbers from 1 to {most}")
    if work.expert_parallel and not config.has_experts:
        raise UsageError(f"--expert-parallel: {shape} has no experts: choose the --shape of a mixture of experts")
    tokens = work.tokens or (_TOKENS if run.on_gpu and not run.quick else _QUICK_TOKENS)
    if _PROMPT + tokens > config.max_context:
        raise UsageError(f"--tokens {tokens}: {shape} has room for {config.max_context - _PROMPT:,} after the prompt")
    scheme = None if work.scheme is None else Scheme.parse(work.scheme)
    return [partial(_measure, run, shape, config, scheme, counts, tokens, work.expert_parallel, progress)]


def _measure(
    run: Run,
    shape: str,
    config: ModelConfig,
    scheme: Scheme | None,
    counts: tuple[int, ...],
    tokens: int,
    expert_parallel: bool,
    progress: Progress,
) -> list[Result]:
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    alone: float | None = None
    if run.on_gpu:
        read = sum(step_bytes(config, scheme, dtype, _PROMPT + tokens // 2).values())
        alone = read / copy_bandwidth(run.device)
        torch.cuda.empty_cache()  # other processes work there from now on
    what = "GPUs" if run.on_gpu else "processes"
    rounds = _QUICK_ROUNDS if run.quick or not run.on_gpu else _ROUNDS
    taken: dict[int, list[float]] = {}
    for done, count in enumerate(counts):
        progress(f"{count} {what}", done, len(counts))
        devices = [torch.device("cuda", at) if run.on_gpu else run.device for at in range(count)]
        said: list[tuple[str, list[float]]] = []
        launch(job, (config, scheme, dtype, tokens, rounds, expert_parallel), devices=devices, receive=said.append)
        how, taken[count] = said[0]
        run.note(f"{how}: {1e3 * statistics.median(taken[count]):.2f} ms per token")
    progress(what, len(counts), len(counts))
    base = taken[counts[0]]
    parameters: Mapping[str, str | int] = {
        "shape": shape,
        "layers": config.num_layers,
        "variant": "none" if scheme is None else str(scheme),
        "dtype": short_name(dtype),
        "batch": 1,
        "prompt": _PROMPT,
        "generated": tokens,
        **({"experts": "whole"} if expert_parallel else {}),
    }
    name = f"warpbus, {counts[0]} {what if counts[0] > 1 else 'GPU' if run.on_gpu else 'process'}"
    return [
        Result(
            parameters={**parameters, what.lower(): count, "timed": "clock"},
            metric="latency",
            unit="ms",
            ours=[1e3 * seconds for seconds in taken[count]],
            peers=[(name, warpbus.__version__, [1e3 * seconds for seconds in base])],
            floor=None if alone is None else 1e3 * alone / count,
        )
        for count in counts
    ]


def job(
    group: Group,
    send: Send,
    config: ModelConfig,
    scheme: Scheme | None,
    dtype: torch.dtype,
    tokens: int,
    rounds: int,
    expert_parallel: bool = False,
) -> None:
    """The job of each process; the first one sends the way of exchange, and the seconds per token of each round."""
    model = random_model(config, scheme, group.device, dtype, group=group, expert_parallel=expert_parallel)
    engine = Engine(model, max_model_len=_PROMPT + tokens, max_num_seqs=1)
    engine.warm()
    decode_once(engine, _PROMPT, tokens)  # what is captured at a first call
    seconds = [decode_once(engine, _PROMPT, tokens) / (tokens - 1) for _ in range(rounds)]
    if group.is_first:
        send(((model.group or group).describe(), seconds))
