"""One training run of a model of random weights, in processes of its own, and a model that answers afterwards."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from warpbus.bench.decoders import decode_once
from warpbus.bench.train_plain import PlainModel
from warpbus.cuda.energy import EnergyMeter
from warpbus.dist import Group, Send
from warpbus.engine.engine import Engine
from warpbus.models import Decoder, ModelConfig, random_model
from warpbus.models.layers import QuantizedLinear
from warpbus.models.placement import round_onto
from warpbus.qtensor import Scheme
from warpbus.quantization.report import peak_memory
from warpbus.train import TrainingSettings
from warpbus.train.compiling import compile_layers
from warpbus.train.fp8 import use_fp8
from warpbus.train.lora import attach_lora
from warpbus.train.methods import FullMethod, LoraMethod, PrefixMethod, TrainingMethod
from warpbus.train.ptuning import TrainedPrefix
from warpbus.train.recompute import recompute_layers
from warpbus.train.sharding import clip_gradients, distribute

_WORDS = 61  # tokens that follow each other by a rule
_LEARNT_OVER = 0.25  # of the steps, the last ones: their loss is what was learnt
_PROMPT = 128


@dataclass(frozen=True)
class TrainBenchTask:
    """The settings of a run.

    Attributes:
        config: the model's shape.
        settings: as of `warpbus train`; the random weights are rounded to `quantize`.
        tf32: products of float32 are in TF32.
        plain: PyTorch's own layers do it, in place of ours; shared and computed again as those are.
        warm, steps: how many steps go before those that are timed, and how many those are.
    """

    config: ModelConfig
    settings: TrainingSettings
    tf32: bool
    plain: bool
    warm: int
    steps: int


@dataclass(frozen=True)
class ProcessMeasurement:
    """The measurements of one process.

    Attributes:
        seconds: of each timed step.
        loss: nats a token, the mean of the last steps.
        memory: bytes, the most that torch had allocated; on the CPU, the greatest resident size of the process.
        joules: of the timed steps; None where it was not measured.
    """

    seconds: tuple[float, ...]
    loss: float
    memory: int
    joules: float | None


def job(group: Group, send: Send, task: TrainBenchTask) -> None:
    """The job of each process; each sends its measurements as a `ProcessMeasurement`."""
    torch.set_float32_matmul_precision("high" if task.tf32 else "highest")
    device, settings = group.device, task.settings
    cuda = device.type == "cuda"
    module, compute = _built(task, group)
    trained = [each for each in module.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.learning_rate, betas=(0.9, 0.95), fused=cuda)
    rows = settings.rows_per_step // group.world

    def step(tokens: Tensor, targets: Tensor) -> float:
        """One step as `warpbus train` does it; reading the loss waits for the GPU."""
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
            loss = compute(tokens, targets)
        (loss / targets.numel()).backward()
        clip_gradients(trained, settings.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(group.sum(loss.detach().float())) / (targets.numel() * group.world)

    data = _batches(task.config, rows, settings.length, group.rank, device)
    batches = [next(data) for _ in range(task.warm + task.steps)]
    losses = [step(*batch) for batch in batches[: task.warm]]
    seconds = []
    group.barrier()
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    with EnergyMeter([device]) as meter:
        for batch in batches[task.warm :]:
            started = time.perf_counter()
            losses.append(step(*batch))
            if cuda:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
    last = losses[-max(1, math.ceil(_LEARNT_OVER * len(losses))) :]
    memory = torch.cuda.max_memory_allocated(device) if cuda else peak_memory()
    send(ProcessMeasurement(tuple(seconds), sum(last) / len(last), memory, meter.total))


def answer(group: Group, send: Send, config: ModelConfig, scheme: Scheme | None, tokens: int, rounds: int) -> None:
    """Sends the seconds per token of each round in which our engine generates with the trained model."""
    dtype = torch.bfloat16 if group.device.type == "cuda" else torch.float32
    engine = Engine(random_model(config, scheme, group.device, dtype), max_model_len=_PROMPT + tokens, max_num_seqs=1)
    engine.warm()
    decode_once(engine, _PROMPT, tokens)
    send([decode_once(engine, _PROMPT, tokens) / (tokens - 1) for _ in range(rounds)])


def _built(task: TrainBenchTask, group: Group) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """A module with what is trained, and what computes its loss."""
    settings = task.settings
    module = _plain(task, group.device) if task.plain else _ours(task, group.device)
    layers = module.layers if isinstance(module, PlainModel) else module.model.layers
    parallel = distribute(module, layers, settings, group)
    if isinstance(module, PlainModel):
        if settings.compile:
            module.compile_parts()
        return module, parallel
    if settings.compile:
        compile_layers(module.model.layers)
    shape = settings.rows_per_step // group.world, settings.length
    positions = torch.arange(settings.length, device=group.device).expand(shape)
    return module, lambda tokens, targets: parallel(tokens, targets, positions, None)  # each row is one document


def _ours(task: TrainBenchTask, device: torch.device) -> TrainingMethod:
    config, settings = task.config, task.settings
    model = random_model(config, None, device, _weights_dtype(settings), stacked=False)
    if settings.quantize is not None:
        _round(model, Scheme.parse(settings.quantize), device, _weights_dtype(settings))
    torch.manual_seed(0)  # of what is trained beside the weights: the same in every process
    made: TrainingMethod
    if settings.method == "full":
        made = FullMethod(model)
    elif settings.method == "lora":
        attach_lora(model, rank=settings.rank, alpha=settings.alpha)
        made = LoraMethod(model)
    else:
        first = np.arange(settings.prefix_tokens, dtype=np.int32)
        made = PrefixMethod(model, TrainedPrefix.beginning(model, first, settings.prefix_tokens))
    if settings.fp8:
        use_fp8(model)
    if settings.recompute:
        recompute_layers(model, settings.recompute)
    return made.train()


def _round(model: Decoder, scheme: Scheme, device: torch.device, dtype: torch.dtype) -> None:
    """Round the layers' matrices: the model is that of the other methods, but for the rounding."""
    for owner in list(model.layers.modules()):
        for name, linear in list(owner.named_children()):
            if isinstance(linear, nn.Linear):
                rounded = round_onto(linear.weight, scheme, device, dtype)
                bias = None if linear.bias is None else linear.bias.data
                setattr(owner, name, QuantizedLinear(rounded, bias, dtype=dtype))


