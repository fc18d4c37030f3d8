"""`grouped_mlp`: the experts of a mixture of experts in 16 bits, or with weights and activations of 8 bits.

How it is computed depends on the rows that an expert has:

- One token, or in 8 bits up to two: each slot is a product of its own (`moe/gemv.cu`), which reads the weights of the
  chosen experts once. The products back to the hidden features are summed over a token's experts on the way.
- More: rows are sorted by expert (`moe/sort.cu`) and cut into tiles, multiplied by wgmma (`gemm/sm90_hgemm.cu`) or by
  mma.sync (`gemm/sm80_hgemm.cu`), and combined.

With 8 bits the same kernel for few tokens and those of `w8a8` do so, and the inputs of both products are rounded row by
row.

The host launches without knowing the routing, so that all of it can be captured in a CUDA graph.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from warpbus.cuda.capabilities import capabilities
from warpbus.cuda.jit import architecture
from warpbus.errors import TensorError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops import gemm_sm80, gemm_sm90, w8a8, w8a8_experts
from warpbus.kernels.ops.activation import swiglu
from warpbus.kernels.ops.arguments import HALVES, check_alike, check_rank, check_shape, contiguous_aligned
from warpbus.kernels.ops.expert_rows import MOST_EXPERTS, SortedRows
from warpbus.kernels.ops.moe_gemv import MOST_SLOTS, multiply_few
from warpbus.kernels.ops.tiles_sm80 import Sm80Tiling
from warpbus.kernels.ops.w8a8 import CODES, check_device
from warpbus.kernels.reference.moe import Matrix
from warpbus.kernels.reference.moe import moe_mlp as reference_mlp

# Up to which slots are products of their own: of more tokens, some share experts, whose weights tiles read once. In two
# runs on an H200, two tokens in 16 bits took 160 and 159 us by slots and 143 and 157 by tiles in GLM-4.5-Air, 51 and 48
# by slots and 52 and 51 by tiles in GLM-4.7-Flash.
_FEW_TOKENS, _FEW_IN_8_BITS = 1, 2


def grouped_mlp(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    residual: Tensor | None = None,
    absent: int = 0,
) -> Tensor:
    """`residual + sum of weights * expert(x)` over each token's experts, where an expert is
    `down @ (silu(gate) * up)`.

    Args:
        x: `[tokens, hidden]`, float16 or bfloat16.
        experts: int32 `[tokens, slots]`: what `moe_route` gives. Not checked.
        weights: float32 `[tokens, slots]`.
        gate_up: of all experts, `[experts, 2 * ffn, hidden]`, the gate first; in the dtype of x, or with `scales` int8
            or float8_e4m3fn.
        down: of all experts, `[experts, hidden, ffn]`.
        scales: of each row of gate_up and of down, float32 `[experts, 2 * ffn]` and `[experts, hidden]`. The inputs of
            both products are then rounded to the dtype of the weights, as `w8a8_linear` does.
        residual: `[tokens, hidden]`.
        absent: how many experts of the layer are in other processes (expert parallelism). Their slots are negative and
            add nothing.

    Returns:
        `[tokens, hidden]` in the dtype of `x`; summed in float32. The same bits at every run.

    Raises:
        TensorError: other shapes, dtypes or devices, fewer matrices of one kind than of the other, or too many.
        DeviceError: float8_e4m3fn on a GPU older than sm_89.
    """
    check_rank("grouped_mlp", 2, x=x, experts=experts, weights=weights)
    check_rank("grouped_mlp", 3, gate_up=gate_up, down=down)
    (count, wide, hidden), (others, back, ffn) = gate_up.shape, down.shape
    alike = count == others and wide == 2 * ffn and back == hidden
    step = 8 if scales is None else 16
    if not alike or hidden % step or ffn % step or not 0 < count <= MOST_EXPERTS:
        raise TensorError(
            f"grouped_mlp: gate_up is {list(gate_up.shape)} and down {list(down.shape)}: expected [experts, 2 * ffn, "
            f"hidden] and [experts, hidden, ffn], multiples of {step}, at most {MOST_EXPERTS} experts"
        )
    there = {} if residual is None else {"residual": residual}
    if scales is None:
        check_alike("grouped_mlp", HALVES, x=x, gate_up=gate_up, down=down, **there)
    else:
        check_alike("grouped_mlp", HALVES, x=x, **there)
        check_alike("grouped_mlp", CODES, gate_up=gate_up, down=down)
        named = dict(zip(("gate_up_scales", "down_scales"), scales, strict=True))
        check_alike("grouped_mlp", (torch.float32,), **named)
        sides: dict[str, tuple[int, ...]] = {"gate_up_scales": (count, wide), "down_scales": (count, hidden)}
        check_shape("grouped_mlp", sides, "one per row of the weights", **named)
    tokens, slots = experts.shape
    expected: dict[str, tuple[int, ...]] = {"x": (tokens, hidden), "residual": (tokens, hidden)}
    expected["weights"] = tokens, slots
    check_shape(
        "grouped_mlp", expected, f"{tokens} tokens, experts of {hidden} features", x=x, weights=weights, **there
    )
    if experts.dtype != torch.int32 or weights.dtype != torch.float32:
        raise TensorError(
            f"grouped_mlp: experts are {experts.dtype} and weights {weights.dtype}, expected int32 and float32: give "
            "what moe_route gives"
        )
    return _grouped_mlp(x, experts, weights, gate_up, down, *(scales or (None, None)), residual, absent)


def _launch(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scales: Tensor | None,
    down_scales: Tensor | None,
    residual: Tensor | None,
    absent: int,
) -> Tensor:
    if len(x) == 0:
        return torch.empty_like(x)
    given = gate_up, down
    x, gate_up, down = (contiguous_aligned(each) for each in (x, gate_up, down))
    residual = None if residual is None else contiguous_aligned(residual)
    experts, weights = experts.contiguous(), weights.contiguous()
    scales = None
    if gate_up_scales is not None and down_scales is not None:
        check_device("grouped_mlp", gate_up.dtype, x.device)
        scales = gate_up_scales.contiguous(), down_scales.contiguous()
    few = _FEW_TOKENS if scales is None else _FEW_IN_8_BITS
    if len(x) <= few and experts.shape[1] <= MOST_SLOTS:
        early = gate_up is given[0] and down is given[1]
        return multiply_few(x, experts, weights, gate_up, down, scales, residual, early=early)
    wgmma, average = capabilities(architecture(x.device)).wgmma, experts.numel() / (len(down) + absent)
    if scales is None:
        tiling = choose_sm90(average) if wgmma else choose_sm80(average)
        rows = SortedRows.sort(experts, len(down), tiling.tile_m, x.dtype)
        y = _products(x, rows, gate_up, down, tiling)
    else:
        small = None if wgmma else w8a8.AMPERE[1 if average <= w8a8.AMPERE[1].tile_m else 0]
        height = w8a8_experts.HOPPER_ROWS if small is None else small.tile_m
        rows = SortedRows.sort(experts, len(down), height, x.dtype)
        y = _products_in_8_bits(x, rows, gate_up, down, scales, small)
    return rows.combine(y, weights, residual)


def _products(
    x: Tensor,
    rows: SortedRows,
    gate_up: Tensor,
    down: Tensor,
    tiling: gemm_sm90.GemmSm90Tiling | gemm_sm80.GemmSm80Tiling,
) -> Tensor:
    """What the experts make of their rows of x: `[rows, hidden]`."""
    y = x.new_empty(rows.count, x.shape[1])
    if isinstance(tiling, gemm_sm90.GemmSm90Tiling):
        inner = x.new_empty(rows.padded, down.shape[2])
        gemm_sm90.multiply_experts(rows.gather(x), gate_up, rows.tiles, rows.most, tiling, inner, gated=True)
        gemm_sm90.multiply_experts(inner, down, rows.tiles, rows.most, tiling, y)
    else:
        both = x.new_empty(rows.padded, gate_up.shape[1])
        gemm_sm80.multiply_experts(rows.gather(x), gate_up, rows.tiles, rows.most, tiling, both)
        gemm_sm80.multiply_experts(swiglu(both), down, rows.tiles, rows.most, tiling, y)
    return y


def _products_in_8_bits(
    x: Tensor,
    rows: SortedRows,
    gate_up: Tensor,
    down: Tensor,
    scales: tuple[Tensor, Tensor],
    tiling: Sm80Tiling | None,
) -> Tensor:
    """The same of 8-bit weights; without a tiling of `w8a8.AMPERE` on Hopper."""
    y = x.new_empty(rows.count, x.shape[1])
    codes = w8a8.quantize_tokens(rows.gather(x), gate_up.dtype)
    if tiling is None:
        inner = x.new_empty(rows.padded, down.shape[2])
        w8a8_experts.hopper(*codes, gate_up, scales[0], rows.tiles, rows.most, inner, gated=True)
        codes = w8a8.quantize_tokens(inner, down.dtype)
        w8a8_experts.hopper(*codes, down, scales[1], rows.tiles, rows.most, y)
    else:
        both = x.new_empty(rows.padded, gate_up.shape[1])
        w8a8_experts.ampere(*codes, gate_up, scales[0], rows.tiles, rows.most, tiling, both)
        codes = w8a8.quantize_tokens(swiglu(both), down.dtype)
        w8a8_experts.ampere(*codes, down, scales[1], rows.tiles, rows.most, tiling, y)
    return y


def choose_sm90(rows: float) -> gemm_sm90.GemmSm90Tiling:
    """The tiling on Hopper where experts have so many rows on average.

    On an H200 no other one was more than 1% faster in GLM-4.7-Flash and GLM-4.5-Air with 2 to 4096 tokens.
    """
    table = (0.25, (64, 64)), (32, (64, 128)), (96, (128, 128))
    sides = next((sides for most, sides in table if rows <= most), (128, 256))
    return next(each for each in gemm_sm90.OF_EXPERTS if (each.tile_m, each.tile_n) == sides)


def choose_sm80(rows: float) -> gemm_sm80.GemmSm80Tiling:
    """The same for mma.sync."""
    return gemm_sm80.SMALL if rows <= 64 else gemm_sm80.SQUARE


def _reference(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scales: Tensor | None,
    down_scales: Tensor | None,
    residual: Tensor | None,
    absent: int,
) -> Tensor:
    wide = _matrices(gate_up, gate_up_scales)
    return reference_mlp(x, experts, weights, wide, _matrices(down, down_scales), residual)


def _matrices(values: Tensor, scales: Tensor | None) -> Sequence[Matrix]:
    return values.unbind() if scales is None else list(zip(values.unbind(), scales.unbind(), strict=True))


_grouped_mlp = operator(
    "grouped_mlp(Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor down, Tensor? gate_up_scales, "
    "Tensor? down_scales, Tensor? residual, int absent) -> Tensor",
    cuda=_launch,
    reference=_reference,
    fake=lambda x, *others: torch.empty_like(x),
)
