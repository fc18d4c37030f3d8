"""A model on one device with all that an engine keeps there: its KV cache, the step executor and the runner."""

from dataclasses import dataclass

import torch

from warpbus.cuda.devices import free_memory
from warpbus.cuda.remote import remote_backend
from warpbus.dist import Group
from warpbus.engine.blocks import BLOCK
from warpbus.engine.kv_cache import KVCache, token_bytes
from warpbus.engine.offload import OffloadableModel
from warpbus.engine.prefixes import Prefixes
from warpbus.engine.runner import Runner
from warpbus.engine.step import StepExecutor
from warpbus.errors import DeviceError
from warpbus.models import Decoder

_RESERVE = 0.1  # of the free memory at the start of an engine: for activations and other programs
_RESERVE_REMOTE = 0.25  # the same on a remote device, where the cache allocates all of its memory at once, for good


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


def cache_blocks(
    model: Decoder,
    prefixes: Prefixes,
    *,
    max_model_len: int | None,
    max_num_seqs: int,
    kv_dtype: str,
    cache_tokens: int | None,
) -> int:
    """How many blocks the cache of an engine has for sequences, besides those of prefixes; see the arguments of
    `Engine`.

    If several processes share the model, all get the smallest number of any.

    Raises:
        DeviceError: less memory than one sequence needs.
    """
    config, device = model.config, model.final_norm.weight.device
    if cache_tokens is None:
        each = -(-(max_model_len or config.max_context) // BLOCK) + prefixes.extra_blocks
        blocks = _affordable_blocks(model, prefixes, kv_dtype, wanted=max_num_seqs * each)
    else:
        blocks = cache_tokens // BLOCK
    if model.group is not None:
        blocks = model.group.smallest(blocks)
    least = max_model_len or 2 * BLOCK
    if blocks * BLOCK < least:
        raise DeviceError(
            f"{device}: there is room for a cache of {max(0, blocks) * BLOCK:,} tokens, {least:,} are needed: end what "
            "else uses its memory, lower max_model_len, quantize the model, or give kv_dtype int8"
        )
    return blocks


def _affordable_blocks(model: Decoder, prefixes: Prefixes, kv_dtype: str, *, wanted: int) -> int:
    """How many of the `wanted` blocks fit the free memory of the model's device; may be negative."""
    weight = model.final_norm.weight
    free = free_memory(weight.device)
    if free is None:
        return wanted
    block_bytes = BLOCK * token_bytes(model.config, weight.dtype, kv_dtype)
    reserve = _RESERVE if remote_backend(weight.device) is None else _RESERVE_REMOTE
    return min(wanted, int(free * (1 - reserve)) // block_bytes - (1 + prefixes.blocks + prefixes.extra_blocks))


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
