"""A model on one device with all that an engine keeps there: its KV cache, the step executor and the runner."""

from dataclasses import dataclass

import torch

from warpbus.cuda.devices import free_memory
from warpbus.cuda.lent import lent
from warpbus.dist import Group
from warpbus.engine.blocks import BLOCK
from warpbus.engine.kv_cache import KVCache, token_bytes
from warpbus.engine.offload import OffloadableModel
from warpbus.engine.runner import Runner
from warpbus.engine.step import StepExecutor
from warpbus.errors import DeviceError
from warpbus.models import Decoder, ModelConfig

_RESERVE = 0.1  # of the free memory at the start of an engine: for activations and other programs
_RESERVE_LENT = 0.25  # the same on a lent device, where the cache allocates all of its memory at once, for good


@dataclass
class ModelInstance:
    """What an engine has on one device; a move to another device replaces all of it.

    Attributes:
        offloadable: the model's weights, if they can be offloaded; else None.
    """

    model: Decoder
    device: torch.device
    cache: KVCache
    step: StepExecutor
    runner: Runner
    offloadable: OffloadableModel | None


def affordable_blocks(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, kv_dtype: str, *, wanted: int, reserved: int
) -> int:
    """How many of the `wanted` blocks fit the free memory of a device, besides `reserved` further ones; may be
    negative.

    Args:
        dtype: of the activations.
        kv_dtype: of the cache, one of `KV_DTYPES`.
    """
    free = free_memory(device)
    if free is None:
        return wanted
    block_bytes = BLOCK * token_bytes(config, dtype, kv_dtype)
    reserve = _RESERVE if lent(device) is None else _RESERVE_LENT
    return min(wanted, int(free * (1 - reserve)) // block_bytes - reserved)


def commit_blocks(cache: KVCache, group: Group | None, blocks: int) -> int:
    """Commit memory for the first blocks of a cache; how many are committed.

    Raises:
        DeviceError: one of several processes that share a model has not enough memory. By itself it would go on with
            fewer blocks, but all processes must schedule the same sequences.
    """
    committed = cache.commit(blocks)
    if committed < blocks and group is not None and group.world > 1:
        raise DeviceError(f"{group.device}: out of memory for the cache: end what else uses it")
    return committed
