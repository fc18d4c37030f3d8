"""`serving`: many requests at once, in this process or over HTTP, beside transformers' continuous batching."""

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

import warpbus
from warpbus.bench import serving_http
from warpbus.bench.cases import Benchmark, Plot, Progress, Result, Run, Task, distribution
from warpbus.bench.options import ServingBenchOptions
from warpbus.bench.records import Parameter
from warpbus.bench.serving_engine import drive
from warpbus.bench.serving_floors import ServingFloors
from warpbus.bench.serving_load import Figures, Load, closed, poisson, prompt_end, quantile
from warpbus.bench.serving_memory import cycle_rows, growth_rows, sleep_rows
from warpbus.bench.serving_peer import transformers_figures
from warpbus.bench.serving_plot import serving_figure, serving_finding
from warpbus.bench.serving_rows import PeerFigures, closed_rows, host_rows, open_rows
from warpbus.cuda.devices import default_dtype
from warpbus.cuda.dtype_names import rounds_activations, short_name
from warpbus.engine.engine import Engine
from warpbus.engine.kv_cache import token_bytes
from warpbus.engine.offload import OffloadableModel
from warpbus.errors import UsageError
from warpbus.models import SHAPES, ModelConfig, random_model
from warpbus.models.layers.activation_dtype import round_activations
from warpbus.qtensor import Scheme

SMALL = "small"
"""A shape for a look without a GPU."""

SMALL_SHAPE = replace(
    SHAPES["chatglm2-6b"].resized(hidden_size=512, num_layers=4, num_heads=8, head_dim=64, ffn_size=1408),
    vocab_size=2048,
    rope=replace(SHAPES["chatglm2-6b"].rope, rotary_dim=32),
    max_context=2048,
)
_VOCABULARY = 256  # token ids that every model has
_ROUNDS = 2
_LEAST_REQUESTS = 4
_MOST_REQUESTS = 4096


@dataclass(frozen=True)
class ServingEffort:
    """How much is measured where nothing is asked for.

    Attributes:
        concurrency: clients of the closed loops.
        rates: of the open loops, as shares of the rate at which the largest closed loop's requests were answered.
        prompt, tokens: of a request.
        seconds: for which requests arrive in an open loop.
        grown: bytes by which the cache grows.
    """

    concurrency: tuple[int, ...]
    rates: tuple[float, ...]
    prompt: int
    tokens: int
    seconds: float
    grown: int


FULL = ServingEffort((1, 16, 64, 256), (0.25, 0.5, 0.8), 512, 128, 8.0, 10**9)
QUICK = ServingEffort((1, 16), (0.5,), 512, 32, 3.0, 10**8)
LITTLE = ServingEffort((1, 4), (0.5,), 32, 8, 2.0, 10**6)
"""On the CPU."""


def serving_benchmark(work: ServingBenchOptions, progress: Progress = lambda what, done, total: None) -> Benchmark:
    """The benchmark of some work; `progress` is called for each load."""
    over_http = work.url is not None or work.serve is not None
    return Benchmark(
        "serving-http" if over_http else "serving",
        "Serving many requests over HTTP" if over_http else "Serving many requests with a model of random weights",
        lambda run: _cases(run, work, progress),
        Plot(x=None, figure=serving_figure, finding=serving_finding),
        takes=(),
    )


def _cases(run: Run, work: ServingBenchOptions, progress: Progress) -> list[Task]:
    """One piece of work: the open loops' rates come of the closed ones."""
    if work.url is not None and work.serve is not None:
        raise UsageError("--url and --serve: give one of them")
    over_http = work.url is not None or work.serve is not None
    if rounds_activations(work.activation_dtype) and over_http:
        raise UsageError("--activation-dtype: a server has its own options: leave it out")
    if over_http and work.shape is not None:
        raise UsageError("--shape: a server has its own model: leave it out")
    shapes = {**SHAPES, SMALL: SMALL_SHAPE}
    shape = work.shape or ("chatglm2-6b" if run.on_gpu else SMALL)
    if shape not in shapes:
        raise UsageError(f"--shape {shape}: there is no such shape: choose among {', '.join(shapes)}")
    effort = _effort(run, work)
    config = shapes[shape]
    for option, value, least in (("prompt", effort.prompt, 1), ("tokens", effort.tokens, 2)):
        if value < least:
            raise UsageError(f"--{option} {value}: it has to be at least {least}")
    if not over_http and effort.prompt + effort.tokens > config.max_context:
        raise UsageError(
            f"--prompt {effort.prompt} with --tokens {effort.tokens}: the context of {shape} is {config.max_context:,}"
        )
    if over_http:
        return [partial(_over_http, run, work, effort, progress)]
    return [partial(_in_process, run, work, effort, shape, config, Scheme.parse(work.scheme), progress)]


