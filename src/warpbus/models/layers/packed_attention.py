"""Variable-length causal attention for packed rows on a GPU, without a mask (FlashAttention-2; Dao, 2023).

This calls torch's FlashAttention operator directly. `scaled_dot_product_attention` would need a mask over whole rows,
which costs more time and memory, and the arguments of `torch.nn.attention.varlen` change between versions more often
than those of the operators. If the operators have an unknown signature, the masked attention is used instead.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpbus.kernels.operators import autocast
from warpbus.kernels.ops.arguments import HALVES, gpu_has_kernels

_LARGEST_HEAD = 256

# Positional arguments of the operators in torch 2.11 and 2.13.
_SIZES = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal")
_OPERATORS = {
    "_flash_attention_forward": (("query", "key", "value", *_SIZES, "return_debug_mask"), 5),
    "_flash_attention_backward": (
        ("grad_out", "query", "key", "value", "out", "logsumexp", *_SIZES, "rng_state", "unused"),
        3,
    ),
}


@dataclass(frozen=True)
class Extents:
    """The bounds of documents in packed rows, with the rows concatenated.

    Attributes:
        bounds: int32 `[documents + 1]`: the start of each document, and the end of the last.
        longest: tokens of the longest document.
        tokens: tokens of all documents.
    """

    bounds: Tensor
    longest: int
    tokens: int

    @classmethod
    def of(cls, documents_bt: Tensor) -> "Extents":
        """From the document number of each token, `[batch, tokens]`. This synchronizes with the GPU."""
        begins = torch.ones_like(documents_bt, dtype=torch.bool)
        begins[:, 1:] = documents_bt[:, 1:] != documents_bt[:, :-1]
        starts = begins.flatten().nonzero().flatten()
        bounds = torch.cat((starts, starts.new_full((1,), documents_bt.numel())))
        return cls(bounds.int(), int(bounds.diff().max()), documents_bt.numel())

    def behind(self, prefix: int) -> "Prefixed":
        """The bounds with `prefix` tokens prepended to each document."""
        count = len(self.bounds) - 1
        numbers = torch.arange(count + 1, device=self.bounds.device)
        bounds = self.bounds + prefix * numbers
        moved = torch.repeat_interleave(prefix * numbers[1:], self.bounds.diff(), output_size=self.tokens)
        own = torch.arange(self.tokens, device=moved.device) + moved
        prefixes = (bounds[:-1, None] + torch.arange(prefix, device=moved.device)).flatten()
        return Prefixed(bounds.int(), self.longest + prefix, own, prefixes)


@dataclass(frozen=True)
class Prefixed:
    """The bounds of documents with a prefix prepended to each.

    Attributes:
        bounds, longest: as `Extents`, including the prefixes.
        own, prefixes: int64, the indices of the documents' own tokens, and of the prefix tokens.
    """

    bounds: Tensor
    longest: int
    own: Tensor
    prefixes: Tensor

    def join(self, prefix: Tensor, tokens: Tensor) -> Tensor:
        """Prepend `[prefix tokens, ...]` to each document of `[tokens, ...]`."""
        joined = tokens.new_empty(len(self.own) + len(self.prefixes), *tokens.shape[1:])
        repeated = prefix.to(tokens.dtype).repeat(len(self.bounds) - 1, *(1 for _ in tokens.shape[1:]))
        return joined.index_copy(0, self.own, tokens).index_copy(0, self.prefixes, repeated)


def can_pack(q: Tensor) -> bool:
    """Whether the kernel supports queries `[..., head_dim]`: 16 bits (also by autocast) on a GPU of sm_80 or later, and
    not under `torch.compile`, where the number of documents is unknown."""
    if q.device.type != "cuda" or torch.compiler.is_compiling() or not gpu_has_kernels(q.device):
        return False
    if not operators_are_known():
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else q.dtype
    return dtype in HALVES and q.shape[-1] <= _LARGEST_HEAD and q.shape[-1] % 8 == 0


@functools.cache
def operators_are_known() -> bool:
    """Whether torch's operators, which are not part of its documented interface, have the expected signatures."""
    for name, (arguments, results) in _OPERATORS.items():
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:
            return False
        schema = packet.default._schema
        positional = tuple(argument.name for argument in schema.arguments if not argument.kwarg_only)
        if positional != arguments or len(schema.returns) != results:
            return False
    return True


def packed_attention(
    q_bthd: Tensor,
    k_bthd: Tensor,
    v_bthd: Tensor,
    extents: Extents,
    prefixed: Prefixed | None = None,
    prefix: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Causal attention inside each document; it can be differentiated once.

    Args:
        q_bthd: `[batch, tokens, heads, head_dim]`, accepted by `can_pack`.
        k_bthd, v_bthd: `[batch, tokens, kv_heads, head_dim]`.
        extents: the bounds of the documents.
        prefixed, prefix: `extents.behind(prefix tokens)`, and keys and values `[prefix tokens, kv_heads, head_dim]`
            that all tokens attend to.

    Returns:
        `[batch, tokens, heads, head_dim]` in 16 bits.
    """
    # Contiguous: a view would keep the whole fused projection for the backward pass.
    q, k, v = (autocast(x).flatten(0, 1).contiguous() for x in (q_bthd, k_bthd, v_bthd))
    bounds, longest = extents.bounds, extents.longest
    if prefixed is not None and prefix is not None:
        k, v = prefixed.join(prefix[0], k), prefixed.join(prefix[1], v)
        bounds, longest = prefixed.bounds, prefixed.longest
    attended: Tensor = _PackedAttention.apply(q, k, v, extents.bounds, bounds, extents.longest, longest)
    return attended.view(q_bthd.shape)


class _PackedAttention(torch.autograd.Function):
    """If a document has more keys than queries, its last query attends to all keys, the one before to one less, ..."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *sizes: Any) -> Tensor:
        out, sums, state, unused, _ = torch.ops.aten._flash_attention_forward(q, k, v, *sizes, 0.0, True, False)
        ctx.save_for_backward(q, k, v, out, sums, *sizes[:2], state, unused)
        ctx.longest = sizes[2:]
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, q_bounds, k_bounds, state, unused = ctx.saved_tensors
        sizes = q_bounds, k_bounds, *ctx.longest
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            gradient.contiguous(), q, k, v, out, sums, *sizes, 0.0, True, state, unused
        )
        return dq, dk, dv, None, None, None, None
