"""`peer_sum`, `peer_gather`: small tensors of several GPUs of one machine, which reach each other's memory, on all."""

from typing import Any

import torch
from torch import Tensor

from warpbus.errors import TensorError
from warpbus.kernels.ops.arguments import blocks, check_alike, check_shape, per_dtype

MOST_RANKS = 8
MOST_BYTES = 512 * 1024
"""The largest tensor: beyond, a ring that sends each GPU only a share of the others' tensors is quicker."""

PATIENCE = 1800.0
"""Seconds that a GPU waits for another one, as NCCL's watchdog does."""

_THREADS = 256
_BLOCK_BYTES = 16 * _THREADS
_MOST_BLOCKS = MOST_BYTES // _BLOCK_BYTES

_SUM = per_dtype(
    "peers/exchange.cu",
    "peer_sum",
    "const ELEMENT* x, const ELEMENT* residual, ELEMENT* out, const unsigned long long* buffers, "
    "unsigned int* epochs, int* missing, int chunks, int rank, int world, int most_blocks, long long limit",
)
_GATHER = per_dtype(
    "peers/exchange.cu",
    "peer_gather",
    "const ELEMENT* x, ELEMENT* out, const unsigned long long* buffers, unsigned int* epochs, int* missing, "
    "int chunks, int rank, int world, int most_blocks, long long limit",
    (torch.float32,),
)[torch.float32]


def buffer_bytes(world: int) -> int:
    """The memory of each of `world` GPUs that the others can write to, zero before the first sum."""
    return world * _MOST_BLOCKS * 4 + 2 * world * MOST_BYTES


def new_epochs(device: torch.device) -> Tensor:
    """A GPU's count of rounds."""
    return torch.zeros(_MOST_BLOCKS, dtype=torch.int32, device=device)


def fits(x: Tensor) -> bool:
    """Whether a tensor is small enough, and a whole number of 16 bytes."""
    return 0 < x.nbytes <= MOST_BYTES and x.nbytes % 16 == 0


def peer_sum(
    x: Tensor,
    residual: Tensor | None,
    buffers: Tensor,
    epochs: Tensor,
    rank: int,
    missing: Tensor | None = None,
    patience: float = PATIENCE,
) -> Tensor:
    """The sum over the GPUs of x, plus `residual`, on each of them; each calls it as often, with the same shapes.

    Args:
        x: float32, float16 or bfloat16, of any shape that `fits`; copied where it is not contiguous and aligned.
        residual: alike.
        buffers: int64 `[world]`: the addresses of all GPUs' buffers of `buffer_bytes`, as this GPU sees them.
        epochs: this GPU's, from `new_epochs`; changed.
        rank: of this GPU among `world`, at most `MOST_RANKS`.
        missing: int32 `[1]` in pinned memory of the host, 0. The kernel writes a rank + 1 there where that rank does
            not come within `patience` seconds, and ends all work of the process on this GPU: CUDA then reports
            "unspecified launch failure" for every call.

    Returns:
        like x: added in float32 in the order of ranks and rounded once, the same bits on all GPUs.

    Raises:
        TensorError: other shapes, dtypes or devices.
    """
    check_alike("peer_sum", x=x, residual=x if residual is None else residual)
    if residual is not None:
        check_shape("peer_sum", {"residual": tuple(x.shape)}, "it is added to x", residual=residual)
    _check("peer_sum", x, rank, buffers)
    x, out = _aligned(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    residual = None if residual is None else _aligned(residual)
    arguments = _arguments(x, out, buffers, epochs, rank, missing, patience)
    _SUM[x.dtype](*_grid(x), residual=residual, **arguments, dependent=True)
    return out


def peer_gather(
    x: Tensor,
    buffers: Tensor,
    epochs: Tensor,
    rank: int,
    missing: Tensor | None = None,
    patience: float = PATIENCE,
) -> Tensor:
    """The tensors of all GPUs, `[world, *x.shape]` in the order of ranks, on each of them; as `peer_sum`, of any dtype.

    Raises:
        TensorError: another shape.
    """
    _check("peer_gather", x, rank, buffers)
    x, out = _aligned(x), torch.empty(len(buffers), *x.shape, dtype=x.dtype, device=x.device)
    _GATHER(*_grid(x), **_arguments(x, out, buffers, epochs, rank, missing, patience), dependent=True)
    return out


def _check(name: str, x: Tensor, rank: int, buffers: Tensor) -> None:
    if not fits(x) or not 0 <= rank < len(buffers) <= MOST_RANKS:
        raise TensorError(
            f"{name}: x has {x.nbytes} bytes on GPU {rank} of {len(buffers)}, expected a multiple of 16 up to "
            f"{MOST_BYTES} and at most {MOST_RANKS} GPUs: use NCCL"
        )


def _grid(x: Tensor) -> tuple[int, int]:
    return blocks((x.nbytes, _BLOCK_BYTES)), _THREADS


def _arguments(
    x: Tensor, out: Tensor, buffers: Tensor, epochs: Tensor, rank: int, missing: Tensor | None, patience: float
) -> dict[str, Any]:
    """The arguments that both kernels have."""
    return {
        "x": x,
        "out": out,
        "buffers": buffers,
        "epochs": epochs,
        "missing": missing,
        "chunks": x.nbytes // 16,
        "rank": rank,
        "world": len(buffers),
        "most_blocks": _MOST_BLOCKS,
        "limit": int(patience * 1e9),  # nanoseconds
    }


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
