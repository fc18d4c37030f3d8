"""An orthogonal rotation of the residual stream that spreads outliers over all channels (QuaRot; Ashkboos et al., 2024;
the R1 of SpinQuant; Liu et al., 2024).

A norm without a weight does not see a rotation, so a decoder whose norm weights are folded into the matrices behind
them computes the same when everything that writes to the residual stream is turned by Q and everything that reads it is
turned back. Nothing is left to compute when the model runs.
"""

import torch
from torch import Tensor, nn

from warpbus.errors import UsageError
from warpbus.models import DecoderLayer, ModelConfig
from warpbus.models.layers import RMSNorm


def rotation(size: int, seed: int) -> Tensor:
    """A random orthogonal matrix, float64 `[size, size]` on the CPU.

    It is the Kronecker product of a Hadamard matrix, for the power of two in `size`, and a random orthogonal one for
    the odd factor that is left (Haar-distributed), its rows with random signs: for a size of 4096 a randomized
    Hadamard matrix.
    """
    generator = torch.Generator().manual_seed(seed)
    odd = size // (size & -size)
    normal = torch.randn(odd, odd, generator=generator, dtype=torch.float64)
    orthogonal, upper = torch.linalg.qr(normal)
    matrix = (orthogonal * upper.diagonal().sign()).contiguous()
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) * 0.5**0.5
    while len(matrix) < size:
        matrix = torch.kron(step, matrix)
    signs = torch.randint(0, 2, (size, 1), generator=generator, dtype=torch.float64) * 2 - 1
    return signs * matrix


def check_rotatable(config: ModelConfig, name: str = "model") -> None:
    """Raises UsageError, naming the model, if its residual stream cannot be rotated without another computation."""
    if config.output_norms:
        raise UsageError(
            f"{name}: its sublayers' outputs are normed before they are added, and the weights of these norms cannot "
            "be folded into a matrix: quantize it without rotation"
        )


@torch.no_grad()
def rotate_layer(layer: DecoderLayer, q: Tensor) -> None:
    """Rotate what a layer reads and writes, in place; its norms' weights go into its matrices and become 1.

    Args:
        layer: on any device, in any floating dtype; computed in float32 at least.
        q: floating `[hidden, hidden]`, see `rotation`.

    Raises:
        UsageError: if the layer has norms after its sublayers.
    """
    check_rotatable(layer.attention.config, "layer")
    _read(layer.attention.qkv, layer.attention_norm, q)
    _write(layer.attention.o, q)
    _read(layer.mlp.gate_up, layer.mlp_norm, q)
    _write(layer.mlp.down, q)


@torch.no_grad()
def rotate_ends(embedding: nn.Embedding, final_norm: RMSNorm, head: nn.Linear, q: Tensor) -> None:
    """Rotate the embedding and the head, in place; the final norm's weight goes into the head and becomes 1.

    Raises:
        UsageError: if head and embedding are one matrix, which they cannot stay.
    """
    if head.weight is embedding.weight:
        raise UsageError(
            "the head is tied to the embedding, but the final norm's weight goes into the head alone: "
            "give the head a copy of its own (tie_word_embeddings false), or quantize without rotation"
        )
    turn = _like(q, embedding.weight)
    embedding.weight.copy_(embedding.weight.to(turn.dtype) @ turn)
    _read(head, final_norm, q)


def _read(linear: nn.Linear, norm: RMSNorm, q: Tensor) -> None:
    """A matrix that reads the residual stream through a norm."""
    turn = _like(q, linear.weight)
    linear.weight.copy_((linear.weight.to(turn.dtype) * norm.weight.to(turn.dtype)) @ turn)
    norm.weight.fill_(1.0)


def _write(linear: nn.Linear, q: Tensor) -> None:
    """A matrix whose outputs are added to the residual stream."""
    turn = _like(q, linear.weight)
    linear.weight.copy_(turn.T @ linear.weight.to(turn.dtype))
    if linear.bias is not None:
        linear.bias.copy_(linear.bias.to(turn.dtype) @ turn)


def _like(q: Tensor, weight: Tensor) -> Tensor:
    """`q` where the weight is, in a dtype to compute in."""
    return q.to(weight.device, torch.promote_types(weight.dtype, torch.float32))
