"""The products of a dense layer in one launch, for a few tokens: those behind attention, and the next layer's projections."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from warpbus.kernels.ops.packed import PackedWeight
from warpbus.kernels.ops.wna16_chain import MOST_ROWS, Link, fits, wna16_chain
from warpbus.models.layers.adapted import Adapted
from warpbus.models.layers.linear import Norm, QuantizedLinear, RMSNorm


@dataclass(frozen=True)
class LayerChain:
    """The products of a layer as links of `wna16_chain`.

    Attributes:
        qkv: of the layer's input, with the norm before it.
        o: of what attention has computed; its residual is the layer's input.
        gate_up, down: the MLP.
    """

    qkv: Link
    o: Link
    gate_up: Link
    down: Link

    @classmethod
    def of(
        cls,
        x: Tensor,
        qkv: nn.Module,
        o: nn.Module,
        gate_up: nn.Module,
        down: nn.Module,
        attention_norm: Norm,
        mlp_norm: Norm,
    ) -> Self | None:
        """The chain of a layer with input x; None if one of its projections or norms is of another kind."""
        links = (
            _link(qkv, norm=attention_norm),
            _link(o),
            _link(gate_up, norm=mlp_norm, activation="swiglu"),
            _link(down, residual=0),
        )
        if any(link is None for link in links) or not fits(x, [link.weight for link in links if link is not None]):
            return None
        return cls(*(link for link in links if link is not None))

    def leave_attention(self, inner: Tensor, x: Tensor, following: Self | None) -> tuple[Tensor, Tensor | None]:
        """The output of the layer, and the projections qkv of the following one.

        Args:
            inner: the result of attention, `[batch, tokens, heads head_dim]`.
            x: the input of the layer, `[batch, tokens, hidden]`.
            following: the chain of the next layer. Without one, or if its scheme is another one, qkv is None.
        """
        links = [replace(self.o, residual=x), self.gate_up, self.down]
        if following is not None and following.qkv.weight.scheme == self.down.weight.scheme:
            links.append(following.qkv)
        results = wna16_chain(inner, links)
        return results[2], results[3] if len(results) > 3 else None


def may_chain(x: Tensor) -> bool:
    """Whether layers with input x `[batch, tokens, hidden]` may have chains, whatever their weights are."""
    return x.shape[:-1].numel() <= MOST_ROWS and not torch.is_grad_enabled()


def _link(
    linear: nn.Module, *, norm: Norm | None = None, activation: str = "none", residual: int | None = None
) -> Link | None:
    """What `project` computes, as a link; None if `wna16` does not compute all of it."""
    if isinstance(linear, Adapted) and not linear.selection.active:
        linear = linear.part
    if not isinstance(linear, QuantizedLinear) or not isinstance(linear.form, PackedWeight):
        return None
    if norm is None:
        return Link(linear.form, linear.bias, activation=activation, residual=residual)
    if not isinstance(norm, RMSNorm):
        return None
    return Link(linear.form, linear.bias, norm.weight, norm.eps, activation, residual)
