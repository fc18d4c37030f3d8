"""`moe_mlp`: the experts of a mixture of experts with quantized weights, and the sum of a token's experts.

How it is computed depends on the rows that an expert has:

- One or two tokens, on GPUs from Hopper on: each slot is a product of its own (`wna16/decode.cu`, by slot). The
  products back to the hidden features are summed over a token's experts on the way (by token).
- More: rows are sorted by expert (`moe/sort.cu`) and cut into tiles, multiplied by the kernel for few rows
  (`wna16/decode.cu`, by tile), by wgmma (`wna16/sm90_wna16.cu`) or by mma.sync (`wna16/sm80_wna16.cu`), and combined.
- Many rows of each expert may be rounded to e4m3, on Hopper (`wna8/sm90_wna8.cu`).

The host launches without knowing the routing, so that all of it can be captured in a CUDA graph.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.capabilities import Capabilities, capabilities
from warpbus.cuda.jit import architecture
from warpbus.errors import TensorError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops import wna8, wna8_sm90, wna16_decode, wna16_sm80, wna16_sm90
from warpbus.kernels.ops.activation import swiglu
from warpbus.kernels.ops.arguments import HALVES, check_alike, check_rank, check_shape
from warpbus.kernels.ops.expert_rows import SortedRows
from warpbus.kernels.ops.packed import TILE_ROWS
from warpbus.kernels.ops.packed_experts import PackedExperts
from warpbus.kernels.ops.wna8_quantize import UNIT
from warpbus.kernels.reference.moe import moe_mlp as reference_mlp

_FEW_TOKENS = 2  # up to which slots are products of their own: of more tokens, too many share experts


def moe_mlp(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    *,
    residual: Tensor | None = None,
    shared: bool = False,
    absent: int = 0,
    activation_dtype: torch.dtype | None = None,
) -> Tensor:
    """`residual + sum of weights * expert(x)` over each token's experts, where an expert is
    `down @ (silu(gate) * up)`.

    Args:
        x: `[tokens, hidden]`, float16 or bfloat16, finite.
        experts: int32 `[tokens, slots]`, slots of `gate_up` and `down`: what `moe_route` gives. Not checked.
        weights: float32 `[tokens, slots]`.
        gate_up: of all experts, `[2 * ffn, hidden]` each, the gate first.
        down: of all experts, `[hidden, ffn]` each.
        residual: `[tokens, hidden]`.
        shared: the first slot of each token is the last expert that is not offloaded, with weight 1: what `moe_route`
            gives with a shared expert. Only where it is stacked there.
        absent: how many experts of the layer are in other processes (expert parallelism). Their slots are negative and
            add nothing.
        activation_dtype: float8_e4m3fn: where experts have enough rows on average, round the inputs of both products
            to it, with a scale per row. Only on Hopper, for the schemes of `wna8`, and if no expert is offloaded;
            otherwise nothing is rounded.

    Returns:
        `[tokens, hidden]` in the dtype of `x`; summed in float32. The same bits at every run.

    Raises:
        TensorError: other shapes, dtypes or devices, or fewer matrices of one kind than of the other.
    """
    check_rank("moe_mlp", 2, x=x, experts=experts, weights=weights)
    (wide, hidden), (back, ffn) = gate_up.weights.shape, down.weights.shape
    alike = (gate_up.count, gate_up.resident) == (down.count, down.resident)
    if not alike or wide != 2 * ffn or back != hidden or hidden % 8 or ffn % 8:
        raise TensorError(
            f"moe_mlp: gate_up of {gate_up.count} experts {[wide, hidden]}, down of {down.count} {[back, ffn]}: "
            "expected as many experts, [2 * ffn, hidden] and [hidden, ffn], multiples of 8"
        )
    there = {} if residual is None else {"residual": residual}
    scales = {"gate_up": gate_up.weights.scales, "down": down.weights.scales}
    check_alike("moe_mlp", HALVES, x=x, **scales, **there)
    tokens, slots = experts.shape
    expected: dict[str, tuple[int, ...]] = {"x": (tokens, hidden), "residual": (tokens, hidden)}
    expected["weights"] = tokens, slots
    check_shape("moe_mlp", expected, f"{tokens} tokens, experts of {hidden} features", x=x, weights=weights, **there)
    if experts.dtype != torch.int32 or weights.dtype != torch.float32:
        raise TensorError(
            f"moe_mlp: experts are {experts.dtype} and weights {weights.dtype}, expected int32 and float32: give what "
            "moe_route gives"
        )
    of_experts = gate_up.parts, down.parts, ffn, *_coding(gate_up), *_coding(down)
    return _moe_mlp(x, experts, weights, *of_experts, residual, shared, absent, activation_dtype)


def _coding(stacked: PackedExperts) -> tuple[int, int]:
    """Bits of a code, and columns that share a scale; 0: all."""
    return stacked.weights.scheme.bits, stacked.weights.scheme.group_size or 0


def _launch(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    residual: Tensor | None,
    shared: bool,
    absent: int,
    activation_dtype: torch.dtype | None,
) -> Tensor:
    tokens, ffn = len(x), down.weights.shape[1]
    x, experts, weights = x.contiguous(), experts.contiguous(), weights.contiguous()
    residual = None if residual is None else residual.contiguous()
    if tokens == 0:
        return torch.empty_like(x)
    able = capabilities(architecture(x.device))
    if able.tma and tokens <= _FEW_TOKENS and ffn % TILE_ROWS == 0:
        return _by_slot(x, experts, weights, gate_up, down, residual, shared, absent)
    return _by_tile(x, experts, weights, gate_up, down, residual, absent, able, activation_dtype)


def _by_slot(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    residual: Tensor | None,
    shared: bool,
    absent: int,
) -> Tensor:
    tokens, per_token = experts.shape
    shared_expert = gate_up.resident - 1 if shared else None
    inner = x.new_empty(tokens * per_token, down.weights.shape[1])
    out = torch.empty_like(x)
    multiply = functools.partial(
        wna16_decode.multiply_experts,
        experts=experts,
        per_token=per_token,
        shared_expert=shared_expert,
        partial=absent > 0,
    )
    multiply(x, gate_up, 1, inner, gated=True, count=tokens * per_token, factors=weights)
    # The kernel ahead begins after the one that chose the experts has ended: `experts` is there early.
    multiply(inner, down, 1, out, gated=False, count=tokens, residual=residual, slots=per_token, early=True)
    return out


def _by_tile(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    residual: Tensor | None,
    absent: int,
    able: Capabilities,
    activation_dtype: torch.dtype | None = None,
) -> Tensor:
    (tokens, per_token), hidden, ffn = experts.shape, x.shape[1], down.weights.shape[1]
    rounds = _rounds(gate_up, down, able, activation_dtype)
    height, by_decode = _rows_of_tile(tokens * per_token / (gate_up.count + absent), able, ffn, rounds)
    rows = SortedRows.sort(experts, gate_up.count, height, x.dtype)
    tiles, most = rows.tiles, rows.most
    y = x.new_empty(rows.count, hidden)
    if height == wna8_sm90.ROWS_OF_TILE and rounds:
        inner = x.new_empty(rows.padded, ffn)
        wna8_sm90.multiply_experts(x, gate_up, rows, inner, gated=True, gathers=True)
        wna8_sm90.multiply_experts(inner, down, rows, y)
    elif by_decode:
        inner = x.new_empty(rows.padded, ffn)
        wna16_decode.multiply_experts(rows.gather(x), gate_up, height, inner, gated=True, count=most, tiles=tiles)
        wna16_decode.multiply_experts(inner, down, height, y, gated=False, count=most, tiles=tiles)
    else:
        inner = _gated(rows.gather(x), gate_up, tiles, most, height, able)
        _multiply(inner, down, tiles, most, height, y, able)
    return rows.combine(y, weights, residual)


def _rounds(
    gate_up: PackedExperts, down: PackedExperts, able: Capabilities, activation_dtype: torch.dtype | None
) -> bool:
    """Whether the inputs of large products may be rounded."""
    if activation_dtype != torch.float8_e4m3fn or not able.wgmma or gate_up.offloaded is not None:
        return False
    fits = all(each.weights.shape[1] % UNIT == 0 for each in (gate_up, down))
    return fits and all(wna8.supports(each.weights.scheme, activation_dtype) for each in (gate_up, down))


def _gated(x: Tensor, gate_up: PackedExperts, tiles: Tensor, most: int, height: int, able: Capabilities) -> Tensor:
    """`silu(gate) * up` of each row of x by its expert."""
    wide = gate_up.weights.shape[0]
    if able.wgmma and wide // 2 % TILE_ROWS == 0:
        inner = x.new_empty(len(x), wide // 2)
        wna16_sm90.multiply_experts(x, gate_up, tiles, most, _wgmma_tiling(height), inner, gated=True)
        return inner
    both = x.new_empty(len(x), wide)
    _multiply(x, gate_up, tiles, most, height, both, able)
    return swiglu(both)


def _wgmma_tiling(height: int) -> wna16_sm90.Wna16Sm90Tiling:
    return next(each for each in wna16_sm90.OF_EXPERTS if each.tokens == height)


def _multiply(
    x: Tensor, stacked: PackedExperts, tiles: Tensor, most: int, height: int, out: Tensor, able: Capabilities
) -> None:
    if able.wgmma:
        wna16_sm90.multiply_experts(x, stacked, tiles, most, _wgmma_tiling(height), out)
    else:
        smaller = next(each for each in wna16_sm80.TILINGS if each.tile_m == height)
        wna16_sm80.multiply_experts(x, stacked, tiles, most, smaller, out)


def _rows_of_tile(rows: float, able: Capabilities, ffn: int, rounds: bool = False) -> tuple[int, bool]:
    """The rows of a tile, where experts have so many on average; and whether the kernel for few rows multiplies it.

    Args:
        rounds: rows of the largest tiles are rounded to e4m3.
    """
    # Measured on an H200 with the shapes of GLM-4.7-Flash and GLM-4.5-Air.
    if able.tma and ffn % TILE_ROWS == 0 and rows <= (3 if able.wgmma else 6):
        return wna16_decode.MOST_ROWS_OF_EXPERT, True
    if able.wgmma:
        return next((height for height, most in ((32, 27), (64, 56 if rounds else 80)) if rows <= most), 128), False
    return next((height for height in (32, 64) if rows <= height), 128), False


def _packing(implementation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An implementation of the operator, whose parameters are tensors and numbers, from one that takes the experts."""

    def run(
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        gate_up_parts: list[Tensor],
        down_parts: list[Tensor],
        ffn: int,
        bits: int,
        group: int,
        down_bits: int,
        down_group: int,
        *others: Any,
    ) -> Tensor:
        gate_up = PackedExperts.of_parts(gate_up_parts, bits, group, (2 * ffn, x.shape[1]))
        down = PackedExperts.of_parts(down_parts, down_bits, down_group, (x.shape[1], ffn))
        return implementation(x, experts, weights, gate_up, down, *others)

    return run


def _reference(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    residual: Tensor | None,
    *others: Any,
) -> Tensor:
    return reference_mlp(x, experts, weights, gate_up.unpacked(), down.unpacked(), residual)


_moe_mlp = operator(
    "moe_mlp(Tensor x, Tensor experts, Tensor weights, Tensor[] gate_up, Tensor[] down, int ffn, int bits, int group, "
    "int down_bits, int down_group, Tensor? residual, bool shared, int absent, ScalarType? activation_dtype) -> "
    "Tensor",
    cuda=_packing(_launch),
    reference=_packing(_reference),
    fake=lambda x, *others: torch.empty_like(x),
)
