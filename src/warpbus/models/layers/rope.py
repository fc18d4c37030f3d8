"""Rotary position embedding (Su et al., 2021), on part of the head or all of it, interleaved or in halves.

ChatGLM-6B has positions in two dimensions (GLM; Du et al., 2022): where a token stands in the prompt, and where in what
is generated after it. Each half of a head, a plane, rotates by one of them.
"""

import math
from typing import Any

import torch
from torch import Tensor

from warpbus.models.config import RopeConfig, RopeScaling


class Rotary:
    """The cosines and sines of a sequence's positions."""

    def __init__(self, config: RopeConfig) -> None:
        self.config = config
        self._tables: dict[torch.device, Tensor] = {}

    def __call__(
        self, positions_bt: Tensor, dtype: torch.dtype, prompts_bt: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Angles for integer positions `[batch, tokens]`.

        Args:
            prompts_bt: where positions are two-dimensional, see `coordinates`.

        Returns:
            cosines and sines, each `[batch, tokens, 1, planes * rotary_dim / 2]` in `dtype`, computed in float32; the
            first plane's come first.
        """
        if self.config.two_dimensional:
            assert prompts_bt is not None
            planes = [self._angles(positions) for positions in coordinates(positions_bt, prompts_bt)]
            angles = torch.cat(planes, dim=-1)[:, :, None]
        else:
            angles = self._angles(positions_bt)[:, :, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def table(self, positions: int, device: torch.device) -> Tensor:
        """The cosines, then the sines, of the positions from 0 on: float32 `[positions or more, rotary_dim]`.

        The largest one that was asked for is kept on each device.
        """
        kept = self._tables.get(device)
        if kept is None or len(kept) < positions:
            angles = self._angles(torch.arange(positions, device=device))
            kept = self._tables[device] = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return kept

    def _angles(self, positions: Tensor) -> Tensor:
        frequencies = _frequencies(self.config, positions.device)
        return (positions.float() / self.config.position_scale)[..., None] * frequencies


def coordinates(positions: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """The two positions of a token of ChatGLM-6B: in the prompt up to its last token, and after that.

    Args:
        positions: integers, where the tokens stand in their sequences.
        prompts: how many tokens of the sequence are before its first `ModelConfig.prompt_end`, 0 where it has none;
            broadcast against the positions.
    """
    last = (prompts - 1).clamp(min=0)
    return torch.minimum(positions, last), (positions - prompts + 1).clamp(min=0)


def prompt_lengths(tokens_bt: Tensor, prompt_end: int, documents_bt: Tensor | None = None) -> Tensor:
    """How many tokens of each token's sequence are before the first `prompt_end` of it, 0 where it has none.

    Args:
        tokens_bt: ids `[batch, tokens]`.
        documents_bt: of the same shape, where a row holds several sequences one after another: a number for each.

    Returns:
        int64 `[batch, tokens]`.
    """
    size = tokens_bt.shape[1]
    places = torch.arange(size, device=tokens_bt.device).expand_as(tokens_bt)
    begins = places == 0
    if documents_bt is not None:
        begins = begins | (documents_bt != documents_bt.roll(1, dims=1))
    starts = torch.where(begins, places, 0).cummax(dim=1).values
    # Of each sequence the first end, kept at the place where the sequence starts.
    ends = torch.where(tokens_bt == prompt_end, places, size)
    first = torch.full_like(places, size).scatter_reduce(1, starts, ends, "amin").gather(1, starts)
    return torch.where(first < size, first - starts, 0)


def rotate(x_bthd: Tensor, angles: tuple[Tensor, Tensor], interleaved: bool, planes: int = 1) -> Tensor:
    """Rotate the first `rotary_dim` dimensions of each head and leave the rest.

    Args:
        x_bthd: `[batch, tokens, heads, head_dim]`.
        angles: cosines and sines from `Rotary`.
        interleaved: pairs are (2i, 2i+1); otherwise (i, i + rotary_dim / 2).
        planes: equal parts of each head, and of the angles, that rotate by themselves.
    """
    if planes > 1:
        cos, sin = (part.unflatten(-1, (planes, -1)) for part in angles)
        return rotate(x_bthd.unflatten(-1, (planes, -1)), (cos, sin), interleaved).flatten(-2)
    rotated: Tensor = _Rotation.apply(x_bthd, *angles, interleaved)
    return rotated


class _Rotation(torch.autograd.Function):
    """Its gradient is rotated back: far fewer operators than those by which autograd undoes each of these."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.dtype = interleaved, x.dtype
        return _rotated(x, cos, sin, interleaved)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, -sin, ctx.interleaved).to(ctx.dtype), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    rotating, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = rotating[..., 0::2], rotating[..., 1::2]
    else:
        first, second = rotating[..., :half], rotating[..., half:]
    turned = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((joined, rest), dim=-1)


def _frequencies(config: RopeConfig, device: torch.device) -> Tensor:
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=device) / config.rotary_dim
    frequencies = 1.0 / config.theta**exponents
    if config.two_dimensional:
        frequencies = frequencies.half().float()  # ChatGLM-6B was trained with these, and its files hold them so
    return frequencies if config.scaling is None else _llama3(frequencies, config.scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide long wavelengths by the factor, keep short ones, and blend those in between (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((scaling.original_context / wavelengths - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * (1 - blend) + frequencies * blend
