"""Operators for which PyTorch has one kernel per kind of device, computed here by other operators.

PyTorch takes fused kernels for cells of recurrent networks on every device that is no CPU, and for layers of
transformers in evaluation on every device; not all of them have a kernel on the pool's side. The functions of this
module compute the same by operators that every device has, with their gradients.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.errors import DeviceError
from warpbus.pool.client.session import current
from warpbus.pool.client.tensors import Remote, remote_of

_aten = torch.ops.aten

_KEY_PADDING = 1
"""PyTorch's number for a mask [batch, keys]; 0 is one [queries, keys], 2 one [batch, heads, queries, keys]."""


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten::_thnn_fused_lstm_cell`: the new hidden state and cell state [batch, n], and the gates [batch, 4 * n]."""
    gates = _biased(hidden_gates, hidden_bias) + _biased(input_gates, input_bias)
    ingate, forget, cell, outgate = gates.chunk(4, 1)
    cy = forget.sigmoid() * cx + ingate.sigmoid() * cell.tanh()
    return outgate.sigmoid() * cy.tanh(), cy, gates


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`aten::_thnn_fused_gru_cell`: the new hidden state [batch, n], and the gates [batch, 3 * n]."""
    gates = _biased(input_gates, input_bias)
    of_input, of_hidden = gates.chunk(3, 1), _biased(hidden_gates, hidden_bias).chunk(3, 1)
    reset, update = ((a + b).sigmoid() for a, b in zip(of_hidden[:2], of_input[:2], strict=True))
    new = (of_input[2] + of_hidden[2] * reset).tanh()
    return (hx - new) * update + new, gates


def _biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`aten::_native_multi_head_attention`: the attended [batch, queries, width], and the weights if they are needed.

    A mask that is not 0 hides a key, as in PyTorch's kernel.
    """
    weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
    heads = [
        F.linear(x, w, b).unflatten(-1, (num_heads, -1)).transpose(1, 2)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    ]
    scores = (heads[0] * heads[0].shape[-1] ** -0.5) @ heads[1].mT
    weighted = scores.softmax(-1) if mask is None else _aten._masked_softmax(scores, mask.bool(), 3, mask_type)
    attended = F.linear((weighted @ heads[2]).transpose(1, 2).flatten(-2), proj_weight, proj_bias)
    if not need_weights:
        return attended, None
    return attended, weighted.mean(1) if average_attn_weights else weighted


def transformer_encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """`aten::_transformer_encoder_layer_fwd`: [batch, tokens, width] of the same."""
    kept = _kept.get(remote_of(src))
    if kept is not None:
        mask, mask_type = ~kept, _KEY_PADDING

    def attend(x: Tensor) -> Tensor:
        options = (qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type)
        return multi_head_attention(x, x, x, embed_dim, num_heads, *options)[0]

    def feed_forward(x: Tensor) -> Tensor:
        inner = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(norm_1(src))
        x = x + feed_forward(norm_2(x))
    else:
        x = norm_1(src + attend(src))
        x = norm_2(x + feed_forward(x))
    if kept is not None:
        _kept[remote_of(x)] = kept
    return x


# `nn.TransformerEncoder` leaves padding out by a nested tensor between its first layer and its last. Here it goes along
# as it is, and each layer looks up which tokens are none.

_kept: "WeakKeyDictionary[Remote, Tensor]" = WeakKeyDictionary()
"""By the storage of a padded batch: bool [batch, tokens], the tokens that are no padding."""


def is_left_aligned(tokens: Tensor, kept: Tensor) -> bool:
    """`aten::_nested_tensor_from_mask_left_aligned`: whether all padding is behind the tokens."""
    return not bool((kept[:, 1:] & ~kept[:, :-1]).any())


def from_mask(tokens: Tensor, kept: Tensor, mask_check: bool = True) -> Tensor:
    """`aten::_nested_tensor_from_mask`: a copy of [batch, tokens, width] whose padding is known to be such."""
    if mask_check and not is_left_aligned(tokens, kept):
        raise RuntimeError("Expected the mask to be left aligned without gaps")
    padded = tokens.clone(memory_format=torch.contiguous_format)
    _kept[remote_of(padded)] = kept
    return padded


def to_padded(tokens: Tensor, padding: float, output_size: Any = None) -> Tensor:
    """`aten::to_padded_tensor` of what `from_mask` gave, or of what a layer made of it."""
    kept = _kept.get(remote_of(tokens))
    if kept is None:
        raise DeviceError(
            "aten::to_padded_tensor of nested tensors does not run on a remote GPU: give nn.TransformerEncoder "
            "enable_nested_tensor=False, or use tensors with padding and a mask"
        )
    return tokens.masked_fill(~kept.unsqueeze(-1), padding)


def counting_integers(histogram: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel of `aten::histc` that counts integers on a CPU, too, as a GPU does."""

    def call(values: Tensor, *options: Any, **named: Any) -> Tensor:
        if values.is_floating_point() or current().kind != "cpu":
            return histogram(values, *options, **named)
        return histogram(values.double(), *options, **named).to(values.dtype)

    return call


def sparse_bag_gradients(dense: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel of `aten::_embedding_bag_backward`; PyTorch makes sparse gradients of other operators."""

    def call(
        grad: Tensor,
        indices: Tensor,
        offsets: Tensor,
        offset2bag: Tensor,
        bag_size: Tensor,
        maximum_indices: Tensor,
        num_weights: int,
        scale_grad_by_freq: bool,
        mode: int,
        sparse: bool,
        *rest: Any,
    ) -> Tensor:
        if not sparse:
            sizes = bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode, sparse
            return dense(grad, indices, offsets, offset2bag, *sizes, *rest)
        if not offset2bag.numel():  # a CPU did not need it
            begun = offsets.new_zeros(len(indices) + 1).index_add_(0, offsets, torch.ones_like(offsets))
            offset2bag = begun[:-1].cumsum(0) - 1
        options = num_weights, scale_grad_by_freq, mode
        return _aten._embedding_bag_sparse_backward(grad, indices, offsets, offset2bag, bag_size, *options, *rest)

    return call


ADAPTED = {"aten::histc": counting_integers, "aten::_embedding_bag_backward": sparse_bag_gradients}
"""By the name of an operator: a function of the kernel that calls the pool; it returns the device's kernel."""

COMPOSITES = {
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_gru_cell": gru_cell,
    "_native_multi_head_attention": multi_head_attention,
    "_transformer_encoder_layer_fwd": transformer_encoder_layer,
    "_nested_tensor_from_mask": from_mask,
    "_nested_tensor_from_mask_left_aligned": is_left_aligned,
    "to_padded_tensor": to_padded,
}
"""By the name of the operator."""
