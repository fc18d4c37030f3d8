"""`w8a8`: linear layers whose weights and activations both have 8 bits, on the tensor cores' 8-bit instructions.

Codes are int8 or float8_e4m3fn with one float32 scale per row: a weight has them from its file, activations get them on
the way, token by token. The product is summed in int32 or float32 and scaled on its way out. Two kernels compute it:
`w8a8/sm90_w8a8.cu` (wgmma, TMA) on Hopper and `w8a8/sm80_w8a8.cu` (mma.sync, cp.async) elsewhere; e4m3 needs sm_89.
"""

import functools
import itertools
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from warpbus.cuda.capabilities import capabilities
from warpbus.cuda.green import multiprocessors
from warpbus.cuda.jit import architecture
from warpbus.cuda.kernel import Kernel
from warpbus.cuda.parameters import Parameters
from warpbus.cuda.tensor_map import fits, tensor_map, tile_maps
from warpbus.errors import DeviceError, TensorError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import (
    ELEMENTS,
    HALVES,
    aligned,
    blocks,
    check_alike,
    check_rank,
    check_shape,
)
from warpbus.kernels.ops.gemm_sm90 import addressable
from warpbus.kernels.ops.split_k import cheapest, partial_sums, reduce
from warpbus.kernels.ops.tiles_sm80 import Sm80Tiling
from warpbus.kernels.ops.tiles_sm90 import BOX, ROW_BYTES, Sm90Tiling
from warpbus.kernels.reference import w8a8 as reference
from warpbus.kernels.reference.grid import LARGEST
from warpbus.kernels.units import unit

_SM80_PARAMETERS = Parameters(
    "const unsigned char* a, const unsigned char* b, const float* a_scale, const float* b_scale, "
    "const ELEMENT* bias, ELEMENT* out, float* partial, int m, int n, int k, long long a_stride, "
    "long long b_stride, int k_per_split, const int4* list"
)
_SM90_PARAMETERS = Parameters(
    "TileMaps map_a, TensorMap map_b, TensorMap map_out, const float* a_scale, const float* b_scale, "
    "const ELEMENT* bias, ELEMENT* out, float* partial, Problem p, const int4* list",
    Problem="int m, int n, int k, int part, int splits, int group, int direct",
)
_QUANTIZE_PARAMETERS = Parameters("const unsigned short* x, unsigned char* codes, float* scales, int k, int whole")
CODES = tuple(LARGEST)
_NEEDS = {torch.int8: "sm_80", torch.float8_e4m3fn: "sm_89"}
_SUMS = {torch.int8: "int", torch.float8_e4m3fn: "float"}

Finish = tuple[Tensor, Tensor, Tensor | None]
_Tiling = TypeVar("_Tiling", Sm80Tiling, Sm90Tiling)


