"""Passes calibration data through the unquantized model layer by layer, for decisions before a run."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from warpbus.dist import Group
from warpbus.models import DecoderLayer, LayerLoader
from warpbus.quantization.calibration import Calibration
from warpbus.quantization.job import BATCH_TOKENS
from warpbus.quantization.preflight import Plan
from warpbus.quantization.states import States, embed, enter_mtp


@torch.no_grad()
def layers(
    plan: Plan, *data: Calibration, device: torch.device, dtype: torch.dtype, last: int
) -> Iterator[tuple[int, DecoderLayer, list[list[States]]]]:
    """Each layer up to `last`, its number and the states of each of `data` that enter it. One layer is held at a time.

    Neither the layer nor what the states have may be changed; they are moved on when the next layer is asked for.
    """
    table = plan.checkpoint.tensor(plan.tensors["embedding.weight"][0])
    group = Group(0, 1, device)
    tokens = BATCH_TOKENS[device.type]
    states = [embed(each, tokens, table, plan.config, group, dtype, drift=False) for each in data]
    del table
    loader = LayerLoader(plan.checkpoint, plan.config, device=device, dtype=dtype)
    for index in range(last + 1):
        layer = loader.load(index)
        if index == plan.config.num_layers:
            enter_mtp([*itertools.chain(*states)], layer, plan.checkpoint, plan.config)
        yield index, layer, states
        if index < last:
            for state in itertools.chain(*states):
                state.x = output(layer, index, state)


@torch.no_grad()
def output(layer: DecoderLayer, index: int, state: States) -> Tensor:
    """The outputs of a layer, `[batch, tokens, hidden]`."""
    return layer(state.x, index, state.positions, state.angles, state.context)


def squared_error(found: list[Tensor], expected: list[Tensor], states: list[States]) -> float:
    """The mean over all tokens of |found - expected|^2 / |expected|^2; of each state `[batch, tokens, hidden]`.

    Each token relative to itself, since that is how the norm before the next layer sees it.
    """
    total, tokens = 0.0, 0
    for one, other, state in zip(found, expected, states, strict=True):
        wide = state.tokens(other).float()
        change = state.tokens(one).float() - wide
        ratio = change.square().sum(-1) / wide.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
        total, tokens = total + float(ratio.sum()), tokens + len(ratio)
    return total / tokens
