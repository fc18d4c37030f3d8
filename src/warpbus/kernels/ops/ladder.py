"""The ladder: one product computed in ever better ways, each rung a kernel that can be read, chosen and measured.

`matmul` and `gemv` take the name of a rung. On the CPU every rung computes the same reference, after the same checks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.cuda.green import multiprocessors
from warpbus.cuda.jit import architecture
from warpbus.cuda.kernel import runs_on
from warpbus.errors import DeviceError, UsageError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops import gemm_sm80
from warpbus.kernels.ops.arguments import (
    ELEMENTS,
    HALVES,
    aligned,
    blocks,
    check_alike,
    check_rank,
    check_shape,
    per_dtype,
    strides,
)
from warpbus.kernels.ops.gemm import gemm
from warpbus.kernels.reference import ladder as reference


@dataclass(frozen=True)
class Rung:
    """One step of a ladder.

    Attributes:
        name: the variant's name, as the functions take it.
        needs: the oldest architecture it runs on, or the only one, where it ends with "a".
        dtypes: the dtypes in which it computes.
    """

    name: str
    needs: str
    dtypes: tuple[torch.dtype, ...]


_ALL = tuple(ELEMENTS)


def _rungs(*rungs: Rung) -> dict[str, Rung]:
    return {rung.name: rung for rung in rungs}


MATMUL_RUNGS: dict[str, Rung] = _rungs(
    Rung("naive", "sm_80", _ALL),
    Rung("tiled", "sm_80", _ALL),
    Rung("wmma", "sm_80", HALVES),
    Rung("mma_naive", "sm_80", HALVES),
    Rung("mma_permuted", "sm_80", HALVES),
    Rung("mma_cp_async", "sm_80", HALVES),
    Rung("mma_stages_3", "sm_80", HALVES),
    Rung("mma_stages_4", "sm_80", HALVES),
    Rung("mma_swizzle", "sm_80", HALVES),
    Rung("wgmma", "sm_90a", HALVES),
    Rung("wgmma_persistent", "sm_90a", HALVES),
)
"""In the order of the ladder; `docs/tutorial/README.md` has what each rung adds to the one before it."""

GEMV_RUNGS: dict[str, Rung] = _rungs(
    Rung("thread", "sm_80", _ALL),
    Rung("warp", "sm_80", _ALL),
    Rung("vectorised", "sm_80", _ALL),
    Rung("split_k", "sm_80", _ALL),
)

_TILE = 32  # kTile in tiled_product.cuh
_WMMA_TILE = 128  # kTileM and kTileN in matmul_wmma.cu
_BLOCK = 256
_WARPS_OF_A_BLOCK = _BLOCK // 32
_WARPS_OF_A_MULTIPROCESSOR = 32  # of gemv_split_k, as its registers allow
_LOADS_OF_A_WARP = 4 * 32  # 16-byte loads of warp_dot.cuh that are under way together
_LARGEST_GRID_SIDE = 65_535  # of gridDim.y

_NAIVE = per_dtype(
    "ladder/matmul_naive.cu",
    "matmul_naive",
    "const ELEMENT* a, const ELEMENT* b, ELEMENT* out, long long m, long long n, long long k, long long a_row, "
    "long long a_column, long long b_row, long long b_column",
)
_TILED = per_dtype(
    "ladder/matmul_tiled.cu",
    "matmul_tiled",
    "const ELEMENT* a, const ELEMENT* b, ELEMENT* out, long long m, long long n, long long k, long long a_row, "
    "long long a_column, long long b_row, long long b_column",
)
_WMMA = per_dtype(
    "ladder/matmul_wmma.cu",
    "matmul_wmma",
    "const ELEMENT* a, const ELEMENT* b, ELEMENT* out, long long m, long long n, long long k, int aligned",
    HALVES,
)
_GEMV_THREAD = per_dtype(
    "ladder/gemv.cu", "gemv_thread", "const ELEMENT* w, const ELEMENT* x, ELEMENT* out, long long n, long long k"
)
_GEMV_WARP = per_dtype(
    "ladder/gemv.cu", "gemv_warp", "const ELEMENT* w, const ELEMENT* x, ELEMENT* out, long long n, long long k"
)
_GEMV_VECTORISED = per_dtype(
    "ladder/gemv.cu",
    "gemv_vectorised",
    "const ELEMENT* w, const ELEMENT* x, ELEMENT* out, long long n, long long k, int aligned",
)
_GEMV_SPLIT_K = per_dtype(
    "ladder/gemv.cu",
    "gemv_split_k",
    "const ELEMENT* w, const ELEMENT* x, float* partial, long long n, long long k, long long part, int aligned",
)
_GEMV_COMBINE = per_dtype(
    "ladder/gemv.cu", "gemv_combine", "const float* partial, ELEMENT* out, long long n, int splits"
)
_LINEAR_VECTOR = per_dtype(
    "ladder/linear_sigmoid.cu",
    "linear_sigmoid_vector",
    "const ELEMENT* x, const ELEMENT* weight, const ELEMENT* bias, ELEMENT* out, long long n, long long k, int aligned",
)
_LINEAR_BATCH = per_dtype(
    "ladder/linear_sigmoid.cu",
    "linear_sigmoid_batch",
    "const ELEMENT* x, const ELEMENT* weight, const ELEMENT* bias, ELEMENT* out, long long m, long long n, long long k",
)


def matmul(a: Tensor, b: Tensor, rung: str) -> Tensor:
    """`a @ b`, by one rung of the ladder.

    Args:
        a, b: `[m, k]` and `[k, n]` of any sizes and strides. "naive" and "tiled" follow the strides, so that a
            transposed matrix costs no copy; the others copy what is not contiguous.
        rung: a name in `MATMUL_RUNGS`, which also says the dtypes.

    Returns:
        `[m, n]`, contiguous, in the dtype of `a`; summed in float32.

    Raises:
        TensorError: other shapes, dtypes or devices.
        UsageError: no such rung.
        DeviceError: the rung needs another GPU.
    """
    dtypes = _rung("ladder.matmul", MATMUL_RUNGS, rung).dtypes
    name = f"ladder.matmul {rung}"
    check_rank(name, 2, a=a, b=b)
    check_alike(name, dtypes, a=a, b=b)
    check_shape(name, {"b": (a.shape[1], b.shape[1])}, f"a has {a.shape[1]} columns, and b needs as many rows", b=b)
    return _matmul(a, b, rung)


def gemv(w: Tensor, x: Tensor, rung: str) -> Tensor:
    """`w @ x`, by one rung of the ladder.

    Args:
        w, x: `[n, k]` and `[k]`, float32, float16 or bfloat16, of any sizes and strides; copied where not contiguous.
        rung: a name in `GEMV_RUNGS`.

    Returns:
        `[n]` in the dtype of `w`; summed in float32.

    Raises:
        TensorError: other shapes, dtypes or devices.
        UsageError: no such rung.
        DeviceError: the rung needs another GPU.
    """
    dtypes = _rung("ladder.gemv", GEMV_RUNGS, rung).dtypes
    name = f"ladder.gemv {rung}"
    check_rank(name, 2, w=w)
    check_rank(name, 1, x=x)
    check_alike(name, dtypes, w=w, x=x)
    check_shape(name, {"x": (w.shape[1],)}, f"w has {w.shape[1]} columns, and x needs as many elements", x=x)
    return _gemv(w, x, rung)


def linear_sigmoid(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`sigmoid(x @ weight.T + bias)` in one kernel: bias and sigmoid are applied before the sum leaves its register.

    Args:
        x: `[..., k]`, float32, float16 or bfloat16.
        weight, bias: `[n, k]` and `[n]`, in the dtype of `x`.

    Returns:
        `[..., n]`, contiguous, in the dtype of `x`; computed in float32.

    Raises:
        TensorError: other shapes, dtypes or devices.
    """
    name = "linear_sigmoid"
    check_rank(name, 2, weight=weight)
    check_alike(name, x=x, weight=weight, bias=bias)
    n, k = weight.shape
    check_shape(name, {"x": (*x.shape[:-1], k)}, f"its last axis is multiplied with the {k} columns of weight", x=x)
    check_shape(name, {"bias": (n,)}, f"one element for each of the {n} rows of weight", bias=bias)
    return _linear_sigmoid(x, weight, bias)