def _effort(run: Run, work: ServingBenchOptions) -> ServingEffort:
    chosen = LITTLE if not run.on_gpu else QUICK if run.quick else FULL
    return replace(
        chosen,
        concurrency=work.concurrency or chosen.concurrency,
        rates=work.rates or chosen.rates,
        prompt=chosen.prompt if work.prompt is None else work.prompt,
        tokens=chosen.tokens if work.tokens is None else work.tokens,
    )


@dataclass(frozen=True)
class _Loads:
    """The loads of a run: every one has prompts of its own, lest they be found in the cache."""

    effort: ServingEffort
    vocabulary: int
    end: Sequence[int] = ()

    def closed(self, concurrency: int, seed: int) -> Load:
        return closed(max(_LEAST_REQUESTS, concurrency), concurrency, **self._prompts(seed))

    def open(self, rate: float, seed: int) -> Load:
        count = min(_MOST_REQUESTS, max(_LEAST_REQUESTS, round(rate * self.effort.seconds)))
        return poisson(count, rate, **self._prompts(seed))

    def _prompts(self, seed: int) -> dict[str, Any]:
        prompt, tokens = self.effort.prompt, self.effort.tokens
        return {"prompt": prompt, "tokens": tokens, "vocabulary": self.vocabulary, "seed": seed, "end": self.end}


def _in_process(
    run: Run,
    work: ServingBenchOptions,
    effort: ServingEffort,
    shape: str,
    config: ModelConfig,
    scheme: Scheme,
    progress: Progress,
) -> list[Result]:
    dtype = default_dtype(run.device, torch.float16)
    floors = ServingFloors.measured(config, scheme, dtype, run.device) if run.on_gpu else None
    _release(run)
    rounded = rounds_activations(work.activation_dtype)
    variant = f"{scheme}, {work.activation_dtype} activations" if rounded else str(scheme)
    base: dict[str, Parameter] = {
        "level": "engine",
        "shape": shape,
        "dtype": short_name(dtype),
        "variant": variant,
        "prompt": effort.prompt,
        "generated": effort.tokens,
    }
    named: dict[str, Parameter] = {"shape": shape, "dtype": short_name(dtype), "variant": variant}
    progress("making the model", 0, 1)
    model = random_model(config, scheme, run.device, dtype)
    round_activations(model, work.activation_dtype)
    offloadable = OffloadableModel(model)
    most = max(effort.concurrency)
    engine = Engine(model, max_num_seqs=most, offloadable=offloadable)
    engine.warm(rows=most)
    loads = _Loads(effort, config.vocab_size, prompt_end(config))
    # Compilations and captures that a first load would still cause.
    drive(engine, replace(loads.closed(most, 10**6), tokens=2))
    measured = _measured(loads, partial(drive, engine), _rounds(run), progress)
    progress("growing", 0, 1)
    rows = growth_rows(run, engine, named, effort.grown)
    progress("sleeping", 0, 1)
    rows += sleep_rows(run, engine, offloadable, named)
    del engine, model, offloadable
    _release(run)
    rows += cycle_rows(run)
    _release(run)
    rival = _transformers(run, config, measured.loads[most], progress) if work.peer and run.on_gpu else None
    cached = token_bytes(config, dtype, "auto")
    return measured.rows(run, base, rivals={most: rival} if rival else {}, floors=floors, cached=cached) + rows


def _over_http(run: Run, work: ServingBenchOptions, effort: ServingEffort, progress: Progress) -> list[Result]:
    if not serving_http.HAS_HTTPX:
        raise UsageError("--url and --serve need httpx, which is missing: pip install httpx")
    with ExitStack() as serving:
        url = work.url
        if url is None:
            progress("starting the server", 0, 1)
            url = serving.enter_context(serving_http.served(str(work.serve), str(run.device)))
        url = url.rstrip("/")
        model = serving_http.first_model(url)
        end = model.prompt_end
        if effort.prompt <= len(end):
            raise UsageError(
                f"--prompt {effort.prompt}: those of {model.name} end in {len(end)} tokens of their own: give more"
            )
        base: dict[str, Parameter] = {
            "level": "http",
            "shape": model.name,
            "prompt": effort.prompt,
            "generated": effort.tokens,
        }
        loads = _Loads(effort, _VOCABULARY, end)
        send = partial(serving_http.drive, url, model.name)
        send(replace(loads.closed(max(effort.concurrency), 10**6), tokens=2))
        return _measured(loads, send, _rounds(run), progress).rows(run, base)


