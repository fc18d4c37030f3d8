"""Grouped-query attention. The context decides where keys and values are stored."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpbus.kernels.ops.arguments import HALVES, has_kernels
from warpbus.kernels.ops.head_norm import head_norm
from warpbus.kernels.ops.wna16_chain import ChainLink
from warpbus.models.config import RopeConfig
from warpbus.models.layer_spec import AttentionSpec, LayerSpec
from warpbus.models.layers.chain import link_of
from warpbus.models.layers.indexer import IndexFeatures, select_tokens
from warpbus.models.layers.linear import Norm, RMSNorm, project
from warpbus.models.layers.packed_attention import Extents, can_pack, packed_attention
from warpbus.models.layers.rope import rotate

if TYPE_CHECKING:
    from warpbus.models.layers.latent_attention import LatentAttention


Stored = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From a layer's index and its keys and values `[batch, tokens, kv_heads, head_dim]`, to keys and values."""


class AttentionContext(Protocol):
    """The context that a layer attends to: the same sequence (`CausalAttention`), or a cache that the engine keeps."""

    def attend(self, layer: int, q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, positions_bt: Tensor) -> Tensor:
        """Attend causally, after storing the new keys and values if there is a cache.

        Args:
            layer: the index of the layer, for contexts that keep a cache.
            q_bthd: rotated queries `[batch, tokens, heads, head_dim]`.
            k_bthd: rotated keys `[batch, tokens, kv_heads, head_dim]`.
            v_bthd: values `[batch, tokens, kv_heads, value_dim]`; `value_dim` differs from `head_dim` in MLA only.
            positions_bt: integer positions `[batch, tokens]` of these tokens in their sequences.

        Returns:
            `[batch, tokens, heads, value_dim]`.
        """
        ...


class FusedAttention(ABC):
    """A context whose kernels apply RoPE, store keys and values, and attend; its input is the projections."""

    @abstractmethod
    def attend_fused(self, layer: int, qkv_btr: Tensor) -> Tensor:
        """Apply RoPE to queries and keys, store the new keys and values, attend causally.

        Args:
            layer: the index of the layer.
            qkv_btr: `[batch, tokens, (heads + 2 kv_heads) head_dim]`, queries, keys and values, not rotated.

        Returns:
            `[batch, tokens, heads head_dim]`.
        """

    @abstractmethod
    def attend_latent(
        self,
        layer: int,
        attention: "LatentAttention",
        q_bthd: Tensor,
        latent_btd: Tensor,
        index: IndexFeatures | None,
    ) -> Tensor:
        """Multi-head latent attention: norm the new latents, apply RoPE, store the latents, attend causally.

        Args:
            layer: the index of the layer.
            attention: expands latents to keys and values, or absorbs the expansion into queries and outputs.
            q_bthd: `[batch, tokens, heads, nope_dim + rope_dim]`, not rotated.
            latent_btd: latents and rotary keys `[batch, tokens, kv_rank + rope_dim]`, neither normed nor rotated.
            index: of the layer's indexer, not rotated; None if it has none.

        Returns:
            `[batch, tokens, heads value_dim]`.
        """


class WholeAttention(ABC):
    """A context of whole sequences, which may attend to selected tokens only (see `IndexerSpec`)."""

    stored: "Stored | None" = None
    """Gives keys and values of a layer as a KV cache would; None: as they are."""

    _selected_btt: Tensor | None = None  # by the last layer with an indexer

    @abstractmethod
    def visible(self, positions_bt: Tensor) -> Tensor:
        """The tokens that each token may attend to, bool, broadcast to `[batch, tokens, tokens]`."""

    def attend_selected(
        self,
        q_bthd: Tensor,
        k_bthd: Tensor,
        v_bthd: Tensor,
        positions_bt: Tensor,
        top_k: int,
        index: IndexFeatures | None,
    ) -> Tensor:
        """As `AttentionContext.attend`, to the tokens that an indexer selects.

        Args:
            top_k: tokens that it selects at most.
            index: of the layer's indexer, rotated; None: the selection of the last layer that had an indexer.
        """
        visible = self.visible(positions_bt)
        if index is not None:
            self._selected_btt = select_tokens(index.q, index.weights, index.k, visible, top_k)
        assert self._selected_btt is not None
        return attend_masked(q_bthd, k_bthd, v_bthd, self._selected_btt[:, None])