def check_architecture(name: str, rung: Rung, device: torch.device) -> None:
    """A rung runs on a GPU.

    Raises:
        DeviceError: it does not; the message names what it needs and what is there.
    """
    here = architecture(device)
    if not runs_on(here, rung.needs):
        raise DeviceError(f"{name}: rung {rung.name} needs {rung.needs}, {device} is {here}: choose another rung")


def _rung(name: str, rungs: dict[str, Rung], rung: str) -> Rung:
    if rung not in rungs:
        raise UsageError(f"{name}: rung is {rung!r}: give one of {', '.join(rungs)}")
    return rungs[rung]


def _launch_matmul(a: Tensor, b: Tensor, rung: str) -> Tensor:
    check_architecture("ladder.matmul", MATMUL_RUNGS[rung], a.device)
    if a.numel() == 0 or b.numel() == 0:
        return a.new_zeros(a.shape[0], b.shape[1])
    if rung in _GEMM_VARIANTS:
        return gemm(a.contiguous(), b.contiguous(), variant=_GEMM_VARIANTS[rung])
    out = a.new_empty(a.shape[0], b.shape[1])
    _MATMUL_LAUNCHERS[rung](a, b, out)
    return out


def _launch_naive(a: Tensor, b: Tensor, out: Tensor) -> None:
    (m, n), k = out.shape, a.shape[1]
    grid = (blocks((n, 32)), min(blocks((m, 8)), _LARGEST_GRID_SIDE))
    _NAIVE[a.dtype](grid, (32, 8), a=a, b=b, out=out, m=m, n=n, k=k, **strides("row", "column", a=a, b=b))


