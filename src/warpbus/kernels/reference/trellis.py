"""The path through a bit-shift trellis that is nearest to a tile of weights, in PyTorch: see csrc/cpu/trellis.h."""

import torch
from torch import Tensor

from warpbus.qtensor.trellis import STATES, STEPS, code_table

SEAM = 24
"""Steps on either side of the stream's ends that decide about the bits that pass over them."""

_AT_ONCE = 2**24  # states of all tiles that are looked at together


def trellis_search(x: Tensor, bits: int) -> Tensor:
    """Symbols uint8 `[tiles, STEPS]` of the paths nearest to tiles float32 `[tiles, 2 * STEPS]`."""
    return torch.cat([_tiles(part, bits) for part in x.split(max(1, _AT_ONCE // STATES))])


def _tiles(x: Tensor, bits: int) -> Tensor:
    pairs, width = x.view(-1, STEPS, 2), 2 * bits
    around = pairs.roll(SEAM, 1)[:, : 2 * SEAM].flip(1)
    passing = _search(around, width, None)[:, SEAM] >> width
    states = _search(pairs.flip(1), width, passing).flip(1)
    return (states & (2**width - 1)).to(torch.uint8)


def _search(pairs: Tensor, width: int, passing: Tensor | None) -> Tensor:
    """The states int64 `[tiles, steps]` of pairs `[tiles, steps, 2]`, the last step of the stream first.

    Args:
        width: bits of a symbol.
        passing: int64 `[tiles]`, the upper bits before the first state and the lower bits of the last one.
    """
    tiles, steps, _ = pairs.shape
    groups = STATES >> width
    numbers = code_table(pairs.device)
    least = pairs.new_zeros(tiles, groups)
    if passing is not None:
        least += torch.finfo(torch.float32).max / 4
        least.scatter_(1, passing[:, None], 0.0)
    chosen = []
    for step in range(steps):
        first, second = ((pairs[:, step, i, None] - numbers[:, i]).square_() for i in (0, 1))
        cost = (least.repeat_interleave(2**width, 1) + first).add_(second)
        least, index = cost.view(tiles, 2**width, groups).min(1)
        chosen.append(index.to(torch.uint8))
    group = least.argmin(1) if passing is None else passing
    states = torch.empty(tiles, steps, dtype=torch.int64, device=pairs.device)
    for step in reversed(range(steps)):
        state = chosen[step].gather(1, group[:, None])[:, 0].long() * groups + group
        states[:, step] = state
        group = state >> width
    return states
