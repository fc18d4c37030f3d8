"""The cost of a model, from the tables of its layers: bytes of weights, KV cache and activations, FLOP and time.

The plans for running, quantizing and training a model are sums of these. Nothing is loaded or allocated here.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from warpbus.cuda.memory_size import short_size
from warpbus.kernels.ops.packed import packed_shapes
from warpbus.kernels.ops.trellis_packed import packed_trellis_words
from warpbus.kernels.reference.cache import stored_length
from warpbus.kernels.reference.latent_cache import LATENT_CODES
from warpbus.kernels.reference.latent_cache import token_bytes as latent_bytes
from warpbus.models.config import ModelConfig
from warpbus.models.layer_spec import LayerSpec
from warpbus.qtensor import Scheme

FILE_RATE = 2e9
"""Bytes per second that estimates of time assume for reading and writing files: half of what NVMe disks reach."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that are needed in one place.

    Attributes:
        place: for instance "cuda:0", "main memory", or the full path of a directory.
        parts: bytes by what they are for.
        available: bytes that may be taken; None if unknown.
        peak: the most bytes at one time, where not all parts are there at once; None: their sum.
    """

    place: str
    parts: Mapping[str, int]
    available: int | None
    peak: int | None = field(default=None, kw_only=True)

    @property
    def total(self) -> int:
        """The most bytes at one time."""
        return sum(self.parts.values()) if self.peak is None else self.peak

    @property
    def fits(self) -> bool:
        """Whether there is enough, as far as is known."""
        return self.available is None or self.total <= self.available

    def details(self) -> str:
        """The parts, for instance "states 33.7 MB, layers 21.2 MB"."""
        return ", ".join(f"{name} {short_size(size)}" for name, size in self.parts.items())

    def shortage(self) -> str:
        """The needed and the available bytes, in the words of an error."""
        free = short_size(self.available or 0)
        return f"{self.place}: needs about {short_size(self.total)} ({self.details()}), {free} free"


@dataclass(frozen=True)
class TimeRange:
    """How long a job takes on a machine that does nothing else.

    Attributes:
        least: seconds of the matrix products at the best measured rate. No machine is faster.
        most: seconds with everything that measured runs took besides.
    """

    least: float
    most: float

    def __str__(self) -> str:
        """For instance "about 20 to 45 s", rounded so that the range holds."""
        size, unit = next(
            ((size, unit) for size, unit in ((86400, "d"), (3600, "h"), (60, "min")) if self.most >= 2 * size),
            (1, "s"),
        )
        least, most = _two_digits(self.least / size, math.floor), _two_digits(self.most / size, math.ceil)
        return f"about {least} to {most} {unit}"


def packed_bytes(scheme: Scheme, n: int, k: int) -> int:
    """Bytes of a quantized matrix `[n, k]` as the kernels of a GPU take it: FP4 dequantized to 16 bits."""
    if scheme.is_trellis:
        return 4 * packed_trellis_words(scheme, n, k) + n * torch.float32.itemsize + k // 8
    if scheme.element is not None:
        return 2 * n * k
    if scheme.activations is not None:
        return n * k + n * torch.float32.itemsize
    words, scales = packed_shapes(scheme, n, k)
    return 4 * words + 2 * math.prod(scales) * (1 if scheme.symmetric else 2)


def parameter_bytes(config: ModelConfig, dtype: torch.dtype, quantized: Mapping[str, Scheme]) -> dict[str, int]:
    """Bytes of each parameter on a GPU, by name; a tied head has none.

    Args:
        dtype: of what is not quantized.
        quantized: the parameters that the file holds quantized, and their schemes.
    """

    packed = functools.cache(packed_bytes)  # there may be tens of thousands of experts, all alike

    def size(name: str, shape: tuple[int, ...]) -> int:
        matrix = config.matrix(name)
        if name not in quantized or (matrix is not None and matrix.dequantized):
            return math.prod(shape) * dtype.itemsize
        return packed(quantized[name], shape[0], shape[1])

    return {name: size(name, shape) for name, shape in config.parameters.items()}


def kv_cache_bytes(config: ModelConfig, dtype: torch.dtype, stored: torch.dtype) -> int:
    """Bytes of the keys and values of a token in all layers, that of multi-token prediction included.

    Args:
        dtype: of the activations.
        stored: of the cache; other than `dtype`, each head's vector has a scale in float32, and latents have the layout
            of `reference.latent_cache`.
    """
    total = 0
    for layer in config.all_layers:
        entry = layer.attention.cache_entry
        if entry.latent and stored == LATENT_CODES:
            total += latent_bytes(entry.value_dim, entry.key_dim - entry.value_dim, dtype)
            total += entry.index_dim * dtype.itemsize
            continue
        scale = 0 if stored == dtype else torch.float32.itemsize
        vector = stored_length(entry.key_dim, stored) * stored.itemsize + scale
        total += entry.vectors * entry.heads * vector + entry.index_dim * dtype.itemsize
    return total


def activation_features(layer: LayerSpec) -> int:
    """Numbers of a token that are alive at once while it passes through a layer, with room to spare."""
    copied = 2 * layer.mlp.expert_rows * layer.hidden_size  # inputs and outputs of the experts, sorted by expert
    joined = 3 * layer.hidden_size if layer.predicts else 0  # the parts of its input, and the states they come from
    return 4 * layer.hidden_size + 2 * layer.attention.projected + layer.mlp.widened + layer.mlp.inner + copied + joined


def forward_flop(config: ModelConfig) -> int:
    """FLOP of the matrix products of a token: two per weight that it is multiplied with, none for the embedding."""
    layers = sum(layer.active_weights for layer in config.layers)
    return 2 * (layers + config.vocab_size * config.hidden_size)


def _two_digits(value: float, rounded: Callable[[float], int]) -> str:
    """A number with two significant digits, or all those before the point."""
    scale = 10 ** max(0, 1 - math.floor(math.log10(value))) if value > 0 else 1
    return f"{rounded(value * scale) / scale:,.10g}"
