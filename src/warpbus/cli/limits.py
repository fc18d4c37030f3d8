"""`warpbus doctor --limits`: what the devices of this machine allow, by the driver, and what they reach, measured."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from warpbus.cli.language import Console
from warpbus.cuda.dtype_names import short_name

if TYPE_CHECKING:  # loads torch
    import torch

    from warpbus.cuda.query import CpuLimits, GpuLimits


def show_limits(as_json: bool) -> None:
    """Print the limits of each GPU, or of the CPU where there is none, with measured rates of memory and products.

    Raises:
        DeviceError: a GPU cannot be used.
    """
    import torch

    from warpbus.cuda.query import cpu_limits, gpu_limits

    devices: list[tuple[str, Any, dict[str, float]]] = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", index)
        devices.append((torch.cuda.get_device_name(index), gpu_limits(index), _measured(device)))
    if not devices:
        cpu = cpu_limits()
        devices = [(cpu.name, cpu, _measured(torch.device("cpu")))]
    if as_json:
        print(json.dumps([{"name": name} | asdict(limits) | measured for name, limits, measured in devices]))
        return
    console = Console(highlight=False)
    for name, limits, measured in devices:
        rows = [*(_of_cpu(limits) if hasattr(limits, "caches") else _of_gpu(limits)), *_of_rates(measured)]
        table = Table(title=escape(name), title_justify="left", title_style="bold", show_header=False, box=None)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print()
    console.print("Rates were measured now; other programs on the device lower them.", soft_wrap=True)


def _measured(device: "torch.device") -> dict[str, float]:
    """Bytes per second of a copy within the device's memory, and FLOP per second of products by dtype."""
    import torch

    from warpbus.bench.ceilings import copy_bandwidth
    from warpbus.cuda.rates import matmul_rates

    dtypes: Sequence[torch.dtype] = (torch.float32,)
    if device.type == "cuda":
        dtypes = (torch.float16, torch.bfloat16, torch.float32)
    rates = {short_name(dtype): rate for dtype, rate in matmul_rates(device, dtypes).items()}
    return {"copy": copy_bandwidth(device)} | rates


def _of_gpu(limits: "GpuLimits") -> list[tuple[str, str]]:
    return [
        ("compute capability", limits.capability),
        ("multiprocessors", f"{limits.multiprocessors:,}"),
        ("threads per multiprocessor", f"{limits.threads_per_multiprocessor:,}"),
        ("threads per warp", f"{limits.warp}"),
        ("threads per block, at most", f"{limits.threads_per_block:,}"),
        ("block, at most", _product(limits.block)),
        ("grid, at most", _product(limits.grid)),
        ("registers per block", f"{limits.registers_per_block:,}"),
        ("registers per multiprocessor", f"{limits.registers_per_multiprocessor:,}"),
        (
            "shared memory per block",
            f"{_kib(limits.shared_per_block)}, or {_kib(limits.shared_per_block_optin)} of dynamic shared memory",
        ),
        ("shared memory per multiprocessor", _kib(limits.shared_per_multiprocessor)),
        ("L2 cache", _kib(limits.l2)),
    ]


def _of_cpu(limits: "CpuLimits") -> list[tuple[str, str]]:
    return [
        ("cores", f"{limits.cores}"),
        ("instruction sets", ", ".join(limits.instructions) or "none that the CPU kernels use"),
        *((f"cache {name}", _kib(size)) for name, size in limits.caches.items()),
    ]


def _of_rates(measured: dict[str, float]) -> list[tuple[str, str]]:
    copy, *products = measured.items()
    return [
        ("copy within the memory", f"{copy[1] / 1e9:,.1f} GB/s, bytes read and written"),
        *((f"matrix product, {dtype}", _flops(rate)) for dtype, rate in products),
    ]


def _product(sizes: tuple[int, int, int]) -> str:
    return " x ".join(f"{size:,}" for size in sizes)


def _kib(size: int) -> str:
    return f"{size / 2**20:,.4g} MiB" if size >= 2**20 else f"{size / 2**10:,.4g} KiB"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:,.0f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e9:,.0f} GFLOP/s"
