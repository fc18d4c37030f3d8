"""One decoder layer quantized for the inputs it meets, and those inputs carried on to the next.

True sequential order (as in GPTQ's code for LLaMA): a linear layer is calibrated on what the layers before it give
once they are quantized, those of the same block included. The unquantized model runs alongside, so that a layer can
make up for what the inputs have become.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from warpbus.models import DecoderLayer, ModelConfig
from warpbus.models.layers import CausalAttention, Rotary
from warpbus.quantization.calibration import TokenBatch
from warpbus.quantization.hessian import Hessian

Solve = Callable[[str, nn.Linear, Hessian], None]
"""Called with a linear layer's name (as in `LINEARS`), itself, and its inputs' moments; it replaces the weight."""


@dataclass
class States:
    """A batch on its way through the decoder.

    Attributes:
        x: what enters the next layer, `[batch, tokens, hidden]`.
        original: what enters it in the unquantized model.
        real: bool `[batch, tokens]`, false where there is padding. Padding is on the right, so causal attention
            keeps it from what is real; it only has to be left out of the moments.
        positions: int64 `[batch, tokens]`.
        angles: the rotary cosines and sines of these positions.
    """

    x: Tensor
    original: Tensor
    real: Tensor
    positions: Tensor
    angles: tuple[Tensor, Tensor]


def embed(
    batches: Sequence[TokenBatch], embedding: Tensor, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> list[States]:
    """Look the tokens up in the embedding `[vocabulary, hidden]`, which may be a file's map: only rows are read."""
    rotary = Rotary(config.rope)
    states = []
    for batch in batches:
        positions = torch.arange(batch.ids.shape[1], device=device).expand(batch.ids.shape)
        x = embedding[batch.ids].to(device, dtype)
        states.append(States(x, x, batch.real.to(device), positions, rotary(positions, dtype)))
    return states


@torch.no_grad()
def quantize_layer(layer: DecoderLayer, index: int, states: Sequence[States], solve: Solve, name: str) -> None:
    """Have `solve` quantize the linear layers of a decoder layer in their order, then move the states past it.

    Args:
        layer: its weights are replaced by what `solve` makes of them.
        index: the layer's number.
        states: moved on in place.
        solve: see `Solve`.
        name: the layer, for messages.
    """
    context, unquantized = CausalAttention(), copy.deepcopy(layer)
    attention, mlp = layer.attention, layer.mlp

    def attend(which: DecoderLayer, x: Tensor, state: States) -> Tensor:
        return which.attention(which.attention_norm(x), index, state.positions, state.angles, context)

    def hessian_of(linear: nn.Linear, path: str) -> Hessian:
        return Hessian(linear.in_features, device=states[0].x.device, name=f"{name}.{path}")

    hessian = hessian_of(attention.qkv, "attention.qkv")
    for state in states:
        x, original = layer.attention_norm(state.x), layer.attention_norm(state.original)
        hessian.add(x[state.real], original[state.real])
    solve("attention.qkv", attention.qkv, hessian)

    hessian = hessian_of(attention.o, "attention.o")
    attended = []
    with _left_out(attention, "o"), _left_out(unquantized.attention, "o"):
        for state in states:
            x, original = attend(layer, state.x, state), attend(unquantized, state.original, state)
            hessian.add(x[state.real], original[state.real])
            attended.append((x, original))
    solve("attention.o", attention.o, hessian)

    hessian = hessian_of(mlp.gate_up, "mlp.gate_up")
    for state in reversed(states):
        x, original = attended.pop()  # given back as soon as it is used
        state.x = state.x + layer.attention_output_norm(attention.o(x))
        state.original = state.original + layer.attention_output_norm(unquantized.attention.o(original))
        x, original = layer.mlp_norm(state.x), layer.mlp_norm(state.original)
        hessian.add(x[state.real], original[state.real])
    solve("mlp.gate_up", mlp.gate_up, hessian)

    hessian = hessian_of(mlp.down, "mlp.down")
    with _left_out(mlp, "down"), _left_out(unquantized.mlp, "down") as down:
        for state in states:
            x, original = mlp(layer.mlp_norm(state.x)), unquantized.mlp(layer.mlp_norm(state.original))
            hessian.add(x[state.real], original[state.real])
            state.original = state.original + layer.mlp_output_norm(down(original))
    solve("mlp.down", mlp.down, hessian)

    for state in states:
        state.x = state.x + layer.mlp_output_norm(mlp(layer.mlp_norm(state.x)))


@torch.no_grad()
def pass_through(layer: DecoderLayer, unquantized: DecoderLayer, index: int, states: Sequence[States]) -> None:
    """Move the states past a layer that is quantized already."""
    context = CausalAttention()
    for state in states:
        state.x = layer(state.x, index, state.positions, state.angles, context)
        state.original = unquantized(state.original, index, state.positions, state.angles, context)


@contextmanager
def _left_out(module: nn.Module, name: str) -> Iterator[nn.Module]:
    """Within it, `module` gives what would enter its part `name`; that part is what it yields."""
    part = getattr(module, name)
    setattr(module, name, nn.Identity())
    try:
        yield part
    finally:
        setattr(module, name, part)
