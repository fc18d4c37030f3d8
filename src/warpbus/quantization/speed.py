"""Measures the time of a model's matrix products for one token in each scheme, before anything is quantized."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from warpbus.cuda.capture import GraphMemory, capture
from warpbus.kernels.ops.cpu_library import activations_in_8_bits
from warpbus.models import ModelConfig, random_model
from warpbus.models.layers.linear import project
from warpbus.models.layers.moe import MoE
from warpbus.qtensor import Scheme

_CPU_CACHE = 64 * 2**20  # bytes; torch does not tell a CPU's cache
_ROUNDS = 15
_SAMPLE_SECONDS = 0.02  # of each scheme in a round: enough for the clock, little enough for many rounds
_VOCABULARY = 64  # embedding and head are not measured


@dataclass(frozen=True)
class TokenTime:
    """The time of the matrix products of all layers for one token.

    Attributes:
        seconds: the minimum of all samples, because other programs can only make them slower.
        spread: the relative difference between the median and the minimum of the samples.
    """

    seconds: float
    spread: float


@torch.no_grad()
def token_times(
    config: ModelConfig, schemes: Sequence[Scheme | None], *, device: torch.device, dtype: torch.dtype
) -> list[TokenTime]:
    """Measure the schemes alternately in rounds, so that other programs affect all of them equally.

    The weights are random with the shapes of the model, and of so many layers that a matrix has left the cache before
    it is used again, as in the whole model. The layers are spread over the model, so that those with experts and those
    without have their shares of the time. The time of embedding, head, attention and norms is not included.

    Args:
        config: the model's shapes.
        schemes: of the matrices; `None`: they are in `dtype`. The layers of all of them are on the device together.
        device: where.
        dtype: of the activations.

    Raises:
        DeviceError: if the device cannot compute with a scheme.
    """
    steps = []
    for scheme in schemes:
        copies = _copies(config, scheme, device, dtype)
        steps.append((_step(config, scheme, copies, device, dtype), config.num_layers / copies))
    found: list[list[float]] = [[] for _ in steps]
    repeats = [max(1, math.ceil(_SAMPLE_SECONDS / max(_sample(run, 1, device), 1e-6))) for run, _ in steps]
    for _ in range(_ROUNDS):
        for (run, times), count, samples in zip(steps, repeats, found, strict=True):
            samples.append(_sample(run, count, device) * times)
    return [TokenTime(min(samples), statistics.median(samples) / min(samples) - 1) for samples in found]


def _step(
    config: ModelConfig, scheme: Scheme | None, copies: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], None]:
    """The products of one token with the matrices of so many random layers, ready to be run."""
    layers = tuple(config.layers[(2 * index + 1) * config.num_layers // (2 * copies)] for index in range(copies))
    shape = replace(config, layers=layers, vocab_size=_VOCABULARY, stop_ids=(), mtp=None)
    model = random_model(shape, scheme, device, dtype, int8_activations=activations_in_8_bits())
    products: list[Callable[[], object]] = []

    def token(features: int) -> torch.Tensor:
        return torch.randn(1, features, device=device).to(dtype)

    graphs = device.type == "cuda"
    for layer, spec in zip(model.layers, shape.all_layers, strict=True):
        mixture = layer.mlp if isinstance(layer.mlp, MoE) else None
        for matrix in spec.matrices:
            if mixture is None or not matrix.name.startswith("mlp."):
                products.append(partial(project, layer.get_submodule(matrix.name), token(matrix.columns.length)))
        if mixture is not None:  # only the experts of a token are computed, by kernels all together
            products.append(partial(mixture, token(spec.hidden_size)))
            graphs = graphs and mixture.stacked  # other experts are called by the host, which waits for the routing

    def step() -> None:
        for product in products:
            product()

    step()  # kernels are compiled at their first launch
    return _captured(step, device) if graphs else step


def _copies(config: ModelConfig, scheme: Scheme | None, device: torch.device, dtype: torch.dtype) -> int:
    """Layers of which a token reads twice the size of the cache, but no more than there are."""
    cache = _CPU_CACHE if device.type == "cpu" else torch.cuda.get_device_properties(device).L2_cache_size
    weights = sum(layer.active_weights for layer in config.layers) / config.num_layers
    bits = dtype.itemsize * 8 if scheme is None else scheme.bits
    return min(config.num_layers, math.ceil(2 * cache / (weights * bits / 8)))


def _captured(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The step as one CUDA graph, as the engine decodes: its kernels take less time than launching them one by one."""
    memory = GraphMemory(device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(memory.stream):
        step()
    torch.cuda.synchronize(device)
    with capture(memory) as graph:
        step()
    return graph.replay


def _sample(run: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Seconds of a run, the mean of so many."""
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / repeats
