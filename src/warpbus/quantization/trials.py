"""Tries candidates on a few layers of a model and compares the error of the layer's outputs and their cost.

Calibration data passes through the unquantized layers up to a sample layer. There each candidate quantizes a copy of
the layer, and its outputs are compared with those of the original layer. Nothing is written. The layers before it are
not quantized, so errors are smaller than in a run; they only serve to compare candidates.
"""

import copy
import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from warpbus.cuda.cpu import cpu_model
from warpbus.cuda.devices import default_dtype, resolve_device
from warpbus.dist import Group
from warpbus.errors import SchemeError, UsageError
from warpbus.formats import Checkpoint
from warpbus.models import DecoderLayer, ModelConfig, read_config
from warpbus.models.layers import QuantizedLinear
from warpbus.qtensor import Scheme
from warpbus.quantization import unquantized
from warpbus.quantization.algorithms import rtn
from warpbus.quantization.calibration import Calibration
from warpbus.quantization.driver import read_data
from warpbus.quantization.layerwise import LayerQuantization
from warpbus.quantization.methods import METHODS, Method, Solved, suits
from warpbus.quantization.options import QuantizationOptions
from warpbus.quantization.preflight import Matrix, Plan, prepare
from warpbus.quantization.recommend import GOALS, Candidate, Recommendation, Trial, candidates
from warpbus.quantization.speed import token_times
from warpbus.quantization.states import States
from warpbus.quantization.statistics import DRIFT, Statistics
from warpbus.quantization.stopwatch import Stopwatch

Running = Callable[[ModelConfig, torch.dtype, Scheme], int]
"""Bytes that running a model takes whose activations have a dtype and whose layers have a scheme."""

# Tokens that candidates are calibrated on, and those that they are judged on. The same for both would favour algorithms
# that fit themselves to a few tokens.
_SEEN, _UNSEEN = 32768, 8192
_FP8_CAPABILITY = (8, 9)

# The stages that take longer with more tokens; all others of a layer depend on its shapes alone.
_WITH_TOKENS = ("forward", "statistics", "communication")


