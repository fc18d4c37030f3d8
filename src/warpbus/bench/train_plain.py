"""A decoder that is trained as PyTorch's own parts offer it: linear layers, attention, cross-entropy of all scores."""

import math
from collections.abc import Callable
from types import MethodType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from warpbus.errors import UsageError
from warpbus.models import ModelConfig


class PlainLora(nn.Module):
    """LoRA as the package PEFT computes it: two linear layers in float32 beside a frozen one."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        device = base.weight.device
        self.a = nn.Linear(base.in_features, rank, bias=False, device=device)
        self.b = nn.Linear(rank, base.out_features, bias=False, device=device)
        self.scaling = alpha / rank
        nn.init.kaiming_uniform_(self.a.weight, a=math.sqrt(5))
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + self.b(self.a(x.to(self.a.weight.dtype))) * self.scaling


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(
            config.hidden_size, sum(config.grouped_attention.qkv_rows), bias=config.grouped_attention.qkv_bias
        )
        self.o = nn.Linear(
            config.grouped_attention.width, config.hidden_size, bias=config.grouped_attention.output_bias
        )

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        config = self.config
        parts = self.qkv(x).split(config.grouped_attention.qkv_rows, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, config.grouped_attention.head_dim)).transpose(1, 2) for part in parts)
        q, k = (_rotate(each, angles, config.rope.interleaved) for each in (q, k))
        grouped = config.grouped_attention.num_heads != config.grouped_attention.num_kv_heads
        if grouped and x.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type):
            # torch's fused kernels know groups in 16 bits alone.
            k, v = (
                each.repeat_interleave(
                    config.grouped_attention.num_heads // config.grouped_attention.num_kv_heads, dim=1
                )
                for each in (k, v)
            )
            grouped = False
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        y: Tensor = self.o(attended.transpose(1, 2).flatten(2))
        return y


class _MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.dense_mlp.ffn_size, bias=False)
        self.down = nn.Linear(config.dense_mlp.ffn_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


class _PlainLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm.eps)
        self.attention = _Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, config.norm.eps)
        self.mlp = _MLP(config)
        self.recompute = False

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        if self.recompute:
            y: Tensor = checkpoint(self._once, x, angles, use_reentrant=False)
            return y
        return self._once(x, angles)

    def _once(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.mlp(self.mlp_norm(x))


class PlainModel(nn.Module):
    """From tokens and targets `[rows, length]` to the summed cross-entropy; rows are one document each.

    Its parameters have the names and shapes of a `Decoder`'s.

    Args:
        config: a model with RMSNorm, a gated MLP and rotary positions in one dimension.

    Raises:
        UsageError: another kind of model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if (
            config.norm.kind == "layer"
            or config.grouped_attention.qk_norm
            or config.layers[0].output_norms
            or config.rope.scaling
            or config.tie_embeddings
        ):
            raise UsageError(f"the plain model has no layers such as those of {config.family}: give --no-peer")
        self.config = config
        self._loss: Callable[..., Tensor] = _summed_loss
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_PlainLayer(config) for _ in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.hidden_size, config.norm.eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        angles = self._angles(tokens.shape[1], x)
        for layer in self.layers:
            x = layer(x, angles)
        return self._loss(x, self.final_norm, self.head, targets)

    def recompute(self, every: int) -> None:
        """Compute the activations of every n-th layer again in the backward pass."""
        for layer in list(self.layers)[::every]:
            cast(_PlainLayer, layer).recompute = True

    def compile_parts(self) -> None:
        """Compile the layers, which share their graphs as ours do, and the loss: what torch calls regional."""
        compiled = torch.compile(_PlainLayer.forward)
        for layer in self.layers:
            layer.forward = MethodType(compiled, layer)
        self._loss = torch.compile(_summed_loss)

    def attach_lora(self, rank: int, alpha: float) -> None:
        """Freeze the model and put a `PlainLora` in place of each linear of its layers."""
        self.requires_grad_(False)
        for owner in list(self.layers.modules()):
            for name, linear in list(owner.named_children()):
                if type(linear) is nn.Linear:
                    setattr(owner, name, PlainLora(linear, rank, alpha))

    def _angles(self, length: int, x: Tensor) -> tuple[Tensor, Tensor]:
        rope = self.config.rope
        exponents = torch.arange(0, rope.rotary_dim, 2, device=x.device) / rope.rotary_dim
        angles = torch.arange(length, device=x.device)[:, None] / rope.position_scale * rope.theta**-exponents
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _summed_loss(x: Tensor, norm: nn.Module, head: nn.Module, targets: Tensor) -> Tensor:
    scores = head(norm(x)).float()
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")


def _rotate(x: Tensor, angles: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """The first dimensions of every head `[rows, heads, length, head_dim]` rotated."""
    cosines, sines = angles
    turning, rest = x.split((2 * cosines.shape[-1], x.shape[-1] - 2 * cosines.shape[-1]), dim=-1)
    a, b = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
    turned = a * cosines - b * sines, a * sines + b * cosines
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((joined.to(x.dtype), rest), dim=-1)