def _plain(task: TrainBenchTask, device: torch.device) -> PlainModel:
    """The model of the peer, with the weights that ours has."""
    settings = task.settings
    source = random_model(task.config, None, device, _weights_dtype(settings), stacked=False)
    with torch.device("meta"):
        model = PlainModel(task.config)
    model.load_state_dict(source.state_dict(), assign=True)
    if settings.method == "lora":
        torch.manual_seed(0)
        model.attach_lora(settings.rank, settings.alpha)
    else:
        model.requires_grad_(True)
    if settings.recompute:
        model.recompute(settings.recompute)
    return model.train()


def _weights_dtype(settings: TrainingSettings) -> torch.dtype:
    """Weights that are trained are in float32."""
    return torch.bfloat16 if settings.method != "full" and settings.dtype == "bfloat16" else torch.float32


def _batches(
    config: ModelConfig, rows: int, length: int, rank: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens of which three in four follow from the one before, and what comes next; fresh ones each time."""
    generator = torch.Generator().manual_seed(1 + rank)
    words = min(_WORDS, config.vocab_size)
    while True:
        free = torch.randint(words, (rows, length + 1), generator=generator)
        bound = torch.rand(rows, length + 1, generator=generator) < 0.75
        row = free.numpy().copy()
        for at in range(1, length + 1):
            row[:, at] = np.where(bound[:, at].numpy(), (row[:, at - 1] * 3 + 1) % words, row[:, at])
        tokens = torch.from_numpy(row).to(device)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
