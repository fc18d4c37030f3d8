"""`trellis_search`: the paths through a trellis that are nearest to tiles of weights (`qtensor.trellis`)."""

import ctypes

import torch
from torch import Tensor

from warpbus.cuda.parameters import Parameters
from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops.arguments import gpu_has_kernels
from warpbus.kernels.ops.cpu_library import Task, is_available, pointer
from warpbus.kernels.reference.trellis import trellis_search as reference_trellis_search
from warpbus.kernels.units import unit
from warpbus.qtensor.scheme import TRELLIS_BITS
from warpbus.qtensor.trellis import STATES, STEPS, code_table

_SEARCH_THREADS = 256  # kThreads in trellis/search.cu
_PARAMETERS = Parameters("const float* x, unsigned char* symbols")
_SEARCH = {bits: unit("trellis/search.cu", BITS=bits).kernel("trellis_search", _PARAMETERS) for bits in TRELLIS_BITS}


class _TrellisSearch(Task):
    """`TrellisSearch` of csrc/cpu/trellis.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "first", "second", "symbols")),
        *((name, ctypes.c_int64) for name in ("tiles", "bits", "threads")),
    )


def trellis_search(x: Tensor, bits: int) -> Tensor:
    """Find the path of least squared error for each tile.

    The path is the best one whose ends meet in the bits that are best for the steps around them; tiles do not depend
    on each other. CPUs and GPUs since Ampere have a kernel; elsewhere PyTorch computes it. They round the costs of
    paths differently, so that of two paths that are equally near each may find another one.

    Args:
        x: float32 `[tiles, 256]`, finite, in the order of `to_tiles`, in the unit of `code_table`.
        bits: 2 or 3 per weight.

    Returns:
        symbols of `2 * bits` bits, uint8 `[tiles, 128]`.

    Raises:
        TensorError: x has another shape or dtype.
        UsageError: other bits.
    """
    if x.dim() != 2 or x.shape[1] != 2 * STEPS or x.dtype != torch.float32:
        raise TensorError(
            f"trellis_search: x is {x.dtype} {list(x.shape)}, expected torch.float32 [tiles, {2 * STEPS}]"
        )
    if bits not in TRELLIS_BITS:
        raise UsageError(f"trellis_search: bits is {bits}: give one of {', '.join(map(str, TRELLIS_BITS))}")
    if len(x) and x.device.type == "cuda" and gpu_has_kernels(x.device):
        symbols = torch.empty(len(x), STEPS, dtype=torch.uint8, device=x.device)
        _SEARCH[bits](len(x), _SEARCH_THREADS, shared=_chosen_bytes(bits), x=x.contiguous(), symbols=symbols)
        return symbols
    if x.device.type != "cpu" or not len(x) or not is_available():
        return reference_trellis_search(x, bits)
    x, table = x.contiguous(), code_table(x.device).T.contiguous()
    symbols = torch.empty(len(x), STEPS, dtype=torch.uint8)
    _TrellisSearch(
        *(pointer(each) for each in (x, table[0], table[1], symbols)), len(x), bits, torch.get_num_threads()
    ).run("trellis")
    return symbols


def _chosen_bytes(bits: int) -> int:
    """kSteps * kStepBytes in trellis/search.cu: for each step and group of states, the upper bits of the best one."""
    groups = STATES >> 2 * bits
    return STEPS * groups // (2 if 2 * bits <= 4 else 1)
