"""`moe_mlp`: the experts of a mixture of experts with quantized weights, and the sum of a token's experts.

How it is computed depends on the rows that an expert has:

- One or two tokens, on GPUs from Hopper on: each slot is a product of its own (`wna16/decode.cu`, by slot). The
  products back to the hidden features are summed over a token's experts on the way (by token).
- More: rows are sorted by expert (`moe/sort.cu`) and cut into tiles, multiplied by the kernel for few rows
  (`wna16/decode.cu`, by tile), by wgmma (`wna16/sm90_wna16.cu`) or by mma.sync (`wna16/sm80_wna16.cu`), and combined.

The host launches without knowing the routing, so that all of it can be captured in a CUDA graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from warpbus.cuda.capabilities import Capabilities, capabilities
from warpbus.cuda.jit import architecture
from warpbus.errors import TensorError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops import wna16_decode, wna16_sm80, wna16_sm90
from warpbus.kernels.ops.activation import swiglu
from warpbus.kernels.ops.arguments import HALVES, check_alike, check_rank, check_shape, per_dtype
from warpbus.kernels.ops.packed import TILE_ROWS, PackedWeight, unpack
from warpbus.kernels.reference.moe import moe_mlp as reference_mlp
from warpbus.qtensor import QTensor, Scheme

_SORT = per_dtype(
    "moe/sort.cu",
    "moe_sort",
    "const int* experts, int* order, int* place, int4* tiles, int slots, int count, int rows_of_tile",
    HALVES,
)
_PERMUTE = per_dtype(
    "moe/sort.cu", "moe_permute", "const ELEMENT* x, const int* order, ELEMENT* out, int width, int per_token", HALVES
)
_COMBINE = per_dtype(
    "moe/sort.cu",
    "moe_combine",
    "const ELEMENT* y, const int* place, const float* weights, const ELEMENT* residual, ELEMENT* out, int width, "
    "int per_token",
    HALVES,
)
_MOST_EXPERTS = 1023  # of moe_sort
_FEW_TOKENS = 2  # up to which slots are products of their own: of more tokens, too many share experts


@dataclass(frozen=True)
class PackedExperts:
    """The quantized matrices of a layer's experts, of one shape and scheme, one behind the other.

    Attributes:
        weights: codes `[experts * words]` and scales `[experts * tiles of rows, groups, 8, 2]`; its `shape` is
            `(n, k)` of one expert.
        count: experts.
    """

    weights: PackedWeight
    count: int

    @classmethod
    def stack(cls, parts: Sequence[PackedWeight]) -> "PackedExperts":
        """Copy the matrices of all experts into one.

        Raises:
            TensorError: they differ in shape, scheme or dtype, or there are too many.
        """
        first = parts[0]
        for number, part in enumerate(parts):
            if (part.shape, part.scheme, part.dtype) != (first.shape, first.scheme, first.dtype):
                raise TensorError(
                    f"experts: expert {number} is {list(part.shape)} {part.scheme} {part.dtype}, expert 0 is "
                    f"{list(first.shape)} {first.scheme} {first.dtype}: expected all alike"
                )
        if len(parts) > _MOST_EXPERTS:
            raise TensorError(f"experts: {len(parts)}, expected at most {_MOST_EXPERTS}")
        zeros = None if first.zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None])
        codes, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales"))
        return cls(replace(first, codes=codes, scales=scales, zeros=zeros), len(parts))

    def expert(self, number: int) -> PackedWeight:
        """The matrix of one expert: a view."""
        each = self.weights
        codes, scales = (part.chunk(self.count)[number] for part in (each.codes, each.scales))
        zeros = None if each.zeros is None else each.zeros.chunk(self.count)[number]
        return replace(each, codes=codes, scales=scales, zeros=zeros)

    def unpacked(self) -> list[QTensor]:
        """The matrices of all experts."""
        return [unpack(self.expert(number)) for number in range(self.count)]


def moe_mlp(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    *,
    residual: Tensor | None = None,
    shared: bool = False,
) -> Tensor:
    """`residual + sum of weights * expert(x)` over each token's experts, where an expert is
    `down @ (silu(gate) * up)`.

    Args:
        x: `[tokens, hidden]`, float16 or bfloat16, finite.
        experts: int32 `[tokens, slots]`, each below `gate_up.count`: what `moe_route` gives. Not checked.
        weights: float32 `[tokens, slots]`.
        gate_up: of all experts, `[2 * ffn, hidden]` each, the gate first.
        down: of all experts, `[hidden, ffn]` each.
        residual: `[tokens, hidden]`.
        shared: the first slot of each token is the last expert, with weight 1: what `moe_route` gives with a shared
            expert. Only where it is stacked behind the others.

    Returns:
        `[tokens, hidden]` in the dtype of `x`; summed in float32. The same bits at every run.

    Raises:
        TensorError: other shapes, dtypes or devices, or fewer matrices of one kind than of the other.
    """
    check_rank("moe_mlp", 2, x=x, experts=experts, weights=weights)
    (wide, hidden), (back, ffn) = gate_up.weights.shape, down.weights.shape
    if gate_up.count != down.count or wide != 2 * ffn or back != hidden or hidden % 8 or ffn % 8:
        raise TensorError(
            f"moe_mlp: gate_up of {gate_up.count} experts {[wide, hidden]}, down of {down.count} {[back, ffn]}: "
            "expected as many experts, [2 * ffn, hidden] and [hidden, ffn], multiples of 8"
        )
    there = {} if residual is None else {"residual": residual}
    scales = {"gate_up": gate_up.weights.scales, "down": down.weights.scales}
    check_alike("moe_mlp", HALVES, x=x, **scales, **there)
    tokens, slots = experts.shape
    expected = {"x": (tokens, hidden), "weights": (tokens, slots), "residual": (tokens, hidden)}
    check_shape("moe_mlp", expected, f"{tokens} tokens, experts of {hidden} features", x=x, weights=weights, **there)
    if experts.dtype != torch.int32 or weights.dtype != torch.float32:
        raise TensorError(
            f"moe_mlp: experts are {experts.dtype} and weights {weights.dtype}, expected int32 and float32: give what "
            "moe_route gives"
        )
    return _moe_mlp(
        *(x, experts, weights, *_parts(gate_up), *_parts(down)),
        *(gate_up.count, ffn, gate_up.weights.scheme.bits, gate_up.weights.scheme.group_size or 0),
        *(down.weights.scheme.bits, down.weights.scheme.group_size or 0, residual, shared),
    )


def _parts(stacked: PackedExperts) -> tuple[Tensor, Tensor, Tensor | None]:
    return stacked.weights.codes, stacked.weights.scales, stacked.weights.zeros


def _packed(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, count: int, bits: int, group: int, shape: tuple[int, int]
) -> PackedExperts:
    return PackedExperts(PackedWeight(codes, scales, zeros, Scheme(bits, group or None, zeros is None), shape), count)


def _launch(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    down_codes: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    count: int,
    ffn: int,
    bits: int,
    group: int,
    down_bits: int,
    down_group: int,
    residual: Tensor | None,
    shared: bool,
) -> Tensor:
    tokens, hidden = x.shape
    gate_up = _packed(codes, scales, zeros, count, bits, group, (2 * ffn, hidden))
    down = _packed(down_codes, down_scales, down_zeros, count, down_bits, down_group, (hidden, ffn))
    x, experts, weights = x.contiguous(), experts.contiguous(), weights.contiguous()
    residual = None if residual is None else residual.contiguous()
    if tokens == 0:
        return torch.empty_like(x)
    able = capabilities(architecture(x.device))
    if able.tma and tokens <= _FEW_TOKENS and ffn % TILE_ROWS == 0:
        return _by_slot(x, experts, weights, gate_up, down, residual, shared)
    return _by_tile(x, experts, weights, gate_up, down, residual, able)


def _by_slot(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    residual: Tensor | None,
    shared: bool,
) -> Tensor:
    tokens, per_token = experts.shape
    shared_expert = gate_up.count - 1 if shared else None
    inner = x.new_empty(tokens * per_token, down.weights.shape[1])
    out = torch.empty_like(x)
    common = {"experts": experts, "per_token": per_token, "shared_expert": shared_expert}
    wna16_decode.multiply_experts(
        *(x, gate_up.weights, 1, inner), gated=True, count=tokens * per_token, factors=weights, **common
    )
    # The kernel ahead begins after the one that chose the experts has ended.
    wna16_decode.multiply_experts(
        *(inner, down.weights, 1, out),
        gated=False,
        count=tokens,
        residual=residual,
        slots=per_token,
        early=True,
        **common,
    )
    return out


def _by_tile(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    residual: Tensor | None,
    able: Capabilities,
) -> Tensor:
    (tokens, per_token), hidden, ffn = experts.shape, x.shape[1], down.weights.shape[1]
    rows, count = tokens * per_token, gate_up.count
    height, by_decode = _rows_of_tile(rows / count, able, ffn)
    most = (rows + (height - 1) * min(rows, count)) // height
    order, place = (torch.empty(rows, dtype=torch.int32, device=x.device) for _ in range(2))
    tiles = torch.empty(1 + most, 4, dtype=torch.int32, device=x.device)
    _SORT[x.dtype](
        1,
        1024,
        experts=experts,
        order=order,
        place=place,
        tiles=tiles,
        slots=rows,
        count=count,
        rows_of_tile=height,
        shared=4 * count,
        dependent=True,
    )
    # A copy of a tile brings as many rows as it has at most, also where there are fewer.
    sorted_x = x.new_empty(max(rows, height), hidden)
    _PERMUTE[x.dtype](rows, 256, x=x, order=order, out=sorted_x, width=hidden, per_token=per_token, dependent=True)
    y = x.new_empty(rows, hidden)
    if by_decode:
        inner = x.new_empty(max(rows, height), ffn)
        wna16_decode.multiply_experts(sorted_x, gate_up.weights, height, inner, gated=True, count=most, tiles=tiles)
        wna16_decode.multiply_experts(inner, down.weights, height, y, gated=False, count=most, tiles=tiles)
    else:
        both = x.new_empty(max(rows, height), 2 * ffn)
        _multiply(sorted_x, gate_up, tiles, most, height, both, able)
        _multiply(swiglu(both), down, tiles, most, height, y, able)
    out = torch.empty_like(x)
    _COMBINE[x.dtype](
        tokens,
        256,
        y=y,
        place=place,
        weights=weights,
        residual=residual,
        out=out,
        width=hidden,
        per_token=per_token,
        dependent=True,
    )
    return out


def _multiply(
    x: Tensor, stacked: PackedExperts, tiles: Tensor, most: int, height: int, out: Tensor, able: Capabilities
) -> None:
    if able.wgmma:
        tiling = next(each for each in wna16_sm90.OF_EXPERTS if each.tokens == height)
        wna16_sm90.multiply_experts(x, stacked.weights, stacked.count, tiles, most, tiling, out)
    else:
        smaller = next(each for each in wna16_sm80.TILINGS if each.tile_m == height)
        wna16_sm80.multiply_experts(x, stacked.weights, tiles, most, smaller, out)


def _rows_of_tile(rows: float, able: Capabilities, ffn: int) -> tuple[int, bool]:
    """The rows of a tile, where experts have so many on average; and whether the kernel for few rows multiplies it."""
    # Measured on an H200 with the shapes of GLM-4.7-Flash, GLM-4.5-Air and GLM-5.
    if able.tma and ffn % TILE_ROWS == 0 and rows <= 2.4:
        return 8, True
    if able.wgmma:
        return next((height for height, most in ((16, 3.5), (32, 7), (64, 32)) if rows <= most), 128), False
    if able.tma and ffn % TILE_ROWS == 0 and rows <= 4:
        return 16, True
    return next((height for height in (32, 64) if rows <= height), 128), False


def _reference(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    down_codes: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    count: int,
    ffn: int,
    bits: int,
    group: int,
    down_bits: int,
    down_group: int,
    residual: Tensor | None,
    shared: bool,
) -> Tensor:
    gate_up = _packed(codes, scales, zeros, count, bits, group, (2 * ffn, x.shape[1]))
    down = _packed(down_codes, down_scales, down_zeros, count, down_bits, down_group, (x.shape[1], ffn))
    return reference_mlp(x, experts, weights, gate_up.unpacked(), down.unpacked(), residual)


_moe_mlp = operator(
    "moe_mlp(Tensor x, Tensor experts, Tensor weights, Tensor codes, Tensor scales, Tensor? zeros, Tensor down_codes, "
    "Tensor down_scales, Tensor? down_zeros, int count, int ffn, int bits, int group, int down_bits, int down_group, "
    "Tensor? residual, bool shared) -> Tensor",
    cuda=_launch,
    reference=_reference,
    fake=lambda x, *others: torch.empty_like(x),
)
