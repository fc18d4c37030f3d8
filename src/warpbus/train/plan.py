"""The needs of a training run, by the number of GPUs: memory and time, computed without loading a weight."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from warpbus.cuda.rates import matmul_rates
from warpbus.models import ModelConfig
from warpbus.models.cost import FILE_RATE, MemoryNeed, TimeRange, forward_flop
from warpbus.train.inputs import Inputs
from warpbus.train.memory import num_trained, training_memory
from warpbus.train.settings import TrainingSettings

COUNTS = (1, 2, 4, 8)

_SLOWDOWN = 2.2
"""How much longer a step takes than its products at most. The records in `benchmarks/results` are within it."""

_LAYER_SECONDS = 0.012  # that Python takes to launch a layer's forward and backward pass, at most
_START_SECONDS = 20.0  # starting the processes, loading libraries and compiling kernels
_FP8_SPEEDUP = 2.0  # of tensor cores, over 16 bits


@dataclass(frozen=True)
class TrainingNeed:
    """The needs of training on `gpus` GPUs: memory of each GPU, and time; None where there is no GPU to measure."""

    gpus: int
    memory: MemoryNeed
    time: TimeRange | None


@dataclass(frozen=True)
class TrainingPlan:
    """The needs of a run.

    Attributes:
        steps, tokens: of the whole run.
        parameters, trained: numbers that the model has, and that are trained.
        flops_per_token: operations of the matrix products for a token that is trained on; see `flops_per_token`.
        device: the GPU that was measured; None without one.
        flops_per_second: that it does in large matrix products of the settings' dtype.
        needs: by numbers of GPUs that can share the rows of a step equally.
    """

    steps: int
    tokens: int
    parameters: int
    trained: int
    flops_per_token: int
    device: str | None
    flops_per_second: float | None
    needs: tuple[TrainingNeed, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain types: bytes and seconds."""
        needs = [{**asdict(need), "memory": {**asdict(need.memory), "total": need.memory.total}} for need in self.needs]
        return {**asdict(self), "needs": needs}


def plan_training(
    model: Path,
    data: Path,
    settings: TrainingSettings,
    device: torch.device,
    *,
    workers: int = 1,
) -> TrainingPlan:
    """Compute a run's memory and time.

    Args:
        model, data, settings, workers: as of `warpbus.train.train`.
        device: a GPU to measure; the CPU is not.

    Raises:
        UsageError, CheckpointError, DataError: as of `warpbus.train.train`.
    """
    inputs = Inputs.read(model, data, settings, workers)
    settings, config = inputs.settings, inputs.config
    tokens = settings.steps * settings.rows_per_step * settings.length
    trained = num_trained(config, settings)
    flop = flops_per_token(config, settings, trained)
    rate, properties = None, None
    if device.type == "cuda":
        dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
        rate = matmul_rates(device, [dtype], tf32=True)[dtype]
        properties = torch.cuda.get_device_properties(device)
    available = None if properties is None else properties.total_memory
    needs = tuple(
        TrainingNeed(
            gpus,
            training_memory(config, settings, gpus, scheme=inputs.scheme, available=available),
            None if rate is None else training_time(config, settings, tokens * flop / rate, gpus),
        )
        for gpus in COUNTS
        if settings.rows_per_step % gpus == 0
    )
    return TrainingPlan(
        steps=settings.steps,
        tokens=tokens,
        parameters=config.num_parameters,
        trained=trained,
        flops_per_token=flop,
        device=None if properties is None else properties.name,
        flops_per_second=rate,
        needs=needs,
    )


def training_time(config: ModelConfig, settings: TrainingSettings, seconds: float, gpus: int) -> TimeRange:
    """How long a run takes, but for validation and for saving its state.

    Args:
        seconds: of all matrix products on one GPU, in the dtype of the settings.
        gpus: that share the work.
    """
    passes = settings.steps * -(-settings.rows_per_step // (settings.rows_at_once * gpus))
    busy = max(_SLOWDOWN * seconds / gpus, _LAYER_SECONDS * len(config.all_layers) * passes)
    files = 2 * torch.bfloat16.itemsize * config.num_parameters / FILE_RATE
    least = seconds / gpus / (_FP8_SPEEDUP if settings.fp8 else 1.0)
    return TimeRange(least, busy + files + _START_SECONDS)


def flops_per_token(config: ModelConfig, settings: TrainingSettings, trained: int) -> int:
    """FLOP of the matrix products for a token (Kaplan et al., 2020, arXiv:2001.08361): six for each weight.

    Two forward, two for the gradient of the input, and two for that of the weight unless it is frozen. A layer that is
    computed again takes two more.

    Args:
        trained: numbers that are trained, see `num_trained`.
    """
    forward = forward_flop(config)
    layers = sum(layer.active_weights for layer in config.all_layers)
    again = 2 * layers // settings.recompute if settings.recompute else 0
    if settings.method == "full":
        return 3 * forward + again
    beside = trained if settings.method == "lora" else 0
    return 2 * forward + 6 * beside + again
