"""Rounds weights to the block types of GGUF, and writes codes that were rounded elsewhere into blocks.

Where a type has a scale and a minimum per group, several scales are tried, the minimum and the scale are fitted to the
rounded codes by least squares, and the best is kept.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from warpbus.formats.gguf.blocks import GROUP, half, pack_scales

_TRIALS = 16
_SCALES_OF_BLOCK = 63  # the largest 6-bit scale of Q4_K and Q5_K


def assemble(kind: str, codes: Tensor, scales: Tensor, minima: Tensor | None = None) -> Tensor:
    """Blocks of given codes.

    Args:
        kind: Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0.
        codes: uint8 `[blocks, 32]`, below 16 or 32; of Q8_0 the values plus 128.
        scales: `[blocks]`, numbers that float16 represents.
        minima: `[blocks]`, of Q4_1 and Q5_1.

    Returns:
        uint8 `[blocks, bytes of a block]`.
    """
    fields = [_half_bytes(scales)]
    if minima is not None:
        fields.append(_half_bytes(minima))
    if kind == "Q8_0":
        return torch.cat([*fields, codes ^ 128], 1)
    if kind in ("Q5_0", "Q5_1"):
        bits = ((codes >> 4) & 1).view(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)
        fields.append(bits.sum(-1, dtype=torch.uint8))
    return torch.cat([*fields, (codes[:, :16] & 15) | (codes[:, 16:] & 15) << 4], 1)


def encode(kind: str, weights: Tensor) -> Tensor:
    """Round weights to blocks.

    Args:
        kind: one of `ENCODERS`.
        weights: float32 `[blocks, size of a block]`, finite.

    Returns:
        uint8 `[blocks, bytes of a block]`.
    """
    return ENCODERS[kind](weights)


def _half_bytes(values: Tensor) -> Tensor:
    return values.to(torch.float16).view(-1, 1).contiguous().view(torch.uint8)


def _symmetric(kind: str, weights: Tensor, middle: int) -> Tensor:
    """Q4_0, Q5_0: the extreme of a block is the code 0, whatever its sign."""
    extreme = weights.gather(1, weights.abs().argmax(1, keepdim=True))
    start = extreme / -middle
    best_scale, best_error = start, torch.full_like(start, torch.inf)
    for trial in range(_TRIALS):
        scale = (start * (1 - 0.02 * trial)).half().float()
        error = (_centred(weights, scale, middle) * scale - weights).square().sum(1, keepdim=True)
        best_scale = torch.where(error < best_error, scale, best_scale)
        best_error = torch.minimum(error, best_error)
    codes = (_centred(weights, best_scale, middle) + middle).to(torch.uint8)
    return assemble(kind, codes, best_scale.flatten())


def _centred(weights: Tensor, scale: Tensor, middle: int) -> Tensor:
    return (weights * _inverse(scale)).round().clamp(-middle, middle - 1)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)


def _q8_0(weights: Tensor) -> Tensor:
    scale = (weights.abs().amax(1, keepdim=True) / 127).half().float()
    values = (weights * _inverse(scale)).round().clamp(-127, 127)
    return assemble("Q8_0", (values + 128).to(torch.uint8), scale.flatten())


def _affine(kind: str, weights: Tensor, top: int) -> Tensor:
    """Q4_1, Q5_1."""
    scale, low = _fitted(weights, top, lowest=None)
    scale, low = scale.half().float(), low.half().float()
    codes = ((weights - low) * _inverse(scale)).round().clamp(0, top).to(torch.uint8)
    return assemble(kind, codes, scale.flatten(), low.flatten())


def _fitted(weights: Tensor, top: int, lowest: float | None) -> tuple[Tensor, Tensor]:
    """The scale and the minimum of each row that round it best to codes 0 to `top`.

    Args:
        weights: `[rows, n]`.
        lowest: the minimum may not be above this number; None for any minimum.

    Returns:
        two of `[rows, 1]`; the scale is not negative.
    """
    low, high = weights.amin(1, keepdim=True), weights.amax(1, keepdim=True)
    if lowest is not None:
        low = low.clamp(max=lowest)
    span = (high - low).clamp(min=0)
    best = (span / top, low)
    best_error = _error(weights, *best, top)
    mean = weights.mean(1, keepdim=True)
    for trial in range(_TRIALS):
        scale = span / (top - 1 + 0.125 * trial)
        codes = ((weights - low) * _inverse(scale)).round().clamp(0, top)
        centre = codes.mean(1, keepdim=True)
        spread = (codes - centre).square().sum(1, keepdim=True)
        slope = ((codes - centre) * (weights - mean)).sum(1, keepdim=True) * _inverse(spread)
        offset = mean - slope * centre
        if lowest is not None:
            free = offset <= lowest
            through = (codes * (weights - lowest)).sum(1, keepdim=True) * _inverse(codes.square().sum(1, keepdim=True))
            slope, offset = torch.where(free, slope, through), offset.clamp(max=lowest)
        slope = slope.clamp(min=0)
        error = _error(weights, slope, offset, top)
        better = error < best_error
        best = torch.where(better, slope, best[0]), torch.where(better, offset, best[1])
        best_error = torch.minimum(error, best_error)
    return best


def _error(weights: Tensor, scale: Tensor, low: Tensor, top: int) -> Tensor:
    codes = ((weights - low) * _inverse(scale)).round().clamp(0, top)
    return (codes * scale + low - weights).square().sum(1, keepdim=True)


def _nested(weights: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The header of Q4_K and Q5_K, uint8 `[blocks, 16]`, and the codes, uint8 `[blocks, 8, 32]`."""
    groups = weights.view(-1, 8, GROUP)
    scale, low = (part.view(-1, 8) for part in _fitted(groups.reshape(-1, GROUP), top, lowest=0.0))
    step = _half_bytes(scale.amax(1) / _SCALES_OF_BLOCK)
    offset = _half_bytes(-low.amin(1) / _SCALES_OF_BLOCK)
    scales = (scale * _inverse(half(step))).round().clamp(0, _SCALES_OF_BLOCK)
    minima = (-low * _inverse(half(offset))).round().clamp(0, _SCALES_OF_BLOCK)
    steps, offsets = (half(step) * scales).unsqueeze(-1), (half(offset) * minima).unsqueeze(-1)
    codes = ((groups + offsets) * _inverse(steps)).round().clamp(0, top).to(torch.uint8)
    packed = pack_scales(scales.to(torch.uint8), minima.to(torch.uint8))
    return torch.cat([step, offset, packed], 1), codes