def _launch_tiled(a: Tensor, b: Tensor, out: Tensor) -> None:
    (m, n), k = out.shape, a.shape[1]
    grid = blocks((m, _TILE), (n, _TILE))
    _TILED[a.dtype](grid, (_TILE, _TILE), a=a, b=b, out=out, m=m, n=n, k=k, **strides("row", "column", a=a, b=b))


def _launch_wmma(a: Tensor, b: Tensor, out: Tensor) -> None:
    a, b = a.contiguous(), b.contiguous()
    (m, n), k = out.shape, a.shape[1]
    grid = blocks((m, _WMMA_TILE), (n, _WMMA_TILE))
    _WMMA[a.dtype](grid, _BLOCK, a=a, b=b, out=out, m=m, n=n, k=k, aligned=aligned(a, b))


def _launch_mma(rung: str) -> Callable[[Tensor, Tensor, Tensor], None]:
    return lambda a, b, out: gemm_sm80.launch(a.contiguous(), b.contiguous(), out, rung)


_GEMM_VARIANTS = {"wgmma": "sm90_wgmma", "wgmma_persistent": "sm90_hgemm"}
_MATMUL_LAUNCHERS: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {
    "naive": _launch_naive,
    "tiled": _launch_tiled,
    "wmma": _launch_wmma,
    **{rung: _launch_mma(rung) for rung in MATMUL_RUNGS if rung.startswith("mma_")},
}


def _launch_gemv(w: Tensor, x: Tensor, rung: str) -> Tensor:
    check_architecture("ladder.gemv", GEMV_RUNGS[rung], w.device)
    w, x = w.contiguous(), x.contiguous()
    n, k = w.shape
    out = w.new_empty(n)
    if n == 0:
        return out
    if rung == "thread":
        _GEMV_THREAD[w.dtype](blocks((n, _BLOCK)), _BLOCK, w=w, x=x, out=out, n=n, k=k)
        return out
    grid = blocks((n, _WARPS_OF_A_BLOCK))
    if rung == "warp":
        _GEMV_WARP[w.dtype](grid, _BLOCK, w=w, x=x, out=out, n=n, k=k)
    elif rung == "vectorised":
        _GEMV_VECTORISED[w.dtype](grid, _BLOCK, w=w, x=x, out=out, n=n, k=k, aligned=aligned(w, x))
    else:
        part = _split(n, k, w)
        splits = blocks((max(k, 1), part))
        partial = torch.empty(splits, n, dtype=torch.float32, device=w.device)
        _GEMV_SPLIT_K[w.dtype](
            (grid, splits), _BLOCK, w=w, x=x, partial=partial, n=n, k=k, part=part, aligned=aligned(w, x)
        )
        _GEMV_COMBINE[w.dtype](blocks((n, _BLOCK)), _BLOCK, partial=partial, out=out, n=n, splits=splits)
    return out


def _split(n: int, k: int, w: Tensor) -> int:
    """How many elements of a row a warp adds up.

    Rows are split until every multiprocessor has its warps, and no further than to what a warp asks for at a time.
    """
    least = _LOADS_OF_A_WARP * 16 // w.element_size()
    wanted = max(multiprocessors(w.device) * _WARPS_OF_A_MULTIPROCESSOR // n, 1)
    return least * blocks((max(k, 1), least * wanted))


def _launch_linear_sigmoid(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    n, k = weight.shape
    out = x.new_empty(*x.shape[:-1], n)
    if out.numel() == 0:
        return out
    m = out.numel() // n
    if m == 1:
        grid = blocks((n, _WARPS_OF_A_BLOCK))
        _LINEAR_VECTOR[x.dtype](
            grid, _BLOCK, x=x, weight=weight, bias=bias, out=out, n=n, k=k, aligned=aligned(x, weight)
        )
    else:
        grid = blocks((m, _TILE), (n, _TILE))
        _LINEAR_BATCH[x.dtype](grid, (_TILE, _TILE), x=x, weight=weight, bias=bias, out=out, m=m, n=n, k=k)
    return out


_matmul = operator(
    "ladder_matmul(Tensor a, Tensor b, str rung) -> Tensor",
    cuda=_launch_matmul,
    reference=lambda a, b, rung: reference.matmul(a, b),
    fake=lambda a, b, rung: a.new_empty(a.shape[0], b.shape[1]),
)
_gemv = operator(
    "ladder_gemv(Tensor w, Tensor x, str rung) -> Tensor",
    cuda=_launch_gemv,
    reference=lambda w, x, rung: reference.gemv(w, x),
    fake=lambda w, x, rung: w.new_empty(w.shape[0]),
)
_linear_sigmoid = operator(
    "linear_sigmoid(Tensor x, Tensor weight, Tensor bias) -> Tensor",
    cuda=_launch_linear_sigmoid,
    reference=reference.linear_sigmoid,
    fake=lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]),
)
