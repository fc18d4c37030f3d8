"""How processes share a run: each with the whole model (DDP), or with a part of every tensor (FSDP2).

Both give each process the mean of the gradients of all, so a loss that is to be added up is multiplied by their number.
"""

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from warpbus.dist import Group
from warpbus.train.balance import correction_biases
from warpbus.train.settings import TrainingSettings


def distribute(module: nn.Module, layers: Iterable[nn.Module], settings: TrainingSettings, group: Group) -> nn.Module:
    """The module as the processes train it together; each begins with the same weights.

    With FSDP2 (Zhao et al., 2023, arXiv:2304.11277) the parameters become `DTensor`s, of which each process has a part
    along the first axis; a layer is whole while it is computed. Make the optimizer afterwards.

    Args:
        module: its forward gives the loss.
        layers: parts of it, each whole by itself.
    """
    if group.world == 1:
        return module
    group.meet()
    if settings.sharding == "ddp":
        if settings.compile:
            # It would cut a whole model's graph where gradients are sent; those of one layer each are short enough.
            torch._dynamo.config.optimize_ddp = False
        # The weights are the same already: read from one file, or drawn from one seed.
        with warnings.catch_warnings():
            # torch 2.13 has a new name for this, which 2.11 does not know.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            return DistributedDataParallel(
                module,
                device_ids=[group.device] if group.device.type == "cuda" else None,
                init_sync=False,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
            )
    mesh = init_device_mesh(group.device.type, (group.world,))
    half = torch.bfloat16 if settings.dtype == "bfloat16" else None
    # Inputs stay as they are: autocast rounds them where DDP has them rounded.
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Correction biases stay whole, in float32: the policy would round them.
    ignored = set(correction_biases(module).values())
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    return module


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which each process has a part, or has all; every process calls it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """A copy of what this process has of a whole tensor, as it has of `like`."""
    tensor = tensor.to(like.device, like.dtype, copy=True)
    if isinstance(like, DTensor):
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return tensor


def clip_gradients(parameters: list[nn.Parameter], most: float) -> float:
    """Scale all gradients so that their norm is at most `most`; the norm before, over all processes' parts."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return float(norm)
