"""Programs on a remote GPU, beside the same programs on this machine's own: a training step, and decoding."""

import copy
import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpbus.bench.decode import step_bytes
from warpbus.bench.decoders import decode_once
from warpbus.bench.serving import SMALL, SMALL_SHAPE
from warpbus.cuda.capture import capture
from warpbus.engine.engine import Engine
from warpbus.models import SHAPES, random_model
from warpbus.pool import Gpu, connect
from warpbus.qtensor import Scheme

_COUNTED = ("operators", "batches", "round_trips", "bytes_sent", "bytes_received")


@dataclass(frozen=True)
class GptShape:
    """A GPT whose head is its embedding, as GPT-2 has it (Radford et al., 2019).

    Attributes:
        batch: sequences of a step, of `context` tokens each.
        autocast: products are in bfloat16.
    """

    vocabulary: int = 16384
    width: int = 768
    layers: int = 12
    heads: int = 12
    context: int = 512
    batch: int = 8
    autocast: bool = True


SMALL_GPT = GptShape(vocabulary=512, width=128, layers=2, heads=4, context=64, batch=4, autocast=False)


class _GptLayer(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.first, self.second = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    """Random weights, the same each time. From token ids `[b, t]` to scores `[b, t, vocabulary]`."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList(_GptLayer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.token.weight)


class Training:
    """A GPT that is trained on a device with AdamW as torch has it; each step reads its loss.

    Args:
        capturable: AdamW counts its steps on the device, so that they can be recorded.
    """

    def __init__(self, gpt: Gpt, shape: GptShape, device: torch.device, *, capturable: bool = False) -> None:
        self.gpt = copy.deepcopy(gpt).to(device)
        self.optimizer = torch.optim.AdamW(self.gpt.parameters(), lr=1e-4, capturable=capturable)
        self.shape, self.device = shape, device

    def step(self, number: int) -> float:
        """The loss of a step, whose tokens its number gives."""
        self.optimizer.zero_grad()
        return self.update(self.tokens(number).to(self.device)).item()

    def tokens(self, number: int) -> Tensor:
        """`[batch, context + 1]` on the CPU."""
        generator = torch.Generator().manual_seed(number)
        size = (self.shape.batch, self.shape.context + 1)
        return torch.randint(0, self.shape.vocabulary, size, generator=generator)

    def update(self, tokens: Tensor) -> Tensor:
        """Train on tokens of the device; the loss, on the device."""
        with self._precision():
            scores = self.gpt(tokens[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.shape.autocast else nullcontext()


Record: TypeAlias = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]
"""Records what a function does; gives what it gave, and what does it again."""


class RecordedTraining(Training):
    """Training whose steps are recorded after the first ones: from then on each step is one launch, or one message."""

    _STEPS_BEFORE = 3  # in which libraries load, and AdamW makes its moments

    def __init__(self, gpt: Gpt, shape: GptShape, device: torch.device, record: Record) -> None:
        super().__init__(gpt, shape, device, capturable=True)
        self._record = record
        self._before = self._STEPS_BEFORE
        self._recorded: tuple[Tensor, Tensor, Callable[[], None]] | None = None

    def step(self, number: int) -> float:
        if self._before:
            self._before -= 1
            return super().step(number)
        if self._recorded is None:
            tokens = self.tokens(number).to(self.device)
            self.optimizer.zero_grad()
            self._recorded = (tokens, *self._record(lambda: self.update(tokens)))
        tokens, loss, run = self._recorded
        tokens.copy_(self.tokens(number))
        run()
        return loss.item()


def as_graph(work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """A `Record` of a GPU of this machine: a CUDA graph."""
    with capture() as graph:
        result = work()
    return result, graph.replay


def as_program(gpu: Gpu) -> Record:
    """A `Record` of a GPU of a pool."""

    def record(work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        with gpu.record() as program:
            result = work()
        return result, program.run

    return record


def training(
    address: str, device: str | None, shape: dict[str, Any], steps: int, rounds: int, recorded: bool
) -> dict[str, Any]:
    """Seconds a step, after the same on a device of this machine, and what a step sends.

    Not in turns: once a process has a remote GPU, PyTorch computes gradients there, and on no GPU of its own.

    Args:
        device: this machine's; None measures the remote one alone.
        shape: a `GptShape`.
        steps: of a round.
        recorded: the remote steps are a program, and those of a GPU of this machine a CUDA graph.
    """
    wanted = GptShape(**shape)
    gpt = Gpt(wanted)
    parameters = sum(each.numel() for each in gpt.parameters())
    # Weights, gradients and Adam's two moments in float32; the rest is for what a step keeps, scores above all.
    memory = 16 * parameters + 40 * wanted.batch * wanted.context * (wanted.vocabulary + 40 * wanted.width) + 10**9
    seconds: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    if device is not None:
        seconds["local"], losses["local"] = _rounds(_training_here(gpt, wanted, device, recorded), steps, rounds)
        if device.startswith("cuda"):
            gc.collect()  # what was recorded holds itself
            torch.cuda.empty_cache()  # the lease needs as much
    with connect(address, memory=memory) as gpu:
        side = (
            RecordedTraining(gpt, wanted, gpu.device, as_program(gpu))
            if recorded
            else Training(gpt, wanted, gpu.device)
        )
        seconds["remote"], losses["remote"] = _rounds(side, steps, rounds)
        before = asdict(gpu.statistics)
        side.step(0)  # whose kinds of calls are all known
        counted = {each: asdict(gpu.statistics)[each] - before[each] for each in _COUNTED}
        usage = gpu.usage()
    return {"seconds": seconds, "losses": losses, "counted": counted, "parameters": parameters, "usage": usage}


def _training_here(gpt: Gpt, shape: GptShape, device: str, recorded: bool) -> Training:
    if recorded and device.startswith("cuda"):
        return RecordedTraining(gpt, shape, torch.device(device), as_graph)
    return Training(gpt, shape, torch.device(device))


def _rounds(side: Training, steps: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds a step of each round but the first, and all losses."""
    seconds, losses = [], []
    for turn in range(rounds + 1):
        started = time.perf_counter()
        losses += [side.step(turn * steps + number) for number in range(steps)]
        if turn:
            seconds.append((time.perf_counter() - started) / steps)
    return seconds, losses


def decode(
    address: str, device: str | None, shape: str, scheme: str, prompt: int, tokens: int, rounds: int, half: bool
) -> dict[str, Any]:
    """Seconds a token of our engine with random weights, in turns with the same engine on a device of this machine.

    Args:
        half: in bfloat16, which GPUs have; else in float32.
    """
    config = {**SHAPES, SMALL: SMALL_SHAPE}[shape]
    dtype = torch.bfloat16 if half else torch.float32
    read = sum(step_bytes(config, Scheme.parse(scheme), dtype, prompt + tokens).values())
    # A token reads everything except the embedding; the rest is for temporary tensors while weights are made.
    memory = 2 * read + 4 * config.vocab_size * config.hidden_size + (2 * 10**9 if shape != SMALL else 10**8)
    with connect(address, memory=memory) as gpu:
        devices = {"remote": gpu.device} | ({} if device is None else {"local": torch.device(device)})
        runs: dict[str, Callable[[], float]] = {}
        for name, each in devices.items():
            model = random_model(config, Scheme.parse(scheme), each, dtype)
            engine = Engine(model, max_model_len=prompt + tokens, max_num_seqs=1)
            engine.warm()
            runs[name] = partial(decode_once, engine, prompt, tokens)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        counted: dict[str, float] = {}
        for turn in range(rounds + 1):
            for name, run in runs.items():
                before = asdict(gpu.statistics)
                taken = run() / (tokens - 1)
                if turn:
                    seconds[name].append(taken)
                if name == "remote":
                    after = asdict(gpu.statistics)
                    counted = {each: (after[each] - before[each]) / tokens for each in _COUNTED}
    return {"seconds": seconds, "counted": counted}
