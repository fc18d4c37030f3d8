"""The energy that GPUs take, as their own sensors tell it through NVML (`Inventory`).

Volta and later count the energy of the whole board since the driver was loaded; older GPUs tell their power alone,
which is then sampled. What other programs do on a GPU meanwhile is counted too, what the rest of the machine takes is
not. See "NVML API Reference Guide", nvmlDeviceGetTotalEnergyConsumption and nvmlDeviceGetPowerUsage.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, Self

import torch

from warpbus.cuda.inventory import Inventory
from warpbus.errors import DeviceError

_INTERVAL = 0.05  # seconds between two samples of the power; NVML averages it over more


class Sensors(Protocol):
    """The readings of a meter. GPUs go by their UUIDs, since CUDA_VISIBLE_DEVICES changes their numbers."""

    def energy(self, uuid: str) -> float | None:
        """Joules since the driver was loaded; `None` where the GPU does not count them."""

    def power(self, uuid: str) -> float | None:
        """Watts now; `None` where the GPU does not say."""


def gpu_uuid(device: torch.device) -> str:
    """NVML's name of a GPU that torch knows by its number."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


class EnergyMeter:
    """Measures what GPUs take while a `with` block runs; afterwards `joules` and `total` hold it.

    Args:
        devices: the devices to measure; those that are no GPU are left out.
        sensors: the source of readings; by default this machine's NVML, where there is one.
        uuid: the name that the sensors have for a device.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        *,
        sensors: Sensors | None = None,
        uuid: Callable[[torch.device], str] = gpu_uuid,
    ) -> None:
        self._names = {device: uuid(device) for device in devices if device.type == "cuda"}
        self._sensors = sensors or (_this_machine() if self._names else None)
        self._ended = threading.Event()
        self._sampler: threading.Thread | None = None
        self.joules: dict[torch.device, float | None] = dict.fromkeys(self._names)
        """Of each GPU; `None` where it was not measured."""

    @property
    def total(self) -> float | None:
        """Joules of all GPUs; `None` where there are none, or one of them was not measured."""
        measured = [joules for joules in self.joules.values() if joules is not None]
        return sum(measured) if measured and len(measured) == len(self.joules) else None

    def __enter__(self) -> Self:
        self._before = {device: self._energy(device) for device in self._names}
        uncounted = [device for device, joules in self._before.items() if joules is None]
        powers = {device: self._power(device) for device in uncounted}
        known = {device: watts for device, watts in powers.items() if watts is not None}
        if known:
            self._sampler = threading.Thread(target=self._sample, args=(known,), name="gpu-power", daemon=True)
            self._sampler.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        if self._sampler is not None:
            self._sampler.join()
        for device, before in self._before.items():
            after = self._energy(device)
            if before is not None and after is not None:
                self.joules[device] = after - before

    def _energy(self, device: torch.device) -> float | None:
        return None if self._sensors is None else self._sensors.energy(self._names[device])

    def _power(self, device: torch.device) -> float | None:
        return None if self._sensors is None else self._sensors.power(self._names[device])

    def _sample(self, watts: dict[torch.device, float]) -> None:
        """Integrate power over time by the trapezoidal rule; a GPU that stops answering was not measured."""
        joules = dict.fromkeys(watts, 0.0)
        then, ended = time.perf_counter(), False
        while not ended:
            ended = self._ended.wait(_INTERVAL)
            now = time.perf_counter()
            for device in list(joules):
                power = self._power(device)
                if power is None:
                    del joules[device]
                else:
                    joules[device] += (watts[device] + power) / 2 * (now - then)
                    watts[device] = power
            then = now
        self.joules.update(joules)


def _this_machine() -> Sensors | None:
    try:
        return Inventory()
    except DeviceError:
        return None
