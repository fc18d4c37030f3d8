"""Other people's kernels for quantized weights, each with the form that it wants its weights in.

What is no dependency of Warpbus is imported only when a benchmark asks for it.
"""

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpbus.qtensor import QTensor, Scheme
from warpbus.qtensor.packing import pack as pack_bits

# tinygemm reads its weights in tiles of 8 x 16 columns, and makes no use of more than a few rows.
_INNER_TILES = 8
TINYGEMM_ROWS = 64


@dataclass(frozen=True)
class Tinygemm:
    """A 4-bit matrix `[n, k]` for `torch.ops.aten._weight_int4pack_mm`, torch's own kernel: weight-only, bfloat16.

    Attributes:
        codes: as `_convert_weight_to_int4pack` returns them.
        scales_and_zeros: bfloat16 `[groups, n, 2]`; a weight is `(code - 8) * scale + zero`.
        group_size: columns that share a scale.
    """

    codes: Tensor
    scales_and_zeros: Tensor
    group_size: int

    @staticmethod
    def takes(scheme: Scheme, n: int, k: int) -> bool:
        """Whether it knows this scheme and these sizes."""
        return scheme.bits == 4 and scheme.group_size is not None and n % 8 == 0 and k % (16 * _INNER_TILES) == 0

    @staticmethod
    def of(weight: QTensor) -> "Tinygemm":
        """The same matrix; its scales are rounded to bfloat16."""
        group_size = weight.scheme.group_size
        assert group_size is not None  # `takes` has said so
        codes = weight.codes()
        scales = weight.scales.float()
        zeros = torch.zeros_like(scales) if weight.zeros is None else (8 - weight.zeros.float()) * scales
        pairs = torch.stack([scales, zeros], dim=-1).transpose(0, 1)
        return Tinygemm.packed(codes[:, ::2] << 4 | codes[:, 1::2], pairs, group_size)

    @staticmethod
    def packed(codes: Tensor, scales_and_zeros: Tensor, group_size: int) -> "Tinygemm":
        """A matrix from uint8 `[n, k / 2]`, even columns in the upper half of a byte, and `[groups, n, 2]`."""
        reordered = torch.ops.aten._convert_weight_to_int4pack(codes, _INNER_TILES)
        return Tinygemm(reordered, scales_and_zeros.bfloat16().contiguous(), group_size)

    def __call__(self, x: Tensor) -> Tensor:
        """`x @ weight.T`, both bfloat16 `[m, k]` and `[m, n]`."""
        product: Tensor = torch.ops.aten._weight_int4pack_mm(x, self.codes, self.group_size, self.scales_and_zeros)
        return product


@dataclass(frozen=True)
class Humming:
    """A matrix for the package humming-kernels, which compiles a kernel for each layer and number of rows.

    Attributes:
        parts: its tensors.
        layer: a `humming.layer.HummingLayer`.
        tuning: the choices of its own heuristics, by rows of x.
    """

    parts: tuple[Tensor, ...]
    layer: Any
    tuning: dict[int, str]

    @staticmethod
    def of(weight: QTensor, dtype: torch.dtype, rows: Sequence[int]) -> "Humming":
        """The same matrix, with its kernels compiled for these numbers of rows.

        Raises:
            ImportError: the package is not installed; and whatever it raises where it knows no such layer.
        """
        n, k = weight.shape
        scheme = weight.scheme
        config = {
            "dtype": f"uint{scheme.bits}",
            "group_size": scheme.group_size or 0,
            "has_zero_point": not scheme.symmetric,
        }
        layers = importlib.import_module("humming.layer")
        with torch.device(weight.device):
            layer = layers.HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=dtype)
        # Its codes are those of a QTensor, bit for bit.
        tensors = {"weight": weight.qweight, "weight_scale": weight.scales.to(dtype)}
        if weight.zeros is not None:
            tensors["zero_point"] = pack_bits(weight.zeros.T.contiguous(), scheme.bits).T.contiguous()
        layer.load_from_tensors(tensors)
        layer.transform()
        return Humming(tuple(layer.parameters()), layer, _tuned(layer.humming_config, rows, weight.device))

    def __call__(self, x: Tensor) -> Tensor:
        """`x @ weight.T`."""
        product: Tensor = self.layer(x, tuning_config=self.tuning[x.shape[0]])
        return product


def _tuned(config: Any, rows: Sequence[int], device: torch.device) -> dict[int, str]:
    """Its choice for each number of rows, compiled all at once, which it does on as many cores as there are."""
    choose = importlib.import_module("humming.tune").get_heuristics_config
    chosen = {m: choose(config, shape_m=m, device=device) for m in rows}
    kernels = importlib.import_module("humming.kernel.humming").HummingKernel
    kernels.prepare_kernels(config.to_str(), None, [(0, 2**30, each) for each in chosen.values()], device)
    return {m: json.dumps(each) for m, each in chosen.items()}
