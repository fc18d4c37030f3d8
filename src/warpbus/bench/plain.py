"""A decoder as one would write it in plain PyTorch for speed: the peer that `bench decode` holds ours against.

int4 weights through torch's own `_weight_int4pack_mm` (tinygemm), a static cache, torch's fused attention, everything
else left to `torch.compile`, and the whole step in a CUDA graph. Its weights are random; it reads no prompt.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpbus.bench.peers import Tinygemm
from warpbus.models import ModelConfig

Linear = Callable[[int, int, bool], nn.Module]
"""Makes a layer from its inputs, its outputs, and whether it has a bias."""

_GROUP = 128


class Int4Linear(nn.Module):
    """A linear layer of random 4-bit weights with a scale for every 128 of a row.

    Args:
        in_features: a multiple of 128.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        codes = torch.randint(256, (out_features, in_features // 2), dtype=torch.uint8)
        scales = torch.rand(in_features // _GROUP, out_features).add_(0.5)
        scales *= in_features**-0.5 * 12**0.5 / 16  # for outputs with the deviation of the inputs
        weight = Tinygemm.packed(codes, torch.stack([scales, torch.zeros_like(scales)], dim=-1), _GROUP)
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scales", weight.scales_and_zeros)
        self.register_buffer("bias", torch.randn(out_features) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int4pack_mm(x, self.codes, _GROUP, self.scales)
        return product if self.bias is None else product + self.bias


class PlainRMSNorm(nn.Module):
    """As the models' own, for one row."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Layer(nn.Module):
    """One block, with the cache of its keys and values."""

    keys: Tensor
    values: Tensor

    def __init__(self, config: ModelConfig, capacity: int, linear: Linear) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.grouped_attention.width
        self.config = config
        self.attention_norm = PlainRMSNorm(hidden, config.norm.eps)
        self.qkv = linear(hidden, sum(config.grouped_attention.qkv_rows), config.grouped_attention.qkv_bias)
        self.o = linear(width, hidden, config.grouped_attention.output_bias)
        self.mlp_norm = PlainRMSNorm(hidden, config.norm.eps)
        self.gate_up = linear(hidden, 2 * config.dense_mlp.ffn_size, False)
        self.down = linear(config.dense_mlp.ffn_size, hidden, False)
        for name in ("keys", "values"):
            self.register_buffer(
                name, torch.randn(1, config.grouped_attention.num_kv_heads, capacity, config.grouped_attention.head_dim)
            )

    def forward(self, x: Tensor, position: Tensor, angles: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        config = self.config
        parts = self.qkv(self.attention_norm(x)).split(config.grouped_attention.qkv_rows, dim=-1)
        q, k, v = (part.view(1, -1, config.grouped_attention.head_dim) for part in parts)
        self.keys.index_copy_(2, position, _rotate(k, angles, config.rope.interleaved)[:, :, None])
        self.values.index_copy_(2, position, v[:, :, None])
        # The queries of a group stand where the tokens of a sequence would: keys and values are read once for all.
        q = _rotate(q, angles, config.rope.interleaved).view(
            1, config.grouped_attention.num_kv_heads, -1, config.grouped_attention.head_dim
        )
        attended = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=visible)
        x = x + self.o(attended.reshape(1, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class PlainDecoder(nn.Module):
    """A decoder of a model's shape for one sequence.

    Args:
        config: a model without norms of queries, keys or outputs.
        capacity: tokens that its cache holds, random ones at first.
        linear: makes the layers' matrices.
    """

    cosines: Tensor
    sines: Tensor
    places: Tensor

    def __init__(self, config: ModelConfig, capacity: int, linear: Linear) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, capacity, linear) for _ in range(config.num_layers))
        self.final_norm = PlainRMSNorm(config.hidden_size, config.norm.eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        dim = config.rope.rotary_dim
        angles = torch.arange(capacity)[:, None] * config.rope.theta ** (-torch.arange(0, dim, 2) / dim)
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())
        self.register_buffer("places", torch.arange(capacity))

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """Scores `[1, vocabulary]` of what follows a token `[1]` at a position `[1]`, both int64."""
        x = self.embedding(token)
        angles = self.cosines[position], self.sines[position]
        visible = (self.places <= position)[None, None, None]
        for layer in self.layers:
            x = layer(x, position, angles, visible)
        scores: Tensor = self.head(self.final_norm(x))
        return scores


def _rotate(x: Tensor, angles: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """The first dimensions of every head `[1, heads, head_dim]` rotated."""
    cosines, sines = angles
    dim = 2 * cosines.shape[-1]
    turning = x[..., :dim].float()
    if interleaved:
        a, b = turning[..., ::2], turning[..., 1::2]
    else:
        a, b = turning.chunk(2, dim=-1)
    turned = a * cosines - b * sines, a * sines + b * cosines
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([joined.to(x.dtype), x[..., dim:]], dim=-1)
