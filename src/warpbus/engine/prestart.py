"""Starts the processes of an engine before torch is loaded, so that they and the server load it at the same time.

Their devices are a guess from the options, which are only checked later (`placement`). Processes that do not fit end
unused.
"""

from collections import abc

from warpbus.dist.interpreters import count_gpus, start_early
from warpbus.engine.options import ServiceOptions


def start_processes(options: ServiceOptions) -> None:
    """Start the processes of one engine on this machine; `Service.start` uses them. `end_early` ends unused ones."""
    devices = _devices(options.device, options.tensor_parallel) if options.cluster is None else []
    if devices:
        start_early(devices, "warpbus.engine.serving_process", apart=True)


def _devices(device: str, count: int) -> abc.Sequence[str]:
    """The device of each process as `placement` is going to name it; none where the options make no sense."""
    if device == "cpu":
        return ["cpu"] * count
    there = count_gpus()
    if device == "auto" and not there:
        return ["cpu"] * count
    if device in ("auto", "cuda"):
        return [f"cuda:{number}" for number in range(count)] if count <= there else []
    number = device.removeprefix("cuda:")
    return [device] if count == 1 and number.isdecimal() and int(number) < there else []
