"""The cache of keys and values, as the operators take it."""

import torch
from torch import Tensor

from warpbus.errors import TensorError
from warpbus.kernels.ops.arguments import check_alike, check_rank, check_shape

CODES = {torch.int8: 1, torch.float8_e4m3fn: 2}  # as in csrc/common/cache_codes.cuh; 0 is the dtype of qkv


def check_cache(
    operator: str,
    qkv: Tensor,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None:
    """Keys and values are alike and fit `qkv` in dtype and device, scales are there for codes, and so is the table.

    Raises:
        TensorError: they do not.
    """
    check_rank(operator, 2, table=table)
    if keys.dim() != 4:
        raise TensorError(
            f"{operator}: keys have shape {list(keys.shape)}, expected [rows, kv_heads, capacity, head_dim]"
        )
    check_shape(operator, {"values": tuple(keys.shape)}, "that of keys", values=values)
    for of, tensor in (("keys", keys), ("values", values)):
        if tensor.dtype not in (qkv.dtype, *CODES) or tensor.dtype != keys.dtype or tensor.stride(-1) != 1:
            raise TensorError(
                f"{operator}: {of} are {tensor.dtype} with strides {tensor.stride()}: give both caches in {qkv.dtype}, "
                "torch.int8 or torch.float8_e4m3fn, with 1 as the last stride"
            )
    for of, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        if (scales is None) != (keys.dtype not in CODES):
            wanted = "float32 [rows, kv_heads, capacity]" if scales is None else "None"
            raise TensorError(f"{operator}: {of} does not go with a cache of {keys.dtype}: give {wanted}")
        if scales is not None:
            check_shape(operator, {of: tuple(keys.shape[:3])}, "that of keys", **{of: scales})
            if scales.stride(-1) != 1:
                raise TensorError(f"{operator}: {of} has strides {scales.stride()}: give 1 as the last one")
    floats = {"table": table, "key_scales": key_scales, "value_scales": value_scales}
    check_alike(operator, (torch.float32,), **{of: tensor for of, tensor in floats.items() if tensor is not None})
    for of, tensor in (("table", table), ("keys", keys), ("values", values)):
        if tensor.device != qkv.device:
            raise TensorError(f"{operator}: {of} is on {tensor.device} and qkv on {qkv.device}: move one with .to()")