class CausalAttention(WholeAttention):
    """Each token attends to itself and to the tokens before it in its row; there is no KV cache.

    Args:
        documents_bt: integers `[batch, tokens]`: the document of each token, for rows that pack several documents. A
            token attends only to its own document.
        prompts_bt: integers `[batch, tokens]`: the prompt length of each token's document. Tokens of a prompt attend to
            each other in both directions (see `prompt_lengths`). Positions have to start at 0 in each document.
    """

    def __init__(self, documents_bt: Tensor | None = None, prompts_bt: Tensor | None = None) -> None:
        self.documents_bt = documents_bt
        self.prompts_bt = prompts_bt
        # Computed by the first layer and shared by all; only one of the two is needed.
        self._mask: Tensor | None = None
        self._extents: Extents | None = None

    def attend(self, layer: int, q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, positions_bt: Tensor) -> Tensor:
        if self.stored is not None:
            k_bthd, v_bthd = self.stored(layer, k_bthd, v_bthd)
        # The variable-length kernel takes keys and values of one size.
        extents = self.extents(q_bthd) if q_bthd.shape[-1] == v_bthd.shape[-1] else None
        if extents is not None:
            return packed_attention(q_bthd, k_bthd, v_bthd, extents)
        return attend_masked(q_bthd, k_bthd, v_bthd, self.reached(positions_bt))

    def visible(self, positions_bt: Tensor) -> Tensor:
        mask = self.reached(positions_bt)
        if mask is not None:
            return mask[:, 0]
        tokens = positions_bt.shape[1]
        return torch.ones(1, tokens, tokens, dtype=torch.bool, device=positions_bt.device).tril()

    def extents(self, q_bthd: Tensor) -> Extents | None:
        """The bounds of the documents, if rows are packed and the variable-length kernel can be used."""
        if self.documents_bt is None or self.prompts_bt is not None or not can_pack(q_bthd):
            return None
        self._extents = self._extents or Extents.of(self.documents_bt)
        return self._extents

    def reached(self, positions_bt: Tensor) -> Tensor | None:
        """The mask of keys that each query attends to, `[batch, 1, tokens, tokens]`; None for a causal mask."""
        if self.prompts_bt is not None:
            return self._reached(positions_bt, self.prompts_bt)
        if self._mask is None and self.documents_bt is not None:
            tokens = self.documents_bt.shape[1]
            causal = torch.ones(tokens, tokens, dtype=torch.bool, device=self.documents_bt.device).tril()
            self._mask = ((self.documents_bt[:, :, None] == self.documents_bt[:, None, :]) & causal)[:, None]
        return self._mask

    def of_layer(self, layer: int, positions_bt: Tensor) -> Self:
        """The context for one layer: its layer index is ignored, and the mask that layers share is computed already."""
        del layer
        if self.prompts_bt is None:
            self.reached(positions_bt)
        return self

    def with_prompts(self, prompts_bt: Tensor) -> Self:
        """A copy of the context with these prompt lengths."""
        other = copy.copy(self)
        other.prompts_bt = prompts_bt
        return other

    def _reached(self, positions_bt: Tensor, prompts_bt: Tensor) -> Tensor:
        """The mask of keys that each query attends to; computed per layer to save memory in large batches."""
        reach = torch.maximum(positions_bt, prompts_bt - 1)
        mask = positions_bt[:, None, :] <= reach[:, :, None]
        if self.documents_bt is not None:
            mask &= self.documents_bt[:, :, None] == self.documents_bt[:, None, :]
        return mask[:, None]


class BranchedAttention(WholeAttention):
    """Tree attention of one level: each row is the common prefix of several texts, followed by their continuations.

    A token attends to the prefix and to the tokens before it in its own continuation; the prefix is computed once.

    Args:
        branches_bt: integers `[batch, tokens]`: 0 for the prefix, else the number of the token's continuation.
            Positions are those in the text.
    """

    def __init__(self, branches_bt: Tensor) -> None:
        self.branches_bt = branches_bt
        self._mask: Tensor | None = None

    def attend(self, layer: int, q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, positions_bt: Tensor) -> Tensor:
        if self.stored is not None:
            k_bthd, v_bthd = self.stored(layer, k_bthd, v_bthd)
        return attend_masked(q_bthd, k_bthd, v_bthd, self.visible(positions_bt)[:, None])

    def visible(self, positions_bt: Tensor) -> Tensor:
        if self._mask is None:
            of_key, of_query = self.branches_bt[:, None, :], self.branches_bt[:, :, None]
            mask = (of_key == 0) | (of_key == of_query)
            self._mask = mask.logical_and_(positions_bt[:, None, :] <= positions_bt[:, :, None])
        return self._mask


