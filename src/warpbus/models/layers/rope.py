"""Rotary position embedding (Su et al., 2021), of the whole head or part of it, with interleaved or half-split pairs.

ChatGLM-6B has two-dimensional positions (GLM; Du et al., 2022): the position in the prompt, and the position in the
generated text. Each half of a head, a plane, rotates by one of them.
"""

import math
from typing import Any

import torch
from torch import Tensor

from warpbus.models.config import RopeConfig, RopeScaling


class Rotary:
    """Computes the cosines and sines of positions."""

    def __init__(self, config: RopeConfig) -> None:
        self.config = config
        self._tables: dict[torch.device, Tensor] = {}

    def __call__(
        self, positions_bt: Tensor, dtype: torch.dtype, prompts_bt: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines for integer positions `[batch, tokens]`.

        Args:
            prompts_bt: for two-dimensional positions, see `coordinates`.

        Returns:
            cosines and sines, each `[batch, tokens, 1, planes * rotary_dim / 2]` in `dtype`, computed in float32, plane
            by plane.
        """
        if self.config.two_dimensional:
            assert prompts_bt is not None
            planes = [self._angles(positions) for positions in coordinates(positions_bt, prompts_bt)]
            angles = torch.cat(planes, dim=-1)[:, :, None]
        else:
            angles = self._angles(positions_bt)[:, :, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def table(self, positions: int, device: torch.device) -> Tensor:
        """Cosines, then sines, of positions 0, 1, 2, ...: float32 `[positions or more, rotary_dim]`.

        The largest table requested so far is cached per device.
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
    """The two positions of a token of ChatGLM-6B: in the prompt, and after the prompt.

    Args:
        positions: integers, positions of the tokens in their sequences.
        prompts: number of tokens before the sequence's first `ModelConfig.prompt_end`, 0 if it has none; broadcast
            against the positions.
    """
    last = (prompts - 1).clamp(min=0)
    return torch.minimum(positions, last), (positions - prompts + 1).clamp(min=0)


def prompt_lengths(tokens_bt: Tensor, prompt_end: int, documents_bt: Tensor | None = None) -> Tensor:
    """For each token the number of tokens before the first `prompt_end` of its sequence, 0 if there is none.

    Args:
        tokens_bt: ids `[batch, tokens]`.
        documents_bt: same shape, for rows that pack several sequences: the sequence of each token.

    Returns:
        int64 `[batch, tokens]`.
    """
    size = tokens_bt.shape[1]
    indices = torch.arange(size, device=tokens_bt.device).expand_as(tokens_bt)
    begins = indices == 0
    if documents_bt is not None:
        begins = begins | (documents_bt != documents_bt.roll(1, dims=1))
    starts = torch.where(begins, indices, 0).cummax(dim=1).values
    # The first prompt end of each sequence, stored at the index where the sequence starts.
    ends = torch.where(tokens_bt == prompt_end, indices, size)
    first = torch.full_like(indices, size).scatter_reduce(1, starts, ends, "amin").gather(1, starts)
    return torch.where(first < size, first - starts, 0)


def rotate(x_bthd: Tensor, angles: tuple[Tensor, Tensor], interleaved: bool, planes: int = 1) -> Tensor:
    """Rotate the first `rotary_dim` dimensions of each head; the others are unchanged.

    Args:
        x_bthd: `[batch, tokens, heads, head_dim]`.
        angles: cosines and sines from `Rotary`.
        interleaved: pairs are (2i, 2i+1); otherwise (i, i + rotary_dim / 2).
        planes: number of equal parts of each head, and of the angles, that rotate separately.
    """
    if planes > 1:
        cos, sin = (part.unflatten(-1, (planes, -1)) for part in angles)
        return rotate(x_bthd.unflatten(-1, (planes, -1)), (cos, sin), interleaved).flatten(-2)
    rotated: Tensor = _Rotation.apply(x_bthd, *angles, interleaved)
    return rotated


class _Rotation(torch.autograd.Function):
    """The backward pass rotates the gradient by the negative angle: far fewer operators than autograd would use."""

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
    rotated = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return torch.cat((joined, rest), dim=-1)


def _frequencies(config: RopeConfig, device: torch.device) -> Tensor:
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=device) / config.rotary_dim
    frequencies = 1.0 / config.theta**exponents
    if config.two_dimensional:
        frequencies = frequencies.half().float()  # ChatGLM-6B was trained with float16 frequencies
    return frequencies if config.scaling is None else _llama3(frequencies, config.scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide long wavelengths by the factor, keep short ones, and blend those in between (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((scaling.original_context / wavelengths - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * (1 - blend) + frequencies * blend