def quantize_tokens(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """8-bit codes of activations, each token with a scale of its own: its largest magnitude over the largest code.

    Args:
        x: `[..., k]`, float16 or bfloat16, any sizes.
        dtype: of the codes, int8 (-127 to 127) or float8_e4m3fn (to 448).

    Returns:
        Codes `[..., k]` and float32 scales `[...]`; `codes * scales[..., None]` is `x` again, as good as 8 bits can. A
        token of zeros has scale 0; one with NaN or infinity a scale that shows it.

    Raises:
        TensorError: other shapes or dtypes.
        DeviceError: float8_e4m3fn on a GPU older than sm_89.
    """
    _check_rows("quantize_tokens", x, HALVES, dtype)
    return _quantize(x, dtype)


def quantize_rows(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """8-bit codes of a weight, each output row with a scale of its own; see `quantize_tokens`.

    Args:
        weight: `[n, k]`, float32, float16 or bfloat16.

    Returns:
        Codes `[n, k]` and float32 scales `[n]`.
    """
    check_rank("quantize_rows", 2, weight=weight)
    _check_rows("quantize_rows", weight, tuple(ELEMENTS), dtype)
    # Done once, when a model is loaded: float32 has no kernel of its own.
    return reference.quantize(weight, dtype) if weight.dtype == torch.float32 else _quantize(weight, dtype)


def w8a8_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ (weight_scale[:, None] * weight).T + bias`, with `x` quantized token by token to the dtype of `weight`.

    Args:
        x: `[..., k]`, float16 or bfloat16, any sizes.
        weight: `[n, k]`, int8 or float8_e4m3fn; copied at each call if its rows do not begin at multiples of 16 bytes.
        weight_scale: float32 `[n]`.
        bias: `[n]` in the dtype of `x`.

    Returns:
        `[..., n]` in the dtype of `x`; the same bits at every run.

    Raises:
        TensorError: other shapes, dtypes or devices.
        DeviceError: float8_e4m3fn on a GPU older than sm_89.
    """
    check_rank("w8a8_linear", 2, weight=weight)
    _check_rows("w8a8_linear", x, HALVES, weight.dtype)
    n, k = weight.shape
    if x.shape[-1] != k:
        raise TensorError(f"w8a8_linear: x has {x.shape[-1]} features, weight expects {k}: give x [..., {k}]")
    if x.device != weight.device:
        raise TensorError(f"w8a8_linear: weight is on {weight.device} and x on {x.device}: move one with .to()")
    codes, scales = _quantize(x.reshape(prod(x.shape[:-1]), k), weight.dtype)
    y = scaled_gemm(codes, scales, weight, weight_scale, bias, x.dtype)
    # A view is nothing that LoRA could add its part to in place.
    return y if x.dim() == 2 else y.view(*x.shape[:-1], n)


def scaled_gemm(
    a_codes: Tensor, a_scales: Tensor, b_codes: Tensor, b_scales: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """`a_scales[:, None] * (a_codes @ b_codes.T) * b_scales + bias`.

    Args:
        a_codes, b_codes: `[m, k]` and `[n, k]`, both int8 or both float8_e4m3fn, any sizes.
        a_scales, b_scales: float32 `[m]` and `[n]`.
        bias: `[n]` in `out_dtype`.
        out_dtype: float16 or bfloat16.

    Returns:
        `[m, n]`, rounded once. Codes of int8 are summed exactly (in parts of 130944 of k), those of
        float8_e4m3fn in float32, on Hopper 256 of k at a time with 14 bits before.

    Raises:
        TensorError: other shapes, dtypes or devices.
        DeviceError: float8_e4m3fn on a GPU older than sm_89.
    """
    name = "scaled_gemm"
    check_rank(name, 2, a_codes=a_codes, b_codes=b_codes)
    check_alike(name, CODES, a_codes=a_codes, b_codes=b_codes)
    (m, k), n = a_codes.shape, b_codes.shape[0]
    check_shape(name, {"b_codes": (n, k)}, f"a_codes has {k} columns, and b_codes needs as many", b_codes=b_codes)
    check_alike(name, (torch.float32,), a_scales=a_scales, b_scales=b_scales)
    check_shape(
        name, {"a_scales": (m,), "b_scales": (n,)}, "one per row of the codes", a_scales=a_scales, b_scales=b_scales
    )
    if out_dtype not in HALVES:
        raise TensorError(
            f"{name}: out_dtype is {out_dtype}, expected torch.float16 or torch.bfloat16: give one of them"
        )
    if bias is not None:
        check_alike(name, (out_dtype,), bias=bias)
        check_shape(name, {"bias": (n,)}, f"one element for each of the {n} columns", bias=bias)
    for other, tensor in {"a_scales": a_scales, "bias": bias}.items():
        if tensor is not None and tensor.device != a_codes.device:
            raise TensorError(
                f"{name}: {other} is on {tensor.device} and a_codes on {a_codes.device}: move one with .to()"
            )
    return _scaled_gemm(a_codes, a_scales, b_codes, b_scales, bias, out_dtype)


def _check_rows(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], codes: torch.dtype) -> None:
    what = "weight" if name == "quantize_rows" else "x"
    if x.dim() == 0:
        raise TensorError(f"{name}: {what} is a scalar, expected [..., k]: reshape it")
    check_alike(name, dtypes, **{what: x})
    if codes not in CODES:
        raise TensorError(f"{name}: codes of {codes} are not known: use torch.int8 or torch.float8_e4m3fn")


def check_device(name: str, codes: torch.dtype, device: torch.device) -> None:
    """Raises DeviceError if a GPU has no instructions for these codes."""
    here = architecture(device)
    able = capabilities(here)
    if not (able.e4m3 if codes == torch.float8_e4m3fn else able.mma):
        raise DeviceError(f"{name}: {codes} needs {_NEEDS[codes]} or later, {device} is {here}: use torch.int8")


# ---- Rounding to codes ----

_CHUNK = 8  # elements that are read at a time
_KEPT = 8  # kKept in quantize.cu: chunks that a thread keeps
_QUANTIZE_MOST = 256  # kMostThreads in quantize.cu
_QUANTIZE = {
    (dtype, codes): unit(
        "w8a8/quantize.cu", needs=_NEEDS[codes], ELEMENT=ELEMENTS[dtype], E4M3=int(codes == torch.float8_e4m3fn)
    ).kernel("quantize", _QUANTIZE_PARAMETERS)
    for dtype, codes in itertools.product(HALVES, CODES)
}


def _launch_quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    check_device("quantize_tokens", dtype, x.device)
    if x.numel() == 0:
        return reference.quantize(x, dtype)
    x = x.contiguous()
    codes, scales = _fake_quantize(x, dtype)
    k = x.shape[-1]
    whole = aligned(x) and k % _CHUNK == 0
    threads = min(_QUANTIZE_MOST, 32 * blocks((k, 32 * _CHUNK * _KEPT))) if whole else _QUANTIZE_MOST
    _QUANTIZE[x.dtype, dtype](
        x.numel() // k, threads, x=x, codes=codes, scales=scales, k=k, whole=whole, dependent=True
    )
    return codes, scales


def _fake_quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    return codes, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


_quantize = operator(
    "quantize_tokens(Tensor x, ScalarType dtype) -> (Tensor, Tensor)",
    cuda=_launch_quantize,
    reference=reference.quantize,
    fake=_fake_quantize,
)


# ---- The product ----


# float8_e4m3fn needs a second set of sums in registers, which 128 x 256 has no room for.
HOPPER = {
    torch.float8_e4m3fn: (Sm90Tiling(128, 192, 4, 3, 0.75), Sm90Tiling(128, 128, 5, 2, 0.7)),
    torch.int8: (Sm90Tiling(128, 256, 4, 1, 0.78), Sm90Tiling(128, 128, 6, 1, 0.7)),
}
# A warp computes what kWarpM and kWarpN in sm80_w8a8.cu say.
AMPERE = (Sm80Tiling(128, 128, 64, 64, 32, 4, 0.4), Sm80Tiling(64, 64, 128, 32, 32, 3, 0.25))

COLUMN_BYTES = 8
"""Of shared memory on Hopper per column of a tile: a scale and the bias."""

_NO_MAP = bytes(128)
_ROWS_OF_TILES = 2048  # of the output that are walked together, so that L2 serves a wave of tiles
_STEP = 128  # parts of k are a multiple of this
_EXACT = 131072 - _STEP  # of k: as many products of 8 bits fit into int32
_LEAST_PART = 512  # of k, below which splitting is not considered
_MOST_SPLITS = 16

# The model of `choose`, in clocks of a multiprocessor; the rates are an H100's. At 1.7 GHz it comes within 12% of what
# gate_up and down of ChatGLM2-6B took there with 1024 and 4096 tokens, and ranks the tilings of HOPPER as they did.
_PRODUCTS = 4096  # multiplications and additions a clock
_MEMORY = 1750  # bytes a clock from and to global memory, for all multiprocessors
_TILE = 1500  # a tile beside its products: filling the ring, writing the result
_REDUCTION = 5000  # launching split_k_reduce


def sm80_shared(tiling: Sm80Tiling) -> int:
    """Bytes of shared memory of a block of sm80_w8a8.cu."""
    return (tiling.tile_m + tiling.tile_n) * tiling.tile_k * tiling.stages


def hopper_kernel(tiling: Sm90Tiling, codes: torch.dtype, dtype: torch.dtype, experts: int = 0) -> Kernel:
    """The kernel for Hopper.

    Args:
        codes, dtype: of the operands and of the result.
        experts: 0; or for a mixture of experts 1, or 2 with a gate.
    """
    return unit(
        "w8a8/sm90_w8a8.cu",
        needs="sm_90a",
        ELEMENT=ELEMENTS[dtype],
        SUM=_SUMS[codes],
        TILE_N=tiling.tile_n,
        STAGES=tiling.stages,
        BUFFERS=tiling.buffers,
        EXPERTS=experts,
        SHARED_BYTES=tiling.shared(COLUMN_BYTES),
    ).kernel("sm90_w8a8", _SM90_PARAMETERS)


def ampere_kernel(tiling: Sm80Tiling, codes: torch.dtype, dtype: torch.dtype, experts: int = 0) -> Kernel:
    """The kernel for other GPUs; `experts`: 1 for a mixture of experts."""
    return unit(
        "w8a8/sm80_w8a8.cu",
        needs=_NEEDS[codes],
        ELEMENT=ELEMENTS[dtype],
        SUM=_SUMS[codes],
        TILE_M=tiling.tile_m,
        TILE_N=tiling.tile_n,
        TILE_K=tiling.tile_k,
        STAGES=tiling.stages,
        EXPERTS=experts,
        SHARED_BYTES=sm80_shared(tiling),
    ).kernel("sm80_w8a8", _SM80_PARAMETERS)


_HOPPER_KERNELS = {
    (tiling, codes, dtype): hopper_kernel(tiling, codes, dtype)
    for codes, tilings in HOPPER.items()
    for tiling in tilings
    for dtype in HALVES
}
_AMPERE_KERNELS = {
    (tiling, codes, dtype): ampere_kernel(tiling, codes, dtype)
    for tiling, codes, dtype in itertools.product(AMPERE, CODES, HALVES)
}


@functools.lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, tilings: tuple[_Tiling, ...], multiprocessors: int) -> tuple[_Tiling, int]:
    """The tiling with the least estimated time, and how much of k a block sums."""
    least = blocks((k, _EXACT))
    splits = range(least, max(least, min(_MOST_SPLITS, k // _LEAST_PART)) + 1)
    return cheapest(tilings, k, splits, lambda _: _STEP, functools.partial(_clocks, m, n, k, multiprocessors))


def _clocks(m: int, n: int, k: int, multiprocessors: int, tiling: Sm80Tiling | Sm90Tiling, part: int) -> float:
    """Waves of tiles, each as long as its products or its share of the operands take; and adding up the parts of k."""
    splits = blocks((k, part))
    works = tiling.tiles(m, n) * splits
    computing = part * tiling.tile_m * tiling.tile_n / (_PRODUCTS * tiling.efficiency) + _TILE
    reading = (m + n) * k / works / _MEMORY
    full, rest = divmod(works, multiprocessors)
    waves = full * max(computing, multiprocessors * reading) + (max(computing, rest * reading) if rest else 0)
    combining = _REDUCTION + 8 * splits * m * n / _MEMORY if splits > 1 else 0
    return waves + combining


def hopper(a: Tensor, b: Tensor, finish: Finish, out: Tensor, tiling: Sm90Tiling, part: int) -> None:
    """The product on an sm_90a GPU: codes a `[m, k]` and b `[n, k]`, no side 0, `out` `[m, n]` contiguous.

    Args:
        finish: scales of a and b and the bias or `None`, contiguous.
        tiling, part: as `choose` gives them.
    """
    (m, k), n = a.shape, b.shape[0]
    a_scale, b_scale, bias = finish
    map_a, map_b = tile_maps(a, tiling.tile_m, ROW_BYTES), tensor_map(b, tiling.tile_n, ROW_BYTES)
    splits = blocks((k, part))
    partial = partial_sums(splits, out)
    direct = partial is not None or not fits(out)
    map_out = _NO_MAP if direct else tensor_map(out, BOX, BOX)
    _HOPPER_KERNELS[tiling, a.dtype, out.dtype](
        min(tiling.tiles(m, n) * splits, multiprocessors(a.device)),
        tiling.threads,
        map_a=map_a,
        map_b=map_b,
        map_out=map_out,
        a_scale=a_scale,
        b_scale=b_scale,
        bias=bias,
        out=out,
        partial=partial,
        m=m,
        n=n,
        k=k,
        part=part,
        splits=splits,
        group=_ROWS_OF_TILES // tiling.tile_m,
        direct=direct,
        list=None,
        shared=tiling.shared(COLUMN_BYTES),
        dependent=True,
    )
    reduce(partial, bias, out)


def ampere(a: Tensor, b: Tensor, finish: Finish, out: Tensor, tiling: Sm80Tiling, part: int) -> None:
    """The same on any GPU that has the instructions."""
    (m, k), n = a.shape, b.shape[0]
    a_scale, b_scale, bias = finish
    splits = blocks((k, part))
    partial = partial_sums(splits, out)
    _AMPERE_KERNELS[tiling, a.dtype, out.dtype](
        (tiling.tiles(m, n), splits),
        tiling.threads,
        a=a,
        b=b,
        a_scale=a_scale,
        b_scale=b_scale,
        bias=bias,
        out=out,
        partial=partial,
        m=m,
        n=n,
        k=k,
        a_stride=a.stride(0),
        b_stride=b.stride(0),
        k_per_split=part,
        list=None,
        shared=sm80_shared(tiling),
        dependent=True,
    )
    reduce(partial, bias, out)


def _launch(
    a_codes: Tensor, a_scales: Tensor, b_codes: Tensor, b_scales: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    check_device("scaled_gemm", a_codes.dtype, a_codes.device)
    (m, k), n = a_codes.shape, b_codes.shape[0]
    if 0 in (m, n, k):
        return reference.scaled_gemm(a_codes, a_scales, b_codes, b_scales, bias, out_dtype)
    out = torch.empty(m, n, dtype=out_dtype, device=a_codes.device)
    bias = None if bias is None else bias.contiguous()
    a, b = addressable(a_codes), addressable(b_codes)
    finish = a_scales.contiguous(), b_scales.contiguous(), bias
    if capabilities(architecture(a.device)).wgmma:
        hopper(a, b, finish, out, *choose(m, n, k, HOPPER[a.dtype], multiprocessors(a.device)))
    else:
        ampere(a, b, finish, out, *choose(m, n, k, AMPERE, multiprocessors(a.device)))
    return out


def _fake(
    a_codes: Tensor, a_scales: Tensor, b_codes: Tensor, b_scales: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    return torch.empty(a_codes.shape[0], b_codes.shape[0], dtype=out_dtype, device=a_codes.device)


_scaled_gemm = operator(
    "scaled_gemm(Tensor a_codes, Tensor a_scales, Tensor b_codes, Tensor b_scales, Tensor? bias, "
    "ScalarType out_dtype) -> Tensor",
    cuda=_launch,
    reference=reference.scaled_gemm,
    fake=_fake,
)
