"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1).

Each token has one latent, from which keys and values of all heads are projected, and one rotary key for all heads.
There are two forms with the same results. Whole prompts expand the latents to keys and values of every head. Decoding
absorbs the projection `kv_b` into queries and outputs instead: attention then has one KV head, whose keys are the
latent and the rotary key, and whose values are the latent, which is all that the KV cache stores.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from warpbus.kernels.ops.arguments import has_kernels
from warpbus.kernels.ops.mla_keys import mla_keys
from warpbus.kernels.ops.wna16_chain import ChainLink
from warpbus.models.config import RopeConfig
from warpbus.models.latent_spec import LatentAttentionSpec
from warpbus.models.layer_spec import LayerSpec
from warpbus.models.layers.attention import AttentionContext, FusedAttention, WholeAttention
from warpbus.models.layers.chain import link_of
from warpbus.models.layers.indexer import Indexer, IndexFeatures
from warpbus.models.layers.linear import Norm, RMSNorm, project
from warpbus.models.layers.rope import rotate


class LatentAttention(nn.Module):
    """Projections and rotary positions around a context. The linears have the names in the layer's table."""

    def __init__(self, spec: LayerSpec, rope: RopeConfig) -> None:
        super().__init__()
        assert isinstance(spec.attention, LatentAttentionSpec)
        self.spec = spec.attention
        self.rope = rope
        made = {
            matrix.name: nn.Linear(matrix.shape[1], matrix.shape[0], bias=matrix.bias)
            for matrix in spec.matrices
            if matrix.name.startswith("attention.")
        }
        self.q, self.kv_a = made.get("attention.q"), made.get("attention.kv_a")
        self.qkv_a, self.q_b = made.get("attention.qkv_a"), made.get("attention.q_b")
        self.kv_b, self.o = made["attention.kv_b"], made["attention.o"]
        rank, eps = self.spec.query_rank, self.spec.norm_eps
        self.q_a_norm = None if rank is None else RMSNorm(rank, eps)
        self.kv_a_norm = RMSNorm(self.spec.kv_rank, eps)
        self.indexer: Indexer | None = None
        if self.spec.indexer is not None and not self.spec.indexer.shared:
            assert rank is not None
            self.indexer = Indexer(self.spec.indexer, rank, spec.hidden_size)

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
        """The input of `o`: attention over `norm(x)`, `[batch, tokens, heads value_dim]`.

        With a `FusedAttention`, positions and angles are ignored: the context has its own. The results of `as_links`
        may be given as `projected`, if they are computed already.
        """
        if projected is None:
            q, latent, index = self._projected(x_btd, norm)
        else:
            latent, index = projected[0][..., -self.spec.head_dim :], None
            q = projected[1].unflatten(-1, (self.spec.num_heads, -1))
        if isinstance(context, FusedAttention):
            return context.attend_latent(layer, self, q, latent, index)
        assert positions_bt is not None
        assert angles is not None
        latent = self.normed(latent)
        q = torch.cat((q[..., : self.spec.nope_dim], self._rotated(q[..., self.spec.nope_dim :], angles)), dim=-1)
        rotary = self._rotated(latent[..., None, self.spec.kv_rank :], angles)[..., 0, :]
        k, v = self.expand(torch.cat((latent[..., : self.spec.kv_rank], rotary), dim=-1))
        if self.spec.indexer is None:
            return context.attend(layer, q, k, v, positions_bt).flatten(-2)
        if index is not None:
            keys = self._rotated(index.k[..., None, :], angles)[..., 0, :]
            index = replace(index, q=self._rotated(index.q, angles), k=keys)
        assert isinstance(context, WholeAttention)
        return context.attend_selected(q, k, v, positions_bt, self.spec.indexer.top_k, index).flatten(-2)

    def as_links(self, norm: Norm) -> list[ChainLink | None]:
        """The projections of `norm(x)` as links of a chain; None where one is of another kind."""
        if self.indexer is not None or self.q_a_norm is None:
            return [None]
        return [link_of(self.qkv_a, norm=norm), link_of(self.q_b, norm=self.q_a_norm)]

    def latent(self, stage: str, x_btd: Tensor, norm: Norm) -> Tensor:
        """The input of the matrix that reads "attention.query_latent" or "attention.kv_latent".

        Args:
            x_btd: the input of the sublayer, `[batch, tokens, hidden]`.
            norm: of the sublayer.

        Returns:
            `[batch, tokens, query_rank]` or `[batch, tokens, kv_rank]`.
        """
        queries, latent = self._first(norm(x_btd), None)
        if stage == "attention.query_latent":
            assert self.q_a_norm is not None
            return self.q_a_norm(queries)
        return self.kv_a_norm(latent[..., : self.spec.kv_rank])

    def normed(self, latent: Tensor) -> Tensor:
        """Projected latents and rotary keys, `[..., kv_rank + rope_dim]`, with the norm applied to the latents."""
        compressed, rotary = latent.split((self.spec.kv_rank, self.spec.rope_dim), dim=-1)
        return torch.cat((self.kv_a_norm(compressed), rotary), dim=-1)

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every head.

        Args:
            latent: normed latents and rotated rotary keys, `[..., kv_rank + rope_dim]`.

        Returns:
            `[..., heads, nope_dim + rope_dim]` and `[..., heads, value_dim]`.
        """
        spec = self.spec
        compressed, rotary = latent.split((spec.kv_rank, spec.rope_dim), dim=-1)
        expanded = project(self.kv_b, compressed).unflatten(-1, (spec.num_heads, -1))
        nope, values = expanded.split((spec.nope_dim, spec.value_dim), dim=-1)
        if latent.dim() == 2 and latent.is_cuda and has_kernels(latent):
            return mla_keys(expanded, rotary, spec.nope_dim), values
        shared = rotary[..., None, :].expand(*nope.shape[:-1], -1)
        keys = torch.cat((nope, shared), dim=-1)
        return keys, values

    def absorb(self, q: Tensor) -> Tensor:
        """Queries of the absorbed form.

        Args:
            q: rotated queries `[tokens, heads, nope_dim + rope_dim]`.

        Returns:
            `[tokens, heads, kv_rank + rope_dim]`; their products with latents and rotary keys are those of `q` with
            the keys of `expand`.
        """
        nope, rotary = q.split((self.spec.nope_dim, self.spec.rope_dim), dim=-1)
        of_keys = self.by_head[:, : self.spec.nope_dim]
        return torch.cat((torch.einsum("thn,hnr->thr", nope, of_keys), rotary), dim=-1)

    def outputs(self, attended: Tensor) -> Tensor:
        """The heads' outputs `[tokens, heads, value_dim]` from weighted sums of latents `[tokens, heads, kv_rank]`."""
        of_values = self.by_head[:, self.spec.nope_dim :]
        return torch.einsum("thr,hvr->thv", attended, of_values)

    @property
    def by_head(self) -> Tensor:
        """The weight of `kv_b`, `[heads, nope_dim + value_dim, kv_rank]`, which is never quantized after loading."""
        return self.kv_b.weight.unflatten(0, (self.spec.num_heads, -1))

    def _projected(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor, IndexFeatures | None]:
        """The projections of hidden states; latents are not normed, and nothing is rotated.

        Returns:
            queries `[..., heads, nope_dim + rope_dim]`; latents and rotary keys `[..., kv_rank + rope_dim]`; and the
            features of the indexer, if there is one.
        """
        index = None
        if self.indexer is not None and norm is not None:
            x, norm = norm(x), None
        queries, latent = self._first(x, norm)
        if self.indexer is not None and self.q_a_norm is not None and self.q_b is not None:
            queries = self.q_a_norm(queries)
            index = self.indexer(x, queries)
            queries = project(self.q_b, queries)
        elif self.q_b is not None:
            queries = project(self.q_b, queries, norm=self.q_a_norm)
        return queries.unflatten(-1, (self.spec.num_heads, -1)), latent, index

    def _first(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """The projections of the hidden states: of queries (their latent, if they have one), and of keys and values."""
        if self.qkv_a is not None:
            queries, latent = project(self.qkv_a, x, norm=norm).tensor_split((-self.spec.head_dim,), dim=-1)
            return queries, latent
        assert self.q is not None
        assert self.kv_a is not None
        return project(self.q, x, norm=norm), project(self.kv_a, x, norm=norm)

    def _rotated(self, x_bthd: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(x_bthd, angles, self.rope.interleaved)
