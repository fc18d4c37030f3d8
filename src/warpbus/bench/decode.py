"""`decode`: tokens per second of a whole model with random weights, one sequence, beside other ways to run it."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TypeVar

import torch

import warpbus
from warpbus.bench import decoders
from warpbus.bench.breakdown import breakdown, described, launches
from warpbus.bench.cases import Benchmark, Plot, Result, Run, Task, distribution
from warpbus.bench.ceilings import copy_bandwidth
from warpbus.bench.decoders import Generate, random_prompt
from warpbus.bench.footprint import measure_memory
from warpbus.cuda.dtype_names import short_name
from warpbus.engine.engine import Engine, request
from warpbus.errors import UsageError
from warpbus.models import SHAPES, Decoder, LayerSpec, MatrixSpec, ModelConfig, MoESpec, random_model
from warpbus.qtensor import Scheme

_SHAPE = "chatglm2-6b"
_SCHEME = "w4a16-g128"
_PROMPT = 128
_TOKENS, _QUICK_TOKENS = 256, 32
_ROUNDS, _QUICK_ROUNDS = 3, 2
_PROFILED_STEP = 3  # the first ones compile and capture

# Tokens that are read and generated, as in ChatGLM2-6B's README, and the GB that INT4 takes by it.
_TASKS = (("encode", 2048), ("generate", 8192))
_PUBLISHED = {"chatglm2-6b": (5.5, 5.1)}
# Bytes of the GPU's memory that we are also given to plan with.
_PLANNED = {"chatglm2-6b": 4_800_000_000}

_Made = TypeVar("_Made")

Peers = Callable[[int], Sequence[tuple[str, str, Generate]]]
"""From the tokens that are generated to the name and version of each peer, and what generates them."""


def _cases(run: Run) -> list[Task]:
    name = run.shape or _SHAPE
    if name not in SHAPES:
        raise UsageError(f"--shape {name}: there is no such shape: choose among {', '.join(SHAPES)}")
    sizes = run.choose_sizes((_TOKENS,), (_QUICK_TOKENS,))
    if min(sizes) < 2:
        raise UsageError(f"--size {min(sizes)}: give 2 or more tokens: the clock starts with the first")
    schemes = [Scheme.parse(each) for each in run.variants or (_SCHEME,)]
    tasks: list[Task] = []
    # Before anything else is on the GPU.
    if not run.quick:
        limits = [None, *([_PLANNED[name]] if name in _PLANNED else [])]
        tasks += [partial(_memory, run, name, scheme, limit) for scheme in schemes for limit in limits]
    peers = lru_cache(maxsize=1)(partial(_peers, run, SHAPES[name]))
    return tasks + [partial(_speed, run, name, scheme, tokens, peers) for tokens in sizes for scheme in schemes]


def _speed(run: Run, name: str, scheme: Scheme, tokens: int, peers: Peers) -> list[Result]:
    config, dtype = SHAPES[name], _dtype(run)
    model = random_model(config, scheme, run.device, dtype)
    beside = peers(tokens)
    ours = decoders.ours(model, _PROMPT + tokens)
    # Our first call captures graphs; the peers have had theirs.
    ours(_PROMPT, tokens)
    own: list[float] = []
    samples: dict[str, list[float]] = {name: [] for name, _, _ in beside}
    for _ in range(_QUICK_ROUNDS if run.quick else _ROUNDS):
        own.append((tokens - 1) / ours(_PROMPT, tokens))
        for peer, _, generate in beside:
            if peer not in samples:
                continue
            seconds = _tried(run, peer, partial(generate, _PROMPT, tokens))
            if seconds is None:
                del samples[peer]
            else:
                samples[peer].append((tokens - 1) / seconds)
    if run.profile:
        run.note(_profile(run, model, scheme))
    read = sum(step_bytes(config, scheme, dtype, _PROMPT + tokens // 2).values())
    result = Result(
        parameters={
            "shape": name,
            "batch": 1,
            "prompt": _PROMPT,
            "generated": tokens,
            "dtype": short_name(dtype),
            "variant": str(scheme),
            "timed": "clock",
        },
        metric="speed",
        unit="tokens/s",
        ours=own,
        peers=[(peer, version, samples[peer]) for peer, version, _ in beside if peer in samples],
        floor=copy_bandwidth(run.device) / read,
    )
    return [result]


def _peers(run: Run, config: ModelConfig, tokens: int) -> list[tuple[str, str, Generate]]:
    """Those that work here."""
    dtype, length = _dtype(run), _PROMPT + tokens

    def unquantized() -> Generate:
        return decoders.ours(random_model(config, None, run.device, dtype), length)

    makers: list[tuple[str, str, Callable[[], Generate]]] = [
        (f"warpbus, {short_name(dtype)}", warpbus.__version__, unquantized),
        ("torch.compile, int4", torch.__version__, partial(decoders.Plain, config, length, run.device)),
    ]
    if not run.quick:
        version = distribution("transformers") or "none"
        makers.append(("transformers", version, partial(decoders.transformers, config, run.device)))
    found = []
    for name, version, make in makers:
        generate = _tried(run, name, partial(_ready, make, tokens))
        if generate is not None:
            found.append((name, version, generate))
    return found


def _ready(make: Callable[[], Generate], tokens: int) -> Generate:
    """Compiles for just these lengths."""
    generate = make()
    generate(_PROMPT, tokens)
    return generate


def _tried(run: Run, name: str, attempt: Callable[[], _Made]) -> _Made | None:
    """The peer that an attempt returns; None, with a note of the reason, if the attempt fails."""
    try:
        return attempt()
    except Exception as error:  # not installed, out of memory, or whatever the compilers below torch raise
        said = str(error).strip().splitlines() or [""]
        run.note(f"{name} was left out: it does not work here ({type(error).__name__}: {said[0][:200]}).")
        return None


def _memory(run: Run, name: str, scheme: Scheme, limit: int | None) -> list[Result]:
    (_, encode), (_, generate) = _TASKS
    used = measure_memory(name, scheme, _dtype(run), run.device, encode=encode, generate=generate, limit=limit)
    published = _PUBLISHED.get(name)
    planned = "no limit" if limit is None else f"planned for {limit / 1e9:g}GB"
    results = []
    for at, (task, tokens) in enumerate(_TASKS):
        taken = used[at] / 1e9
        run.note(f"{scheme}, {planned}, memory by the driver's account: {task} {tokens:,} tokens {taken:.2f} GB")
        if published is not None:
            results.append(
                Result(
                    parameters={
                        "shape": name,
                        "task": task,
                        "tokens": tokens,
                        "memory": planned,
                        "dtype": short_name(_dtype(run)),
                        "variant": str(scheme),
                    },
                    metric="memory",
                    unit="GB",
                    ours=[taken],
                    peers=[("published", "INT4, README of ChatGLM2-6B", [published[at]])],
                    floor=None,
                )
            )
    return results


def _profile(run: Run, model: Decoder, scheme: Scheme) -> str:
    """Where the time of one token goes, as text."""
    config = model.config
    engine = Engine(model, max_model_len=_PROMPT + _TOKENS, max_num_seqs=1)
    prompt = random_prompt(config, _PROMPT)
    engine.add(request(prompt, tokens=_TOKENS))
    for _ in range(_PROFILED_STEP + 1):
        engine.step()
    found = launches(engine.step)
    of_each = step_bytes(config, scheme, _dtype(run), _PROMPT + _PROFILED_STEP + 1)
    least = {part: count / copy_bandwidth(run.device) * 1e6 for part, count in of_each.items()}
    layers = config.num_layers
    roles = {
        "wna16": [(part, least[part] / layers) for part in _parts(config)],
        "decode_attention": [("", least["attention"] / layers)],
        "hgemv": [("head", least["head"])],
    }
    return f"One token, {scheme}, by the profiler:\n{described(breakdown(found, roles))}"


def step_bytes(config: ModelConfig, scheme: Scheme | None, dtype: torch.dtype, context: int) -> dict[str, int]:
    """The bytes that one token of one sequence reads, by part of the model, over all layers."""

    def bits(k: int) -> float:
        return 8 * dtype.itemsize if scheme is None else scheme.bits_per_weight(k)

    read = dict.fromkeys(_parts(config), 0)
    for index, matrix in config.matrices:
        rows, columns = matrix.shape
        width = 8 * dtype.itemsize if matrix.dequantized else bits(columns)
        read[_part(matrix)] += int(rows * columns * width / 8 * _use(config.layers[index], matrix))
    read["attention"] = sum(layer.attention.cache_entry.size for layer in config.layers) * context * dtype.itemsize
    read["head"] = config.vocab_size * config.hidden_size * dtype.itemsize
    return read


def _parts(config: ModelConfig) -> tuple[str, ...]:
    """The matrices of the layers, as the reports call them."""
    return tuple(dict.fromkeys(_part(matrix) for _, matrix in config.matrices))


def _use(layer: LayerSpec, matrix: MatrixSpec) -> float:
    """The share of tokens that are multiplied with a matrix: an expert has its share of them on average."""
    if matrix.expert is None or not isinstance(layer.mlp, MoESpec):
        return 1.0
    return layer.mlp.router.top_k / layer.mlp.router.experts


def _part(matrix: MatrixSpec) -> str:
    return matrix.name.rpartition(".")[2]


def _dtype(run: Run) -> torch.dtype:
    return run.dtype or torch.float16


DECODE = Benchmark(
    name="decode",
    title="Generating with a whole model of random weights, one sequence",
    cases=_cases,
    plot=Plot(x=None, panels=("task",)),
    takes=("variants", "dtype", "shape", "profile"),
    needs_gpu=True,
)
