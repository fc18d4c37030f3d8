"""Rotary position embedding (Su et al., 2021), on part of the head or all of it, interleaved or in halves."""

import math

import torch
from torch import Tensor

from warpbus.models.config import RopeConfig, RopeScaling


class Rotary:
    """The cosines and sines of a sequence's positions."""

    def __init__(self, config: RopeConfig) -> None:
        self.config = config
        self._tables: dict[torch.device, Tensor] = {}

    def __call__(self, positions_bt: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Angles for integer positions `[batch, tokens]`.

        Returns:
            cosines and sines, each `[batch, tokens, 1, rotary_dim / 2]` in `dtype`, computed in float32.
        """
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


def rotate(x_bthd: Tensor, angles: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Rotate the first `rotary_dim` dimensions of each head and leave the rest.

    Args:
        x_bthd: `[batch, tokens, heads, head_dim]`.
        angles: cosines and sines from `Rotary`.
        interleaved: pairs are (2i, 2i+1); otherwise (i, i + rotary_dim / 2).
    """
    cos, sin = angles
    half = cos.shape[-1]
    rotating, rest = x_bthd[..., : 2 * half], x_bthd[..., 2 * half :]
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
    return frequencies if config.scaling is None else _llama3(frequencies, config.scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide long wavelengths by the factor, keep short ones, and blend those in between (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((scaling.original_context / wavelengths - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * (1 - blend) + frequencies * blend
