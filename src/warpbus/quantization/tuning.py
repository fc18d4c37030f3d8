"""Tunes the scales of a quantized model on the predictions of the unquantized one, by gradient descent.

The algorithms minimize the error of one matrix after the other. Here all layers are quantized already, and the scales
of all their groups are trained together: the loss is the Kullback-Leibler divergence of the quantized model's
predictions from those of the unquantized model, over the calibration tokens (as in the second phase of EfficientQAT;
Chen et al., 2024). The integer codes and zero points stay, so the format of the files does.

One sequence in `HELD` is held back, from the algorithm too. The scales with the least divergence on these sequences
after any epoch are taken, and those of the algorithm if no epoch improves on them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from warpbus.dist import Group
from warpbus.errors import DataError
from warpbus.formats import FinishedParts
from warpbus.models import DecoderLayer, tensor_map
from warpbus.models.layers import make_norm
from warpbus.qtensor import QTensor
from warpbus.quantization.calibration import Calibration
from warpbus.quantization.output_parts import quantized_matrix, restore_kept, stored_layer
from warpbus.quantization.preflight import Plan
from warpbus.quantization.sources import Reading
from warpbus.quantization.states import States, embed

EPOCHS = 3
"""How often each sequence is trained on."""

HELD = 16
"""One sequence in so many is held back to choose the epoch."""

BATCH_TOKENS = 2048
"""Tokens of a step, at most, if its sequences are not longer."""

LOGIT_TOKENS = 256
"""Tokens whose logits are in memory at a time."""

_RATE, _WARM_STEPS = 0.02, 20  # the rate of change relative to a scale, for a code of 0 bits; it halves with each bit
_BETAS = 0.9, 0.95


@dataclass(frozen=True)
class TuningStep:
    """A message: the steps of the tuning that are done, and their total."""

    done: int
    total: int


@dataclass(frozen=True)
class TuningState:
    """Tuning after a whole epoch.

    Attributes:
        tensors: float32 `[out, groups]` of each matrix of `matrices`, by number: its scales divided by those of the
            algorithm as "ratio.N", the best so far as "best.N", and Adam's moments as "first.N" and "second.N".
        losses: the divergence on the sequences that are held back, nats per token, before the first epoch and after
            each.
    """

    tensors: Mapping[str, Tensor]
    losses: tuple[float, ...]

    @property
    def epochs(self) -> int:
        """The number of epochs done."""
        return len(self.losses) - 1

    @property
    def is_complete(self) -> bool:
        return self.epochs == EPOCHS


class TunedLinear(nn.Module):
    """`x @ weight.T + bias` with a quantized weight whose scales are trained.

    The scales are those of the weight times a ratio, rounded to the dtype that they are stored in; the gradient ignores
    the rounding. Only the packed weight is kept: it is dequantized for each product.

    Args:
        weight: `[out, in]`, of integer codes.
        bias: `[out]`, which is not trained.
    """

    def __init__(self, weight: QTensor, bias: Tensor | None) -> None:
        super().__init__()
        self.quantized = weight
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self.ratio = nn.Parameter(torch.ones_like(weight.scales, dtype=torch.float32))

    @property
    def weight(self) -> Tensor:
        """The dequantized matrix `[out, in]`, with a gradient to the ratio."""
        dequantized: Tensor = _TunedWeight.apply(self.ratio, self.quantized)
        return dequantized

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = _Product.apply(x, self.ratio, self.quantized)
        return product if self._bias is None else product + self._bias


class _TunedWeight(torch.autograd.Function):
    """The matrix of a `TunedLinear`, of its ratio."""

    @staticmethod
    def forward(ctx: Any, ratio: Tensor, weight: QTensor) -> Tensor:
        ctx.weight = weight
        return _dequantized(ratio, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gradient_of_ratio(gradient, ctx.weight), None


class _Product(torch.autograd.Function):
    """The product of a `TunedLinear`. Its gradient dequantizes the matrix again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ratio: Tensor, weight: QTensor) -> Tensor:
        ctx.save_for_backward(x, ratio)
        ctx.weight = weight
        return F.linear(x, _dequantized(ratio, weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, ratio = ctx.saved_tensors
        of_weight = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        return gradient @ _dequantized(ratio, ctx.weight), _gradient_of_ratio(of_weight, ctx.weight), None


def split(data: Calibration) -> tuple[Calibration, Calibration]:
    """The sequences for calibration and training, and those held back.

    Raises:
        DataError: there is only one sequence.
    """
    if len(data.sequences) < 2:
        raise DataError(
            "--effort high: the calibration data is one sequence: give two or more, because one in "
            f"{HELD} is held back to check the result"
        )
    trained = tuple(each for index, each in enumerate(data.sequences) if index % HELD)
    return Calibration(trained), Calibration(data.sequences[::HELD])


def scaled(weight: QTensor, ratio: Tensor) -> QTensor:
    """A matrix with its scales multiplied by a ratio `[out, groups]`, in the dtype that they have."""
    scales = (weight.scales.float() * ratio).to(weight.scales.dtype)
    return QTensor(weight.scheme, weight.qweight, scales, weight.zeros, weight.shape)


def _dequantized(ratio: Tensor, weight: QTensor) -> Tensor:
    return scaled(weight, ratio.detach()).dequantize(torch.float32)


def _gradient_of_ratio(of_weight: Tensor, weight: QTensor) -> Tensor:
    """From the gradient of the dequantized matrix, `[out, in]`, to `[out, groups]`."""
    product = weight.dequantize(torch.float32).mul_(of_weight)
    return product.unflatten(1, (weight.scales.shape[1], -1)).sum(-1)


@contextmanager
def _products(device: torch.device) -> Iterator[None]:
    """On a GPU, products in TF32, and attention whose gradient has the same bits in each run."""
    precision, efficient = torch.get_float32_matmul_precision(), torch.backends.cuda.mem_efficient_sdp_enabled()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.enable_mem_efficient_sdp(efficient)


class Tuning:
    """A quantized model whose scales are tuned, and the batches of the calibration data.

    Everything is computed in float32, on a GPU with products in TF32. The quantized layers stay in memory in packed
    form; the unquantized ones pass through memory one after the other, once.

    Args:
        plan: of the quantization.
        data: the calibration data; see `split`.
        held: the part of it that is held back.
        parts: the finished layers.
        device: where to compute.
    """

    def __init__(
        self, plan: Plan, data: Calibration, held: Calibration, parts: FinishedParts, device: torch.device
    ) -> None:
        config, source = plan.config, plan.checkpoint
        reading = Reading(plan, device, torch.float32)
        self._embedding, self._device = reading.table(), device
        self._trained, self._held = (
            embed(each, BATCH_TOKENS, self._embedding, config, Group(0, 1, device), torch.float32, drift=False)
            for each in (data, held)
        )
        self._final_norm = make_norm(config.norm, config.hidden_size).to(device).requires_grad_(False)
        for name, parameter in self._final_norm.named_parameters():
            parameter.copy_(source.tensor(tensor_map(config)[f"final_norm.{name}"][0]))
        head = "embedding.weight" if config.tie_embeddings else "head.weight"
        self._head = source.tensor(tensor_map(config)[head][0]).to(device, torch.float32)
        self._layers: list[DecoderLayer] = []
        self.matrices: dict[tuple[int, str], TunedLinear] = {}
        with torch.no_grad(), _products(device):
            for index, layer in enumerate(reading.layers()):
                if index == config.num_layers:
                    break  # layers of multi-token prediction do not take part in these predictions
                layer.requires_grad_(False)
                for state in (*self._trained, *self._held):
                    state.x = layer(state.x, index, state.positions, state.angles, state.context)
                self._layers.append(self._quantized(layer, index, plan, parts))

    @property
    def steps(self) -> int:
        """The number of steps of all epochs."""
        return EPOCHS * len(self._trained)

    @torch.enable_grad()
    def run(
        self,
        state: TuningState | None,
        *,
        save: Callable[[TuningState], None] = lambda state: None,
        tell: Callable[[TuningStep], None] = lambda message: None,
    ) -> TuningState:
        """Train, from the beginning or from the state after an epoch, to the end of the last epoch.

        Args:
            state: the last state that an interrupted run saved.
            save: called after each epoch.
            tell: called after each step.
        """
        with _products(self._device):
            return self._run(state, save, tell)

    def _run(
        self,
        state: TuningState | None,
        save: Callable[[TuningState], None],
        tell: Callable[[TuningStep], None],
    ) -> TuningState:
        ratios = [matrix.ratio for matrix in self.matrices.values()]
        bits = [matrix.quantized.scheme.bits for matrix in self.matrices.values()]
        groups = [{"params": [ratio], "rate": _RATE / 2**each} for ratio, each in zip(ratios, bits, strict=True)]
        optimizer = torch.optim.Adam(groups, betas=_BETAS)
        if state is None:
            state = self._state(optimizer, [ratio.detach() for ratio in ratios], (self.held_loss(),))
            save(state)
        else:
            self._restore(optimizer, state)
        while not state.is_complete:
            order = torch.randperm(len(self._trained), generator=torch.Generator().manual_seed(state.epochs))
            for number, chosen in enumerate(order.tolist(), state.epochs * len(order)):
                factor = 0.5 + 0.5 * math.cos(math.pi * number / self.steps)
                for group in optimizer.param_groups:
                    group["lr"] = group["rate"] * factor * min(1.0, (number + 1) / _WARM_STEPS)
                optimizer.zero_grad()
                self._backward(self._trained[chosen])
                optimizer.step()
                tell(TuningStep(number + 1, self.steps))
            losses = (*state.losses, self.held_loss())
            best = [state.tensors[f"best.{number}"] for number in range(len(ratios))]
            if losses[-1] < min(state.losses):
                best = [ratio.detach() for ratio in ratios]
            state = self._state(optimizer, best, losses)
            save(state)
        return state

    def scaled(self, state: TuningState, index: int) -> dict[str, QTensor]:
        """The matrices of a layer with the best scales, by their names in the layer."""
        return {
            linear: scaled(matrix.quantized, state.tensors[f"best.{number}"].to(self._device))
            for number, ((layer, linear), matrix) in enumerate(self.matrices.items())
            if layer == index
        }

    @torch.no_grad()
    def held_loss(self) -> float:
        """The mean divergence of the sequences that are held back, in nats per token."""
        total, count = 0.0, 0
        for state in self._held:
            rows, wanted = state.tokens(self._forward(state)), state.tokens(state.x)
            for own, goal in zip(rows.split(LOGIT_TOKENS), wanted.split(LOGIT_TOKENS), strict=True):
                total += self._divergences(own, goal).sum(dtype=torch.float64).item()
            count += len(rows)
        return total / count

    def _quantized(self, layer: DecoderLayer, index: int, plan: Plan, parts: FinishedParts) -> DecoderLayer:
        """The layer as the finished part has it, with matrices that are tuned."""
        part = stored_layer(parts, index)
        restore_kept(plan, part, index, layer)
        for linear, matrix in plan.layer(index).items():
            weight = quantized_matrix(plan, part, matrix)
            parent, _, name = linear.rpartition(".")
            old = layer.get_submodule(linear)
            assert isinstance(old, nn.Linear)
            tuned = TunedLinear(weight.to(self._device), None if old.bias is None else old.bias.detach())
            setattr(layer.get_submodule(parent), name, tuned)
            self.matrices[index, linear] = tuned
        return layer

    def _forward(self, state: States) -> Tensor:
        """The output of the last quantized layer, `[batch, tokens, hidden]`; its gradient computes layers again."""
        x = self._embedding[state.ids.to(self._embedding.device)].to(self._device, torch.float32)
        for index, layer in enumerate(self._layers):
            arguments = x, index, state.positions, state.angles, state.context
            x = checkpoint(layer, *arguments, use_reentrant=False) if torch.is_grad_enabled() else layer(*arguments)
        return x

    def _backward(self, state: States) -> None:
        """Compute the gradients of the mean divergence of a batch."""
        rows = state.tokens(self._forward(state))
        wanted, gradients = state.tokens(state.x).split(LOGIT_TOKENS), []
        for own, goal in zip(rows.detach().split(LOGIT_TOKENS), wanted, strict=True):
            leaf = own.clone().requires_grad_()
            (found,) = torch.autograd.grad(self._divergences(leaf, goal).sum() / len(rows), leaf)
            gradients.append(found)
        rows.backward(torch.cat(gradients))

    def _divergences(self, own: Tensor, wanted: Tensor) -> Tensor:
        """The divergence of each token, from outputs of the last quantized and unquantized layer `[tokens, hidden]`."""
        with torch.no_grad():
            goal = self._scores(wanted)
        return (goal.exp() * (goal - self._scores(own))).sum(-1)

    def _scores(self, x: Tensor) -> Tensor:
        return F.linear(self._final_norm(x), self._head).log_softmax(-1)

    def _state(self, optimizer: torch.optim.Adam, best: Sequence[Tensor], losses: tuple[float, ...]) -> TuningState:
        tensors = {}
        for number, matrix in enumerate(self.matrices.values()):
            moments = optimizer.state.get(matrix.ratio, {})
            zeros = torch.zeros_like(matrix.ratio.detach())
            tensors[f"ratio.{number}"] = matrix.ratio.detach().clone()
            tensors[f"best.{number}"] = best[number].clone()
            tensors[f"first.{number}"] = moments.get("exp_avg", zeros).clone()
            tensors[f"second.{number}"] = moments.get("exp_avg_sq", zeros).clone()
        return TuningState(tensors, losses)

    @torch.no_grad()
    def _restore(self, optimizer: torch.optim.Adam, state: TuningState) -> None:
        for number, matrix in enumerate(self.matrices.values()):
            matrix.ratio.copy_(state.tensors[f"ratio.{number}"])
            optimizer.state[matrix.ratio] = {
                "step": torch.tensor(float(state.epochs * len(self._trained))),
                "exp_avg": state.tensors[f"first.{number}"].to(self._device),
                "exp_avg_sq": state.tensors[f"second.{number}"].to(self._device),
            }
