"""Chooses the experts of a model that do not fit on a GPU and are kept in pinned host memory instead.

All layers have nearly the same number of offloaded experts, so that every layer reads equally much over the link. At
least one expert per layer stays on the GPU.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from warpbus.kernels.ops.arguments import HALVES
from warpbus.models import ModelConfig, MoESpec
from warpbus.qtensor import Scheme


@dataclass(frozen=True)
class OffloadableExperts:
    """The experts of a model that can be offloaded, and those that are stacked and cannot.

    Attributes:
        counts: for each layer the maximum number of offloaded experts; 0 in a dense layer.
        sizes: for each layer the bytes of an expert.
        shared: for each layer, whether it has a shared expert, which is stacked with the others.
        others: for each layer the bytes of its experts if they are stacked and cannot be offloaded: in 16 bits, or with
            activations of 8 bits; else 0.
    """

    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    shared: tuple[bool, ...]
    others: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, config: ModelConfig, dtype: torch.dtype, quantized: Mapping[str, Scheme], sizes: Mapping[str, int]
    ) -> "OffloadableExperts":
        """The experts that the kernels can read: quantized, with one scheme per layer.

        Args:
            dtype: of the activations.
            quantized: the schemes of the parameters that are quantized.
            sizes: bytes of the parameters.
        """
        counts, each, shared, others = [], [], [], []
        for index, layer in enumerate(config.all_layers):
            experts = len(layer.mlp.numbers) if isinstance(layer.mlp, MoESpec) else 0
            names = [f"layers.{index}.{matrix.name}.weight" for matrix in layer.matrices if matrix.expert is not None]
            able = dtype in HALVES and bool(names) and _alike(config, names, quantized)
            counts.append(experts - 1 if able else 0)
            each.append(sum(sizes[name] for name in names) // experts if able else 0)
            shared.append(isinstance(layer.mlp, MoESpec) and layer.mlp.shared is not None)
            grouped = dtype in HALVES and bool(names) and not able and len({quantized.get(name) for name in names}) == 1
            others.append(sum(sizes[name] for name in names) // experts * (experts + shared[-1]) if grouped else 0)
        return cls(tuple(counts), tuple(each), tuple(shared), tuple(others))

    @property
    def most(self) -> int:
        """The maximum number of offloaded experts in all layers together."""
        return sum(self.counts)

    def spread(self, count: int) -> tuple[int, ...]:
        """`count` experts spread over the layers: for each layer, how many of its experts are offloaded."""
        # The level up to which all layers can be filled; the first ones get one more.
        level = bisect_right(range(max(self.counts, default=0) + 1), count, key=self._filled) - 1
        found = [min(level, most) for most in self.counts]
        for layer, most in enumerate(self.counts):
            if sum(found) < count and found[layer] < most:
                found[layer] += 1
        return tuple(found)

    def _filled(self, level: int) -> int:
        """Offloaded experts if each layer has `level` of them, as far as it can."""
        return sum(min(level, most) for most in self.counts)

    def nbytes(self, offloaded: tuple[int, ...]) -> int:
        """Bytes of so many experts of each layer; empty: none."""
        return sum(count * size for count, size in zip(offloaded, self.sizes, strict=bool(offloaded)))

    def stacking_bytes(self, offloaded: tuple[int, ...]) -> int:
        """Additional bytes while the experts of a layer are stacked: a second copy of the layer with the most.

        Args:
            offloaded: for each layer how many are not on the GPU; empty: none.
        """
        away = offloaded or (0,) * len(self.counts)
        offloadable = (
            size * (most + 1 - own + shared)
            for most, size, own, shared in zip(self.counts, self.sizes, away, self.shared, strict=True)
        )
        return max((*offloadable, *self.others), default=0)


def _alike(config: ModelConfig, names: list[str], quantized: Mapping[str, Scheme]) -> bool:
    """Whether the kernels take these matrices of a layer's experts."""
    found: dict[str, set[tuple[object, ...]]] = {}
    for name in names:
        matrix, scheme = config.matrix(name), quantized.get(name)
        if matrix is None or scheme is None or scheme.activations is not None or any(x % 8 for x in matrix.shape):
            return False
        found.setdefault(matrix.name.rpartition(".")[2], set()).add((matrix.shape, scheme))
    return all(len(kinds) == 1 for kinds in found.values())
