"""The products of a layer in one launch, for a few tokens: what follows attention, and the next layer's projections."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from warpbus.kernels.ops.packed import PackedWeight
from warpbus.kernels.ops.wna16_chain import MOST_ROWS, ChainLink, Element, fits, wna16_chain
from warpbus.models.layers.adapted import Adapted
from warpbus.models.layers.linear import MLP, Norm, QuantizedLinear, RMSNorm


@dataclass(frozen=True)
class LayerChain:
    """The products of a layer as elements of `wna16_chain`.

    Attributes:
        entry: the projections of the layer's input, up to attention.
        o: of what attention has computed; its residual, which is not given here, is the layer's input.
        rest: the MLP or the experts, from the result of `o` to the layer's output.
    """

    entry: tuple[ChainLink, ...]
    o: ChainLink
    rest: tuple[Element, ...]

    @classmethod
    def of(
        cls, x: Tensor, entry: Sequence[ChainLink | None], o: ChainLink | None, rest: Sequence[Element | None]
    ) -> Self | None:
        """The chain of a layer with input x `[rows, hidden]`; None if an element is missing, or if it does not fit."""
        elements = [element for element in (o, *rest, *entry) if element is not None]
        if o is None or len(elements) <= len(rest) + len(entry) or not fits(x, elements):
            return None
        first = tuple(link for link in entry if link is not None)
        return cls(first, o, tuple(element for element in rest if element is not None))

    def leave_attention(self, inner: Tensor, x: Tensor, following: Self | None) -> tuple[Tensor, list[Tensor] | None]:
        """The output of the layer, and the projections of it that the following layer needs.

        Args:
            inner: the result of attention, `[batch, tokens, heads value_dim]`.
            x: the input of the layer, `[batch, tokens, hidden]`.
            following: the chain of the next layer. Without one, or with another scheme, its projections are None.
        """
        rows = x.flatten(0, -2)
        elements = [replace(self.o, residual=rows), *self.rest]
        joined = following is not None and following.o.weight.scheme == self.o.weight.scheme
        if following is not None and joined:
            elements += following.entry
        outer = x.shape[:-1]
        results = [result.view(*outer, -1) for result in wna16_chain(inner.flatten(0, -2), elements)]
        own = 1 + len(self.rest)
        return results[own - 1], results[own:] if joined else None


def may_chain(x: Tensor) -> bool:
    """Whether layers with input x `[batch, tokens, hidden]` may have chains, whatever their weights are."""
    return x.is_cuda and x.shape[:-1].numel() <= MOST_ROWS and not torch.is_grad_enabled()


def link_of(
    linear: nn.Module | None, *, norm: Norm | None = None, activation: str = "none", residual: int | None = None
) -> ChainLink | None:
    """What `project` computes, as an element of a chain; None if `wna16` does not compute all of it.

    Args:
        residual: the element whose result is added.
    """
    if isinstance(linear, Adapted) and not linear.selection.active:
        linear = linear.part
    if not isinstance(linear, QuantizedLinear) or not isinstance(linear.form, PackedWeight):
        return None
    if norm is None:
        return ChainLink(linear.form, linear.bias, activation=activation, residual=residual)
    if not isinstance(norm, RMSNorm):
        return None
    return ChainLink(linear.form, linear.bias, norm.weight, norm.eps, activation, residual)


def mlp_links(mlp: MLP, norm: Norm) -> list[ChainLink | None]:
    """An MLP as links of a chain, behind the result that is its residual; None where a matrix is of another kind."""
    gate_up = getattr(mlp, "gate_up", None)  # without a gate it has another name
    return [link_of(gate_up, norm=norm, activation="swiglu"), link_of(mlp.down, residual=0)]
