"""Attention of a chunk of one prompt, by PyTorch's kernels.

From Hopper on, cuDNN's kernel takes half as long as FlashAttention-2. But it plans each new shape for 40 ms on the host
before the first launch, so that the number of tokens is rounded up; and it knows a causal mask only for as many queries
as keys. So a long chunk behind many cached tokens attends to these and to the rest in two parts.
"""

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional as F

from warpbus.cuda.capabilities import capabilities
from warpbus.cuda.jit import architecture
from warpbus.kernels.ops.arguments import HALVES
from warpbus.kernels.ops.attention_merge import merge_attention

LONGEST_ALONE = 1024
"""Tokens: a chunk with as many and nothing cached before it is faster by itself, in cuDNN's kernel."""

_LARGEST_HEAD = 256  # features that cuDNN's kernel takes
_ROUNDING, _ROUNDING_IN_PARTS = 256, 512  # tokens of a plan of cuDNN are multiples of it
_PART = 2048  # the cached tokens of a plan are multiples of it, and a chunk in two parts has at least as many tokens


def attend_chunk(
    q_thd: Tensor,
    k_thd: Tensor,
    v_thd: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    selected: Tensor | None = None,
) -> Tensor:
    """Attention of `[tokens, heads, head_dim]` to all keys; or causal, where the last query is that of the last key.

    Args:
        scale: of the scores; `head_dim ** -0.5` by default.
        selected: bool `[tokens, keys]`, the keys that a query attends to.
    """
    tokens, keys = len(q_thd), len(k_thd)
    if selected is None and causal and scale is None and attends_in_parts(q_thd, tokens, keys):
        return _attend_in_parts(q_thd, k_thd, v_thd)
    if selected is None and causal and tokens == keys:
        q_thd, k_thd, v_thd = (rounded_up(x) for x in (q_thd, k_thd, v_thd))
    scale = q_thd.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.transpose(0, 1)[None] for x in (q_thd, k_thd, v_thd))
    if selected is not None:
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=selected, scale=scale)
    elif causal and tokens != keys:
        attended = _attend_to_end(q, k, v, scale)
    else:
        grouped = q.shape[1] != k.shape[1]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped, scale=scale)
    return attended[0].transpose(0, 1)[:tokens]


def rounded_up(x: Tensor) -> Tensor:
    """`[tokens, ...]` with zeros behind it, as `attend_chunk` rounds up a chunk with nothing cached before it: no token
    of the chunk attends to them. As it is where no kernel plans shapes."""
    if len(x) < LONGEST_ALONE or not _plans_shapes(x):
        return x
    return _padded(x, -(-len(x) // _ROUNDING) * _ROUNDING)


def attends_in_parts(q_thd: Tensor, tokens: int, keys: int) -> bool:
    """Whether a chunk of so many tokens, with queries like these, attends to so many keys in two parts."""
    long = tokens >= _PART and keys - tokens >= _PART
    return long and q_thd.shape[-1] <= _LARGEST_HEAD and _plans_shapes(q_thd)


def _plans_shapes(x: Tensor) -> bool:
    """Whether PyTorch chooses cuDNN's kernel for attention in the dtype and on the device of x."""
    if not x.is_cuda or x.dtype not in HALVES or not capabilities(architecture(x.device)).tma:
        return False
    return torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cudnn.is_available()


def _padded(x: Tensor, rows: int) -> Tensor:
    """`[tokens, ...]` with zeros behind it, `[rows, ...]`."""
    if rows == len(x):
        return x
    padded = x.new_zeros(rows, *x.shape[1:])
    padded[: len(x)] = x
    return padded


def _attend_in_parts(q_thd: Tensor, k_thd: Tensor, v_thd: Tensor) -> Tensor:
    """Causal attention of the last tokens of a sequence to all of it: to the first cached tokens, and to the rest."""
    tokens = len(q_thd)
    before = (len(k_thd) - tokens) // _PART * _PART
    padded = _padded(q_thd, -(-tokens // _ROUNDING_IN_PARTS) * _ROUNDING_IN_PARTS)
    padded, q, k, v = (x.transpose(0, 1)[None] for x in (padded, q_thd, k_thd, v_thd))
    cudnn, flash = (
        torch.ops.aten._scaled_dot_product_cudnn_attention,
        torch.ops.aten._scaled_dot_product_flash_attention,
    )
    first, first_sums = cudnn(padded, k[:, :, :before], v[:, :, :before], None, True)[:2]
    # Of different lengths, causal means for this operator that the last query is that of the last key.
    rest, rest_sums = flash(q, k[:, :, before:], v[:, :, before:], 0.0, True)[:2]
    return merge_attention(
        first[0].transpose(0, 1)[:tokens], rest[0].transpose(0, 1), first_sums[0, :, :tokens, 0], rest_sums[0]
    )


def _attend_to_end(q_bhtd: Tensor, k_bhtd: Tensor, v_bhtd: Tensor, scale: float) -> Tensor:
    """Causal attention of the last tokens of a sequence, `[batch, heads, tokens, head_dim]`, to all of it.

    What `torch.nn.attention.bias.causal_lower_right` is for, which takes a second or two to load.
    """
    tokens, end, size = q_bhtd.shape[2], k_bhtd.shape[2], q_bhtd.shape[3]
    grouped = q_bhtd.shape[1] != k_bhtd.shape[1]
    if q_bhtd.is_cuda and size % 8 == 0:
        params = SDPAParams(q_bhtd, k_bhtd, v_bhtd, None, 0.0, False, grouped)
        if can_use_flash_attention(params):
            # As in `_attend_in_parts`.
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            attended: Tensor = flash(q_bhtd, k_bhtd, v_bhtd, 0.0, True, scale=scale)[0]
            return attended
    mask = causal_mask(tokens, end, q_bhtd.device)
    return F.scaled_dot_product_attention(q_bhtd, k_bhtd, v_bhtd, attn_mask=mask, enable_gqa=grouped, scale=scale)


def causal_mask(tokens: int, end: int, device: torch.device) -> Tensor:
    """The mask of the last tokens of a sequence of `end` tokens, bool `[tokens, end]`."""
    return torch.ones(tokens, end, dtype=torch.bool, device=device).tril(end - tokens)
