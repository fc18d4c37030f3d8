"""`peer_sum`: the sum of small tensors of several GPUs of one machine, which reach each other's memory."""

import torch
from torch import Tensor

from warpbus.errors import TensorError
from warpbus.kernels.ops.arguments import blocks, check_alike, check_shape, per_dtype

MOST_RANKS = 8
MOST_BYTES = 512 * 1024
"""The largest tensor: beyond, a ring that sends each GPU only a share of the others' tensors is quicker."""

_THREADS = 256
_BLOCK_BYTES = 16 * _THREADS
_MOST_BLOCKS = MOST_BYTES // _BLOCK_BYTES

_KERNELS = per_dtype("peers/sum.cu", "peer_sum", "PPPPPiiii")


def buffer_bytes(world: int) -> int:
    """What each of `world` GPUs needs of memory that the others can write to, zero before the first sum."""
    return world * _MOST_BLOCKS * 4 + 2 * world * MOST_BYTES


def new_epochs(device: torch.device) -> Tensor:
    """A GPU's count of rounds."""
    return torch.zeros(_MOST_BLOCKS, dtype=torch.int32, device=device)


def fits(x: Tensor) -> bool:
    """Whether a tensor is small enough, and a whole number of 16 bytes."""
    return 0 < x.nbytes <= MOST_BYTES and x.nbytes % 16 == 0


def peer_sum(x: Tensor, residual: Tensor | None, buffers: Tensor, epochs: Tensor, rank: int) -> Tensor:
    """The sum over the GPUs of x, plus `residual`, on each of them; each calls it as often, with the same shapes.

    Args:
        x: float32, float16 or bfloat16, of any shape that `fits`; copied where it is not contiguous and aligned.
        residual: alike.
        buffers: int64 `[world]`: the addresses of all GPUs' buffers of `buffer_bytes`, as this GPU sees them.
        epochs: this GPU's, from `new_epochs`; changed.
        rank: of this GPU among `world`, at most `MOST_RANKS`.

    Returns:
        like x: added in float32 in the order of ranks and rounded once, the same bits on all GPUs.

    Raises:
        TensorError: other shapes, dtypes or devices.
    """
    check_alike("peer_sum", x=x, residual=x if residual is None else residual)
    if residual is not None:
        check_shape("peer_sum", {"residual": tuple(x.shape)}, "it is added to x", residual=residual)
    world = len(buffers)
    if not fits(x) or not 0 <= rank < world <= MOST_RANKS:
        raise TensorError(
            f"peer_sum: x has {x.nbytes} bytes on GPU {rank} of {world}, expected a multiple of 16 up to {MOST_BYTES} "
            f"and at most {MOST_RANKS} GPUs: use NCCL"
        )
    x, out = _aligned(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    residual = None if residual is None else _aligned(residual)
    grid = blocks((x.nbytes, _BLOCK_BYTES))
    arguments = x, residual, out, buffers, epochs, x.nbytes // 16, rank, world, _MOST_BLOCKS
    _KERNELS[x.dtype](grid, _THREADS, *arguments, dependent=True)
    return out


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
