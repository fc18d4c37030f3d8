"""What a run is going to need, by the number of GPUs: memory and time, reckoned without loading a weight."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from warpbus.models import ModelConfig
from warpbus.train.inputs import Inputs
from warpbus.train.memory import Estimate, training_memory
from warpbus.train.settings import TrainingSettings

COUNTS = (1, 2, 4, 8)
_SIZE, _PRODUCTS = 8192, 10


@dataclass(frozen=True)
class Need:
    """What `gpus` GPUs need: bytes of each, and seconds, None where there is no GPU to tell."""

    gpus: int
    memory: Estimate
    seconds: float | None


@dataclass(frozen=True)
class Plan:
    """What a run is going to need.

    Attributes:
        steps, tokens: of the whole run.
        parameters, trained: numbers that the model has, and that are trained.
        flops_per_token: operations of the matrix products for a token that is trained on; see `flops_per_token`.
        device: the GPU that was measured; None without one.
        device_memory: its bytes.
        flops_per_second: that it does in large matrix products of the settings' dtype.
        needs: by numbers of GPUs that can share the rows of a step equally.
    """

    steps: int
    tokens: int
    parameters: int
    trained: int
    flops_per_token: int
    device: str | None
    device_memory: int | None
    flops_per_second: float | None
    needs: tuple[Need, ...]

    def to_json(self) -> dict[str, Any]:
        """All of it, with the total of each number of GPUs."""
        needs = [{**asdict(need), "memory": {**asdict(need.memory), "total": need.memory.total}} for need in self.needs]
        return {**asdict(self), "needs": needs}


def plan(
    model: Path,
    data: Path,
    settings: TrainingSettings,
    device: torch.device,
    *,
    workers: int = 1,
    counts: Sequence[int] = COUNTS,
) -> Plan:
    """Reckon a run's memory and time.

    The time is that of the matrix products at the rate that this GPU reaches in large ones: attention, norms, the
    optimizer and what GPUs tell each other come on top.

    Args:
        model, data, settings, workers: as of `warpbus.train.train`.
        device: a GPU to measure; the CPU is not.
        counts: of GPUs.

    Raises:
        UsageError, CheckpointError, DataError: as of `warpbus.train.train`.
    """
    inputs = Inputs.read(model, data, settings, workers)
    settings, config = inputs.settings, inputs.config
    tokens = settings.steps * settings.rows_per_step * settings.length
    trained = training_memory(config, settings, scheme=inputs.scheme).gradients // torch.float32.itemsize
    flops = flops_per_token(config, settings, trained)
    rate = matmul_rate(device, settings.dtype) if device.type == "cuda" else None
    needs = tuple(
        Need(
            gpus,
            training_memory(config, settings, gpus, scheme=inputs.scheme),
            None if rate is None else tokens * flops / (rate * gpus),
        )
        for gpus in counts
        if settings.rows_per_step % gpus == 0
    )
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return Plan(
        steps=settings.steps,
        tokens=tokens,
        parameters=config.num_parameters,
        trained=trained,
        flops_per_token=flops,
        device=None if properties is None else properties.name,
        device_memory=None if properties is None else properties.total_memory,
        flops_per_second=rate,
        needs=needs,
    )


def flops_per_token(config: ModelConfig, settings: TrainingSettings, trained: int) -> int:
    """Operations of the matrix products for a token (Kaplan et al., 2020, arXiv:2001.08361): 6 for each weight.

    Two forward, two for the gradient of what goes in, two for that of the weight, which those that are not trained have
    not. A layer that is computed again takes two more. Looking up the embedding takes none.
    """
    head = config.vocab_size * config.hidden_size
    layers = config.num_parameters - head * (1 if config.tie_embeddings else 2)
    again = 2 * layers // settings.recompute if settings.recompute else 0
    if settings.method == "full":
        return 6 * (layers + head) + again
    beside = trained if settings.method == "lora" else 0
    return 4 * (layers + head) + 6 * beside + again


def matmul_rate(device: torch.device, dtype: str) -> float:
    """Operations a second of products of two matrices of 8,192 rows and columns on a GPU.

    Args:
        dtype: "bfloat16" or "float32"; the latter in TF32, as training has it.
    """
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        a, b = (torch.randn(_SIZE, _SIZE, device=device, dtype=kind) for _ in range(2))
        product = a @ b
        for warm in (True, False):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            for _ in range(3 if warm else _PRODUCTS):
                torch.mm(a, b, out=product)
            torch.cuda.synchronize(device)
    finally:
        torch.set_float32_matmul_precision(before)
    return 2 * _SIZE**3 * _PRODUCTS / (time.perf_counter() - start)
