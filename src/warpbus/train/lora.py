"""LoRA: a trained low-rank product is added to every frozen weight (Hu et al., 2021)."""

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpbus.errors import UsageError
from warpbus.kernels.operators import autocast
from warpbus.models.adapters import Lora, LowRank
from warpbus.models.config import ModelConfig
from warpbus.models.decoder import Decoder
from warpbus.models.layer_spec import LayerSpec, MatrixSpec
from warpbus.models.layers import QuantizedLinear
from warpbus.train.sharding import whole


class LoraLinear(nn.Module):
    """`base(x) + alpha / rank * b(a(dropout(x)))`; replaces the base layer, whose parameters are frozen.

    Args:
        base: `nn.Linear` or `QuantizedLinear`.
        rank: rows of a.
        alpha: the scaling times the rank.
        dropout: dropout rate of the input of a, while training.

    Attributes:
        a: float32 `[rank, in]`, initialized uniformly (He et al., 2015).
        b: float32 `[out, rank]`, initialized to 0, so that the layer equals its base at first.
    """

    def __init__(self, base: nn.Linear | QuantizedLinear, rank: int, alpha: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.rank, self.scaling, self.dropout = rank, alpha / rank, dropout
        device = next(iter((*base.parameters(), *base.buffers()))).device
        # Drawn on the CPU: different GPU models draw different numbers from one seed.
        where = device if device.type == "meta" else "cpu"
        drawn = torch.empty(rank, base.in_features, dtype=torch.float32, device=where)
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))
        self.a = nn.Parameter(drawn.to(device))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.float32, device=device))

    def forward(self, x: Tensor) -> Tensor:
        flat = autocast(x.reshape(-1, self.in_features))
        seen = F.dropout(flat, self.dropout, self.training) if self.dropout else flat
        # Before the base's product: if that is the last product of a layer, recomputation can stop before it.
        narrow = F.linear(seen, self.a.to(flat.dtype))
        y: Tensor = self.base(flat)
        wide = self.b.to(flat.dtype).T
        # In place, which saves two passes over y; no base layer needs y for its gradient. Autograd refuses it for some
        # views. A compiler fuses the addition itself, and cannot trace `_is_view`.
        add = torch.addmm if torch.compiler.is_compiling() or y._is_view() else Tensor.addmm_
        y = add(y, narrow, wide, alpha=self.scaling)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scaling={self.scaling:g}, dropout={self.dropout:g}"


def check_lora(config: ModelConfig, rank: int, targets: Collection[str]) -> None:
    """Refuse a LoRA that the model has no place for.

    Raises:
        UsageError: if no layer has a matrix of a target's name, it belongs to a routed expert, or the rank is out of
            range.
    """
    matrices = {matrix.name: matrix for layer in dict.fromkeys(config.layers) for matrix in layer.matrices}
    known = ", ".join(name for name, matrix in matrices.items() if matrix.expert is None)
    for name in targets:
        if name not in matrices:
            raise UsageError(f"LoRA target {name!r}: the layers have no such matrix: choose among {known}")
        if matrices[name].expert is not None:
            raise UsageError(f"LoRA target {name!r}: routed experts are not adapted: choose among {known}")
    if rank < 1:
        raise UsageError(f"LoRA rank {rank}: expected at least 1")


def adapted_matrices(spec: LayerSpec, targets: Collection[str]) -> list[MatrixSpec]:
    """The matrices of a layer that get a LoRA: the targets, or without any all but those of routed experts."""
    return [matrix for matrix in spec.matrices if matrix.expert is None and (not targets or matrix.name in targets)]


def attach_lora(
    model: Decoder, *, rank: int, alpha: float, dropout: float = 0.0, targets: Collection[str] = ()
) -> list[nn.Parameter]:
    """Freeze a decoder and replace the named matrices of every layer by `LoraLinear`.

    Args:
        targets: names within a layer, such as "attention.qkv"; by default all matrices but those of routed experts.

    Returns:
        the trainable parameters: a and b of each matrix, in the order of the layers.

    Raises:
        UsageError: the layers have no matrix of that name, it belongs to a routed expert, or the rank is out of range.
    """
    check_lora(model.config, rank, targets)
    model.requires_grad_(False)
    trained: list[nn.Parameter] = []
    for layer, spec in zip(model.layers, model.config.layers, strict=True):
        for matrix in adapted_matrices(spec, targets):
            parent, _, leaf = matrix.name.rpartition(".")
            owner = layer.get_submodule(parent)
            lora = LoraLinear(getattr(owner, leaf), rank, alpha, dropout)
            setattr(owner, leaf, lora)
            trained += [lora.a, lora.b]
    return trained


@torch.no_grad()
def lora_of(model: Decoder, name: str) -> Lora:
    """The trained adapter: float32 copies on the CPU, with the scaling multiplied into b. Every process calls it.

    Raises:
        UsageError: the model has no `LoraLinear`.
    """
    parts = {}
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear):
            parts[path] = LowRank(whole(module.a).cpu().clone(), (whole(module.b) * module.scaling).cpu())
    if not parts:
        raise UsageError(f"adapter {name}: the model has no LoRA: call attach_lora first")
    return Lora(name, parts)
