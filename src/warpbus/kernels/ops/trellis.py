"""`trellis_search`: the paths through a trellis that are nearest to tiles of weights (`qtensor.trellis`)."""

import ctypes

import torch
from torch import Tensor

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops.cpu_library import Task, is_available, pointer
from warpbus.kernels.reference.trellis import trellis_search as reference_trellis_search
from warpbus.qtensor.scheme import TRELLIS_BITS
from warpbus.qtensor.trellis import STEPS, code_table


class _TrellisSearch(Task):
    """`TrellisSearch` of csrc/cpu/trellis.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "first", "second", "symbols")),
        *((name, ctypes.c_int64) for name in ("tiles", "bits", "threads")),
    )


def trellis_search(x: Tensor, bits: int) -> Tensor:
    """Find the path of least squared error for each tile.

    The path is the best one whose ends meet in the bits that are best for the steps around them; tiles do not depend
    on each other. The CPU has a kernel; elsewhere PyTorch computes it.

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
    if x.device.type != "cpu" or not len(x) or not is_available():
        return reference_trellis_search(x, bits)
    x, table = x.contiguous(), code_table(x.device).T.contiguous()
    symbols = torch.empty(len(x), STEPS, dtype=torch.uint8)
    _TrellisSearch(
        *(pointer(each) for each in (x, table[0], table[1], symbols)), len(x), bits, torch.get_num_threads()
    ).run("trellis")
    return symbols