@dataclass
class _LoadResults:
    """The results of each load, a `Figures` for each round.

    Attributes:
        closed: by concurrency.
        opened: by the share of the rate of the largest closed loop: the arrivals a second, and what came of them.
        loads: the last of each closed loop.
    """

    closed: dict[int, list[Figures]]
    opened: dict[float, tuple[float, list[Figures]]]
    loads: dict[int, Load]

    def rows(
        self,
        run: Run,
        base: dict[str, Parameter],
        *,
        rivals: Mapping[int, PeerFigures] = MappingProxyType({}),
        floors: ServingFloors | None = None,
        cached: int = 0,
    ) -> list[Result]:
        """All rates and latencies.

        Args:
            base: their common settings.
            rivals: the other measured servers, by concurrency.
            floors: limits, where they are known.
            cached: bytes that a token takes in the cache, where the engine is in this process.
        """
        rows: list[Result] = []
        least = min(self.closed)
        alone = PeerFigures(f"warpbus, {least} at once", warpbus.__version__, self.closed[least])
        for concurrency, rounds in self.closed.items():
            load = self.loads[concurrency]
            requests, length = len(load.prompts), len(load.prompts[0]) + load.tokens
            parameters = {**base, "load": "closed", "concurrency": concurrency, "requests": requests}
            rows += closed_rows(
                parameters,
                rounds,
                [alone, *([rivals[concurrency]] if concurrency in rivals else [])],
                requests=requests,
                tokens=load.tokens,
                floor=None if floors is None else floors.closed(load),
                step_floor=None if floors is None else floors.step(min(concurrency, requests), length),
            )
            hosts = [each.host for each in rounds if each.host is not None]
            if hosts:
                rows += host_rows(parameters, hosts, cached * min(concurrency, requests) * length)
            _say(run, f"closed loop, {concurrency} at once", rounds)
        for share, (rate, rounds) in self.opened.items():
            parameters = {**base, "load": "open", "rate": share}
            rows += open_rows(parameters, rounds, [alone], rate)
            _say(run, f"open loop, {rate:.2f} requests/s", rounds)
        return rows


def _measured(loads: _Loads, send: Callable[[Load], Figures], rounds: int, progress: Progress) -> _LoadResults:
    """Send all loads, the largest closed loop last of the closed ones."""
    effort, seed = loads.effort, 0
    found = _LoadResults({}, {}, {})
    total = rounds * len(effort.concurrency) + len(effort.rates)
    for concurrency in sorted(effort.concurrency):
        for _ in range(rounds):
            progress(f"{concurrency} at once", seed, total)
            seed += 1
            found.loads[concurrency] = load = loads.closed(concurrency, seed)
            found.closed.setdefault(concurrency, []).append(send(load))
    fastest = statistics.median(each.requests_per_second for each in found.closed[max(found.closed)])
    for share in effort.rates:
        progress(f"{share:g} of that rate", seed, total)
        seed += 1
        load = loads.open(share * fastest, seed)
        found.opened[share] = len(load.prompts) / load.arrivals[-1], [send(load)]
    progress("all loads", total, total)
    return found


def _say(run: Run, load: str, rounds: Sequence[Figures]) -> None:
    """Figures that no row has: shares, of the last round."""
    last = rounds[-1]
    said = [f"{last.tokens_per_second:,.0f} tokens/s"]
    if last.between_tokens:
        middle, late = (quantile(last.between_tokens, share) for share in (0.5, 0.99))
        said.append(f"between tokens p99 {late / middle:.1f} x p50")
    if last.host is not None:
        host = last.host
        said.append(
            f"{host.steps} steps, of which scheduling was {100 * host.planning / host.stepping:.1f} % and launching "
            f"{100 * host.launching / host.stepping:.1f} %; {host.preemptions} preemptions"
        )
    run.note(f"{load}: {', '.join(said)}")


def _transformers(run: Run, config: ModelConfig, load: Load, progress: Progress) -> PeerFigures | None:
    version = distribution("transformers")
    if version is None:
        run.note("transformers is not installed: it was not measured")
        return None
    progress("transformers", 0, 1)
    try:
        figures, attention = transformers_figures(config, run.device, load)
    except Exception as error:  # out of memory, or whatever that library and those below it raise
        said = str(error).strip().splitlines() or [""]
        run.note(f"transformers was left out: it does not work here ({type(error).__name__}: {said[0][:200]}).")
        return None
    run.note(f"transformers, bfloat16, attention {attention}: {figures.tokens_per_second:,.0f} tokens/s")
    return PeerFigures("transformers", version, [figures])


def _rounds(run: Run) -> int:
    return 1 if run.quick or not run.on_gpu else _ROUNDS


def _release(run: Run) -> None:
    """Let the next one have the memory."""
    gc.collect()
    if run.on_gpu:
        torch.cuda.empty_cache()
