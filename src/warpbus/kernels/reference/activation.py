"""SwiGLU and GELU in plain PyTorch, computed in float32 and rounded once."""

import torch
from torch import Tensor
from torch.nn import functional as F


def swiglu(x: Tensor) -> Tensor:
    """`silu(gate) * up` for `x` = (gate, up) along the last axis."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype).contiguous()


def swiglu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of x for that of `swiglu(x)`."""
    gate, up = x.float().chunk(2, dim=-1)
    wide, share = gradient.float(), gate.sigmoid()
    parts = wide * up * share * (1 + gate * (1 - share)), wide * gate * share
    return torch.cat(parts, dim=-1).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """`x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`."""
    return F.gelu(x.float(), approximate="tanh").to(x.dtype).contiguous()