def attend_masked(q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention of grouped queries; causal if there is no mask, else to the keys where the mask is True."""
    if v_bthd.requires_grad:
        v_bthd = v_bthd.contiguous()  # a view would keep the whole fused projection for the backward pass
    q, k, v = (x.transpose(1, 2) for x in (q_bthd, k_bthd, v_bthd))
    group = q.shape[1] // k.shape[1]
    if group > 1 and q.device.type == "cuda" and (mask is not None or _trained_wide(q)):
        # torch's fused kernels support a mask or grouped queries, not both, and grouped queries only in 16 bits.
        # Without them all scores would be materialized, and kept for the backward pass.
        k, v, group = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1), 1
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=group > 1)
    return attended.transpose(1, 2)


def _trained_wide(q: Tensor) -> bool:
    return q.requires_grad and q.dtype not in HALVES and not torch.is_autocast_enabled("cuda")


class Attention(nn.Module):
    """Projections and rotary positions around a context."""

    def __init__(self, spec: LayerSpec, rope: RopeConfig) -> None:
        super().__init__()
        assert isinstance(spec.attention, AttentionSpec)
        self.spec = spec.attention
        self.rope = rope
        qkv, o = spec.reading("attention.normed")[0], spec.reading("attention.attended")[0]
        self.qkv = nn.Linear(qkv.shape[1], qkv.shape[0], bias=qkv.bias)
        self.o = nn.Linear(o.shape[1], o.shape[0], bias=o.bias)
        self.q_norm = RMSNorm(self.spec.head_dim, spec.norm.eps) if self.spec.qk_norm else None
        self.k_norm = RMSNorm(self.spec.head_dim, spec.norm.eps) if self.spec.qk_norm else None

    @property
    def output(self) -> nn.Module:
        """The projection back to the residual stream."""
        return self.o

    def inner(
        self,
        x_btd: Tensor,
        layer: int,
        positions_bt: Tensor | None,
        angles: tuple[Tensor, Tensor] | None,
        context: AttentionContext | FusedAttention,
        *,
        norm: Norm | None = None,
        projected: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """The input of `o`: attention over `norm(x)`, `[batch, tokens, heads head_dim]`.

        With a `FusedAttention`, positions and angles are ignored: the context has its own. The results of `as_links`
        may be given as `projected`, if they are computed already.
        """
        qkv = project(self.qkv, x_btd, norm=norm) if projected is None else projected[0]
        if isinstance(context, FusedAttention):
            return context.attend_fused(layer, self._normed(qkv))
        assert positions_bt is not None
        assert angles is not None
        q, k, v = self._heads(qkv)
        q, k = (rotate(x, angles, self.rope.interleaved, self.rope.planes) for x in (q, k))
        return context.attend(layer, q, k, v, positions_bt).flatten(-2)

    def as_links(self, norm: Norm) -> list[ChainLink | None]:
        """The projections of `norm(x)` as links of a chain; None where one is of another kind."""
        return [link_of(self.qkv, norm=norm)]

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by head; queries and keys are normed if the model has QK norms."""
        parts = qkv.split(self.spec.qkv_rows, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.spec.head_dim)) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _normed(self, qkv: Tensor) -> Tensor:
        """The fused projection; its queries and keys are normed if the model has QK norms. It may be overwritten."""
        if self.q_norm is None or self.k_norm is None:
            return qkv
        weights = self.q_norm.weight, self.k_norm.weight
        if has_kernels(qkv) and qkv.is_contiguous() and all(weight.dtype == qkv.dtype for weight in weights):
            head_norm(qkv, *weights, self.spec.num_heads, self.q_norm.eps)
            return qkv
        return torch.cat([part.flatten(-2) for part in self._heads(qkv)], dim=-1)
