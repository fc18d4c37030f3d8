"""How long the matrices of a model take for a token in a scheme, measured on a device before anything is quantized."""

import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from warpbus.cuda.capture import GraphMemory, capture
from warpbus.models import ModelConfig, random_model
from warpbus.models.layers.linear import project
from warpbus.qtensor import Scheme

_CPU_CACHE = 64 * 2**20  # bytes; torch does not tell a CPU's cache
_SAMPLES = 7
_SAMPLE_SECONDS = 0.02
_VOCABULARY = 64  # embedding and head are not measured


@torch.no_grad()
def token_seconds(config: ModelConfig, scheme: Scheme | None, *, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds that the matrices of all layers take for one token, one after the other: the best of some samples.

    The weights are random, of the model's true shapes, and of so many layers that a matrix has left the cache when its
    turn comes again, as in the whole model. Embedding, head, attention and norms, which quantization leaves as they
    are, come on top.

    Args:
        config: the model's shapes.
        scheme: of the matrices; `None`: they are in `dtype`.
        device: where.
        dtype: of the activations.

    Raises:
        DeviceError: if the device cannot compute with the scheme.
    """
    copies = _copies(config, scheme, device, dtype)
    shape = replace(config.resized(num_layers=copies), vocab_size=_VOCABULARY, stop_ids=())
    model = random_model(shape, scheme, device, dtype)
    pairs = []
    for index, matrix in shape.matrices:
        linear = model.layers[index].get_submodule(matrix.name)
        pairs.append((linear, torch.randn(1, matrix.columns.length, device=device).to(dtype)))

    def step() -> None:
        for linear, x in pairs:
            project(linear, x)

    step()  # kernels are compiled at their first launch
    run = _captured(step, device) if device.type == "cuda" else step
    return _best(run, device) * config.num_layers / copies


def _copies(config: ModelConfig, scheme: Scheme | None, device: torch.device, dtype: torch.dtype) -> int:
    """Layers that are twice the size of the cache, but no more than there are."""
    cache = _CPU_CACHE if device.type == "cpu" else torch.cuda.get_device_properties(device).L2_cache_size
    weights = sum(matrix.num_weights for matrix in config.layers[0].matrices)
    bits = dtype.itemsize * 8 if scheme is None else scheme.bits
    return min(config.num_layers, math.ceil(2 * cache / (weights * bits / 8)))


def _captured(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The same as one CUDA graph, as the engine decodes: launches from the host would take longer than the products."""
    memory = GraphMemory(device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(memory.stream):
        step()
    torch.cuda.synchronize(device)
    with capture(memory) as graph:
        step()
    return graph.replay


def _best(run: Callable[[], None], device: torch.device) -> float:
    """The least seconds of a run among some samples, each of as many runs as make it long enough to be timed."""

    def sample(repeats: int) -> float:
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - started) / repeats

    repeats = max(1, math.ceil(_SAMPLE_SECONDS / max(sample(1), 1e-6)))
    return min(sample(repeats) for _ in range(_SAMPLES))