def _paired(codes: Tensor) -> Tensor:
    """The low four bits of `[blocks, 8, 32]` as 128 bytes: even groups in the low nibbles."""
    low = codes & 15
    return (low[:, ::2] | low[:, 1::2] << 4).flatten(1)


def _q4_k(weights: Tensor) -> Tensor:
    header, codes = _nested(weights, 15)
    return torch.cat([header, _paired(codes)], 1)


def _q5_k(weights: Tensor) -> Tensor:
    header, codes = _nested(weights, 31)
    fifth = (codes >> 4) << torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    return torch.cat([header, fifth.sum(1, dtype=torch.uint8), _paired(codes)], 1)


def _q6_k(weights: Tensor) -> Tensor:
    groups = weights.view(-1, 16, 16)
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True)).squeeze(2)
    wanted = extreme / -32
    largest = wanted.gather(1, wanted.abs().argmax(1, keepdim=True))
    step = _half_bytes(largest.flatten() / -128)
    scales = (wanted * _inverse(half(step))).round().clamp(-128, 127)
    steps = (half(step) * scales).unsqueeze(-1)
    codes = ((groups * _inverse(steps)).round().clamp(-32, 31) + 32).to(torch.uint8).view(-1, 2, 4, GROUP)
    low = codes & 15
    high = (codes >> 4) << torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    return torch.cat(
        [
            (low[:, :, :2] | low[:, :, 2:] << 4).flatten(1),
            high.sum(2, dtype=torch.uint8).flatten(1),
            scales.to(torch.int8).view(torch.uint8),
            step,
        ],
        1,
    )


ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": lambda weights: _symmetric("Q4_0", weights, 8),
    "Q4_1": lambda weights: _affine("Q4_1", weights, 15),
    "Q5_0": lambda weights: _symmetric("Q5_0", weights, 16),
    "Q5_1": lambda weights: _affine("Q5_1", weights, 31),
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""The types that weights can be rounded to, by name."""

FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""The type of rows that are no multiple of 256 weights, as llama.cpp chooses it."""