def try_candidates(
    model: str | Path,
    *,
    calibration: str | Path | Calibration,
    goal: str = "quality",
    memory: int | None = None,
    running: Running | None = None,
    scheme: Scheme | None = None,
    algorithm: str | None = None,
    options: QuantizationOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Recommendation:
    """Try candidates on the first, a middle and the last layer of a model, and choose one.

    Args:
        model: a model directory, not quantized.
        calibration: as `quantize` is going to be called; layers are tried on some of the sequences, see `split`.
        goal: one of `recommend.GOALS`.
        memory: bytes that running the model may take; `None`: any.
        running: says what that takes; without it, what the model takes on the disk.
        scheme: the only one to try; `None`: all of `recommend.candidates`.
        algorithm: the only one to try; `None`: all that fit.
        options: as `quantize` is going to be called, of which `format`, `samples`, `tokens`, `seqlen`, `seed` and
            `damping` apply. Schemes that the format cannot hold are left out. `device` is a single one.
        progress: called with the trials that are done, and all.

    Raises:
        UsageError: if an argument is wrong, or nothing fits.
        SchemeError: if the only scheme does not fit the model or the format.
        WarpbusError: as `quantize`.
    """
    if goal not in GOALS:
        raise UsageError(f"goal is {goal!r}: choose from {', '.join(GOALS)}")
    if scheme is not None and scheme.is_trellis:
        raise UsageError(
            f"{scheme}: gptq is the only algorithm for it, so there is nothing to compare: use --algorithm gptq"
        )
    device = resolve_device(options.device)
    tried = _plans(Path(model), scheme, algorithm, options.format, device)
    first = next(iter(tried.values()))
    data = read_data(first, calibration, options)
    trying = _Trying(data, device, default_dtype(device, first.dtype), options.damping)
    sampled = sample_layers(first.config.num_layers)
    found: dict[Candidate, list[_Tried]] = {candidate: [] for candidate in tried}
    walk = unquantized.layers(first, trying.seen, trying.unseen, device=device, dtype=trying.dtype, last=sampled[-1])
    for index, layer, (seen, unseen) in walk:
        if index not in sampled:
            continue
        outputs = [unquantized.output(layer, index, state) for state in unseen]
        for candidate, plan in tried.items():
            found[candidate].append(trying.one(index, layer, seen, unseen, outputs, candidate, plan))
            progress(sum(map(len, found.values())), len(tried) * len(sampled))
    schemes = list(dict.fromkeys(candidate.scheme for candidate in tried))
    # Matrices in FP4 are dequantized when a model is loaded.
    timed = [None if each.element is not None else each for each in schemes]
    measured = token_times(first.config, timed, device=device, dtype=trying.dtype)
    speeds = dict(zip(schemes, measured, strict=True))
    trials = [
        Trial(
            scheme=str(candidate.scheme),
            algorithm=candidate.algorithm,
            error=math.sqrt(statistics.fmean(each.squared_error for each in found[candidate])),
            nbytes=plan.bytes_after,
            memory=running(plan.config, trying.dtype, candidate.scheme) if running else plan.bytes_after,
            token_seconds=speeds[candidate.scheme].seconds,
            # The first to run on a device also waits for its libraries.
            seconds=plan.config.num_layers * statistics.median(each.seconds for each in found[candidate]),
            token_spread=speeds[candidate.scheme].spread,
        )
        for candidate, plan in tried.items()
    ]
    here = f"{cpu_model()}, threads: {torch.get_num_threads()}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else here
    return Recommendation.of(trials, model=str(model), device=name, goal=goal, memory=memory, layers=sampled)


def split(data: Calibration) -> tuple[Calibration, Calibration]:
    """The sequences for calibration, and every fourth one for evaluation; a single sequence is used for both."""
    if len(data.sequences) == 1:
        return data, data
    held = data.sequences[::4]
    kept = tuple(each for number, each in enumerate(data.sequences) if number % 4)
    return _first(kept, _SEEN), _first(held, _UNSEEN)


def _first(sequences: tuple[tuple[int, ...], ...], tokens: int) -> Calibration:
    """The first sequences, and as many as have so many tokens together; one at least."""
    ends = itertools.accumulate(map(len, sequences))
    return Calibration(tuple(each for each, end in zip(sequences, ends, strict=True) if end - len(each) < tokens))


def sample_layers(count: int) -> tuple[int, ...]:
    """The first, a middle and the last of so many layers."""
    return tuple(sorted({0, count // 2, count - 1}))


def _plans(
    model: Path, scheme: Scheme | None, algorithm: str | None, format: str, device: torch.device
) -> dict[Candidate, Plan]:
    """The candidates that device, model and format can do, with a plan for each."""
    config = read_config(Checkpoint(model))
    columns = tuple(dict.fromkeys(matrix.columns.length for _, matrix in config.matrices))
    fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY
    plans: dict[Scheme, Plan | None] = {}
    found = {}
    for candidate in candidates(columns, fp8=fp8, scheme=scheme):
        if algorithm not in (None, candidate.algorithm) or not suits(candidate.algorithm, config):
            continue
        if candidate.scheme not in plans:
            try:
                plans[candidate.scheme] = prepare(model, None, candidate.scheme, format)
            except SchemeError:
                if scheme is not None:
                    raise
                plans[candidate.scheme] = None
        plan = plans[candidate.scheme]
        if plan is not None:
            found[candidate] = plan
    if not found:
        wanted = "a scheme" if scheme is None else str(scheme)
        raise UsageError(f"no way to quantize to {wanted} by {algorithm or 'any algorithm'}: ask for auto in one place")
    return found


@dataclass(frozen=True)
class _Tried:
    """The result of a candidate on a layer: the mean over the tokens of |error|^2 / |output|^2, and the seconds that
    the layer would take with all of the calibration data."""

    squared_error: float
    seconds: float


class _Nearest(Method):
    """Round to nearest as `quantize` does it, without calibration."""

    needed = frozenset()

    @classmethod
    def fits(cls, scheme: Scheme) -> bool:
        return True

    def solve(self, layer: LayerQuantization, matrix: Matrix, statistics: Statistics) -> Solved:
        weight = rtn(layer.weight(matrix), matrix.scheme, scale_dtype=layer.scale_dtype, name=matrix.name)
        return Solved(weight, error=0.0)


class _Trying:
    """Tries candidates on layers of one model, on one device."""

    def __init__(self, data: Calibration, device: torch.device, dtype: torch.dtype, damping: float) -> None:
        self.seen, self.unseen = split(data)
        self._times = data.tokens / self.seen.tokens
        self._group = Group(0, 1, device)
        self._damping = damping
        self.dtype = dtype

    @torch.no_grad()
    def one(
        self,
        index: int,
        layer: DecoderLayer,
        seen: list[States],
        unseen: list[States],
        outputs: list[Tensor],
        candidate: Candidate,
        plan: Plan,
    ) -> _Tried:
        """Calibrate a copy of a layer on `seen`, and compare its outputs for `unseen` with the given ones."""
        # A new one each time: what a method keeps from layer to layer, graphs and their memory, is not worth it here.
        method: Method = METHODS.get(candidate.algorithm, _Nearest)()
        watch = Stopwatch(self._group.device)
        changed = copy.deepcopy(layer)
        own = [replace(state, original=state.x if DRIFT in method.needed else None) for state in seen]
        through = LayerQuantization(
            changed,
            index,
            own,
            method.needed,
            group=self._group,
            watch=watch,
            keep=False,
            matrices=plan.layer(index),
            scale_dtype=plan.scale_dtype,
            damping=self._damping,
        )
        through.quantize(method)
        if candidate.scheme.activations is not None:  # the activations are rounded, too
            for linear, weight in through.quantized.items():
                if layer.spec.matrix(linear).dequantized:
                    continue
                _replace(changed, linear, QuantizedLinear(weight, _bias(changed, linear), dtype=self.dtype))
        after = [unquantized.output(changed, index, state) for state in unseen]
        times = 0.0 if candidate.algorithm == "rtn" else self._times
        seconds = [took * times if name in _WITH_TOKENS else took for name, took in watch.seconds.items()]
        return _Tried(unquantized.squared_error(after, outputs, unseen), sum(seconds))


def _bias(layer: DecoderLayer, linear: str) -> Tensor | None:
    module = layer.get_submodule(linear)
    assert isinstance(module, nn.Linear)
    return module.bias


def _replace(layer: DecoderLayer, linear: str, module: nn.Module) -> None:
    parent, _, name = linear.rpartition(".")
    setattr(layer.get_submodule(parent), name, module)
