"""Keeps the most frequently used experts on the GPU if others are in host memory.

The router's kernel counts the tokens of each expert. Every `WINDOW` steps the counts are read, without waiting for the
GPU, and added to half of the previous sums. An offloaded expert with clearly more tokens than an expert on the GPU is
exchanged with it, a few per step, by copies in the order of the steps. The location of an expert does not change the
results.
"""

from collections import abc

import torch
from torch import Tensor

from warpbus.models import Decoder
from warpbus.models.layers import MoE
from warpbus.models.layers.stacked_experts import StackedExperts

WINDOW = 128
"""Steps after which the counts are read."""

_AT_ONCE = 4  # exchanges per step
_MOST = 64  # exchanges per window
# An expert replaces one that has so many tokens less, and so many times less.
_LEAST, _FACTOR = 8.0, 1.25

Exchange = tuple[int, int, int]
"""A layer with offloaded experts, the offloaded expert and the one on the GPU that change places."""


def choose_exchanges(tokens: abc.Sequence[abc.Sequence[float]], resident: abc.Sequence[set[int]]) -> list[Exchange]:
    """The exchanges that bring the experts with the most tokens to the GPU, those that gain most first.

    Args:
        tokens: of each expert of each layer.
        resident: for each layer its experts on the GPU.
    """
    found: list[tuple[float, Exchange]] = []
    for layer, (counts, here) in enumerate(zip(tokens, resident, strict=True)):
        hot = sorted(set(range(len(counts))) - here, key=lambda expert: (-counts[expert], expert))
        cold = sorted(here, key=lambda expert: (counts[expert], expert))
        for far, near in zip(hot, cold, strict=False):
            gain = counts[far] - counts[near]
            if gain < _LEAST or counts[far] < _FACTOR * counts[near]:
                break
            found.append((gain, (layer, far, near)))
    return [exchange for _, exchange in sorted(found, key=lambda each: -each[0])[:_MOST]]


class ExpertPlacement:
    """Places the experts of a model with offloaded experts; call `step` before each step is launched.

    Args:
        model: with offloaded experts. Its layers count into rows of one tensor from now on, so create this before
            graphs are captured.

    Attributes:
        exchanged: how many experts were brought to the GPU so far.
        choices, host_choices: the number of times that a token was routed to an expert of these layers, and to one in
            host memory, from the counts that were read.
    """

    def __init__(self, model: Decoder) -> None:
        self._layers = offloading_layers(model)
        sizes = [0 if layer.counts is None else len(layer.counts) for layer in self._layers]
        self._counts = torch.zeros(len(sizes), max(sizes), dtype=torch.int32, device=model.final_norm.weight.device)
        for layer, row, size in zip(self._layers, self._counts, sizes, strict=True):
            layer.counts = row[:size]
        self._tokens = [[0.0] * size for size in sizes]
        self._arriving: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._due: list[Exchange] = []
        self._steps = 0
        self.exchanged = 0
        self.choices = self.host_choices = 0

    def step(self) -> None:
        """Read counts or exchange experts if they are due. Does not wait for the GPU."""
        self._steps += 1
        if self._due:
            now, self._due = self._due[:_AT_ONCE], self._due[_AT_ONCE:]
            for layer, far, near in now:
                self._layers[layer].exchange(far, near)
            self.exchanged += len(now)
        elif self._arriving is not None:
            self._take()
        elif self._steps >= WINDOW:
            self._read()

    def stats(self) -> dict[str, int]:
        """The fields of `Stats` for it."""
        return {
            "experts_exchanged": self.exchanged,
            "expert_choices": self.choices,
            "host_expert_choices": self.host_choices,
        }

    def restart(self) -> None:
        """Reset the counts, for instance after the warm-up of kernels."""
        self._counts.zero_()
        self._tokens = [[0.0] * len(each) for each in self._tokens]
        self._arriving, self._due, self._steps = None, [], 0

    def _read(self) -> None:
        """Start to copy the counts to the host, and count from zero again."""
        gpu = self._counts.is_cuda
        counts = torch.empty(self._counts.shape, dtype=torch.int32, pin_memory=gpu)
        counts.copy_(self._counts, non_blocking=True)
        self._counts.zero_()
        event = None
        if gpu:
            event = torch.cuda.Event()
            event.record()
        self._arriving, self._steps = (counts, event), 0

    def _take(self) -> None:
        """Choose exchanges by the counts, if they have arrived."""
        assert self._arriving is not None
        counts, event = self._arriving
        if event is not None and not event.query():
            return
        self._arriving = None
        resident = [
            {expert for expert in range(len(sums)) if layer.order[expert] < layer.resident}
            for layer, sums in zip(self._layers, self._tokens, strict=True)
        ]
        for sums, new, here in zip(self._tokens, counts.tolist(), resident, strict=True):
            sums[:] = [0.5 * before + now for before, now in zip(sums, new, strict=False)]
            self.choices += sum(new)
            self.host_choices += sum(count for expert, count in enumerate(new) if count and expert not in here)
        self._due = choose_exchanges(self._tokens, resident)


def offloading_layers(model: Decoder) -> list[StackedExperts]:
    """The experts of the layers that have offloaded ones."""
    mlps = [layer.mlp for layer in model.layers]
    experts = [mlp.experts for mlp in mlps if isinstance(mlp, MoE)]
    return [each for each in experts if isinstance(each, StackedExperts) and each.offloaded]
