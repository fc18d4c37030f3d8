"""`scaled_dot_product_attention` on a remote GPU: the fused kernel that PyTorch would take there.

PyTorch chooses among fused kernels by looking at the GPU; a client has none, so that the tenant is asked, once for each
kind of call. The kernels and their derivatives are ordinary operators from there on.
"""

from enum import IntEnum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.pool.client.session import Session, current

_aten = torch.ops.aten
_ALIGNMENT = 16  # elements


class _Backend(IntEnum):
    """PyTorch's numbers for what computes attention."""

    MATH = 0
    FLASH = 1
    EFFICIENT = 2
    CUDNN = 3


_choices: WeakKeyDictionary[Session, dict[Any, int]] = WeakKeyDictionary()


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's function of this name, of the same arguments and result."""
    backend = _choose(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    learned = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    on_cpu = current().kind == "cpu"
    if enable_gqa and (differentiated if on_cpu else backend != _Backend.FLASH):
        # On a GPU flash attention alone has groups of queries; a CPU pool refuses them in the backward. The others take
        # keys and values once for each query: that is little beside the scores of all heads, which attention by single
        # operators would write out.
        groups = query.shape[-3] // key.shape[-3]
        key, value, enable_gqa = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3), False
        backend = _choose(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if learned and backend == _Backend.FLASH:
        backend = _Backend.MATH  # flash attention has no derivative by its mask
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        # The fused kernels add their mask.
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, zero, float("-inf"))
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if backend == _Backend.FLASH and on_cpu:
        found = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )
        return found[0]
    if backend == _Backend.FLASH and query.shape[-1] % 8 == 0:
        return _aten._scaled_dot_product_flash_attention(query, key, value, **_flash(options))[0]
    # With dropout these two give their random state as tensors of the CPU, which cannot be elsewhere.
    if backend in (_Backend.EFFICIENT, _Backend.CUDNN) and not dropout_p:
        if attn_mask is not None:
            attn_mask = _aligned(attn_mask)
        with_log = learned or differentiated
        fused = (
            _aten._scaled_dot_product_efficient_attention
            if backend == _Backend.EFFICIENT
            else _aten._scaled_dot_product_cudnn_attention
        )
        return fused(query, key, value, attn_mask, with_log, **options)[0]
    found = _aten._scaled_dot_product_attention_math(query, key, value, attn_mask, enable_gqa=enable_gqa, **options)
    return found[0]


def _flash(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "return_debug_mask": False}


def _aligned(mask: Tensor) -> Tensor:
    """The fused kernels read their mask 16 bytes at a time: its rows begin at multiples of so many elements."""
    columns = mask.shape[-1]
    if mask.stride(-1) == 1 and all(step % _ALIGNMENT == 0 for step in mask.stride()[:-1]):
        return mask
    return F.pad(mask, (0, -columns % _ALIGNMENT))[..., :columns]


def _choose(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: Any) -> int:
    choices = _choices.setdefault(current(), {})
    dropout_p, is_causal, scale, enable_gqa = options
    parts = (query, key, value, mask)
    needs = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in parts)
    asked = (*((t.dtype, t.shape, t.stride()) for t in parts if t is not None), mask is None, needs, *options)
    if asked not in choices:
        with torch.no_grad():
            choices[asked] = int(
                _aten._fused_sdp_choice(
                    query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
            )
    return choices[asked]
