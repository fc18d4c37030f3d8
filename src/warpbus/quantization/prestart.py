"""Starts the processes of a run before torch is loaded, so that all processes load it at the same time.

The number of processes is a guess from the arguments, which are only checked later (`driver`). Processes that the run
does not need end unused.
"""

from collections.abc import Sequence

from warpbus.dist.interpreters import count_gpus, load, start_early
from warpbus.dist.shares import SHARES

ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0"}
"""Of the processes. NCCL gets its buffers as it did before CUDA had a virtual memory API: four H200 were
connected in 0.2 seconds, otherwise in 1.3 to 1.9. It loses NVLink's multicast, for which a run has no use."""


def start_processes(*, device: str, gpus: str, processes: int) -> None:
    """Start the processes of a calibrated run on this machine, then load the driver.

    Arguments as of `quantize`.
    """
    devices = _devices(device, gpus, processes)
    if devices:
        start_early(devices, "warpbus.quantization.job", ENVIRONMENT)
    load("warpbus.quantization.driver")


def _devices(device: str, gpus: str, processes: int) -> Sequence[str]:
    """The device of each process as `driver` is going to name it; none where the arguments make no sense."""
    count = min(processes, SHARES)
    if device == "cpu":
        return ["cpu"] * count
    if device not in ("auto", "cuda"):
        return [device] if device.startswith("cuda:") and device[5:].isdecimal() else []
    pieces = gpus.split(",")
    if gpus != "all" and not all(piece.isdecimal() for piece in pieces):
        return []
    there = count_gpus()
    if not there:
        return ["cpu"] * count if device == "auto" else []
    numbers = range(there) if gpus == "all" else range(int(gpus)) if len(pieces) == 1 else [*map(int, pieces)]
    return [f"cuda:{number}" for number in numbers[:SHARES]] if max(numbers, default=there) < there else []
