"""The devices on which the processes of a served model run."""

import torch

from warpbus.cuda.devices import resolve_device
from warpbus.engine.options import ReplicaOptions, ServiceOptions
from warpbus.errors import DeviceError, UsageError


def check_replicas(options: ServiceOptions, replicas: ReplicaOptions) -> None:
    """Raises UsageError if the replicas need a cluster and the options name none, or the other way round."""
    if replicas.on_cluster and options.cluster is None:
        raise UsageError(
            f"{replicas.asked}: replicas are for a cluster: give cluster=auto as well, or "
            f"data_parallel={replicas.count} for this machine"
        )
    if replicas.data_parallel > 1 and options.cluster is not None:
        raise UsageError(
            f"data_parallel is for this machine: with cluster={options.cluster} give replicas={replicas.data_parallel}"
        )


def devices_of(options: ServiceOptions) -> list[torch.device]:
    """The device of each process of one engine; on a cluster only its kind.

    Raises: as `replica_devices`.
    """
    return replica_devices(options, 1)[0]


def replica_devices(options: ServiceOptions, replicas: int) -> list[list[torch.device]]:
    """The devices of the processes of each of several engines: a GPU per process.

    Raises:
        UsageError: `options.device` is not known, or one GPU is named for several processes or on a cluster.
        DeviceError: a GPU that is not there, or fewer than are asked for.
    """
    each, count = options.tensor_parallel, options.tensor_parallel * replicas
    if options.cluster is not None:
        if options.device not in ("auto", "cuda", "cpu"):
            raise UsageError(f"device {options.device}: on a cluster give auto or cuda for its GPUs, or cpu")
        return [[torch.device("cpu" if options.device == "cpu" else "cuda")] * each] * replicas
    first = resolve_device(options.device)
    if first.type == "cpu" or count == 1:
        return [[first] * each] * replicas
    what = f"tensor_parallel is {each}" + (f", data_parallel {replicas}" if replicas > 1 else "")
    if first.type != "cuda":
        raise UsageError(f"device {options.device}: {what}, and a remote GPU is one: leave it out")
    if ":" in options.device:
        raise UsageError(f"device {options.device}: {count} processes cannot share one GPU: give cuda or auto")
    there = torch.cuda.device_count()
    if there < count:
        raise DeviceError(f"{what}: torch sees {there} GPU(s): give {there} or fewer")
    return [[torch.device("cuda", start + index) for index in range(each)] for start in range(0, count, each)]
