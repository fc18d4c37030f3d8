"""The GPUs that are installed in this machine, their processes and their energy, as NVML tells.

NVML, the library that manages NVIDIA's driver, sees all GPUs whatever CUDA_VISIBLE_DEVICES says, makes no CUDA context,
and numbers them as nvidia-smi does. Source: "NVML API Reference Guide", device queries.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

from warpbus.errors import DeviceError, UsageError

_LIBRARY = "libnvidia-ml.so.1"
_NAME = 96  # bytes; no name or UUID is longer
_INSUFFICIENT_SIZE = 7  # nvmlReturn_t
_NVLINK = 2  # nvmlGpuP2PCapsIndex_t
_UNKNOWN = 2**64 - 1  # bytes that a process has, where the driver does not say


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t: percent of the last sample period, a second or less."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_v2_t, which the functions of version 3 fill."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True)
class InstalledGpu:
    """A GPU of this machine.

    Attributes:
        index: as nvidia-smi counts.
        uuid: such as GPU-2a0b5c1e-....
        minor: of its file, /dev/nvidia<minor>.
        memory, free: bytes.
        mig: it is cut into instances (Multi-Instance GPU).
        utilization: the part of its time, of late, in which any kernel ran; None where the driver does not say.
    """

    index: int
    uuid: str
    name: str
    minor: int
    memory: int
    free: int
    mig: bool = False
    utilization: float | None = None


class Inventory:
    """Asks NVML.

    Args:
        library: NVML, loaded.

    Raises:
        DeviceError: there is no NVML, or it does not start; and by every method whose question it does not answer.
    """

    def __init__(self, library: Any = None) -> None:
        if library is None:
            try:
                library = ctypes.CDLL(_LIBRARY)
            except OSError:
                raise DeviceError(f"no NVIDIA driver ({_LIBRARY}) was found on this machine: install it") from None
        self._library = library
        self._call("nvmlInit_v2")

    def gpus(self) -> list[InstalledGpu]:
        """All GPUs, in order of their numbers."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [self._gpu(index) for index in range(count.value)]

    def gpu(self, index: int) -> InstalledGpu:
        """One GPU.

        Raises:
            UsageError: this machine has no GPU of that number.
        """
        found = self.gpus()
        if not 0 <= index < len(found):
            raise UsageError(f"GPU {index}: this machine has {len(found)} GPU(s), numbered from 0: choose one of them")
        return found[index]

    def processes(self, gpu: InstalledGpu) -> dict[int, int | None]:
        """Bytes of a GPU that each process on it has, by process id; `None` where the driver does not say.

        Clients of MPS are among them. In a container the driver may leave processes out.
        """
        device = self._device(gpu.index)
        found: dict[int, int | None] = {}
        for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3"):
            for each in self._running(name, device):
                found[each.pid] = None if each.memory == _UNKNOWN else each.memory
        return found

    def linked(self, first: InstalledGpu, second: InstalledGpu) -> bool:
        """Whether two GPUs reach each other's memory over NVLink."""
        status = ctypes.c_int()
        devices = self._device(first.index), self._device(second.index)
        error = self._library.nvmlDeviceGetP2PStatus(*devices, ctypes.c_int(_NVLINK), ctypes.byref(status))
        return not error and status.value == 0

    def energy(self, uuid: str) -> float | None:
        """Joules that a GPU took since the driver was loaded; None where it does not count them."""
        return self._thousandth("nvmlDeviceGetTotalEnergyConsumption", uuid, ctypes.c_ulonglong())  # millijoules

    def power(self, uuid: str) -> float | None:
        """Watts that a GPU takes now; None where it does not say."""
        return self._thousandth("nvmlDeviceGetPowerUsage", uuid, ctypes.c_uint())  # milliwatts

    def _thousandth(self, name: str, uuid: str, value: ctypes.c_ulonglong | ctypes.c_uint) -> float | None:
        """A thousandth of what a function tells of a GPU; None if it fails, as for what a GPU cannot do."""
        device = ctypes.c_void_p()
        if self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)):
            return None
        return None if getattr(self._library, name)(device, ctypes.byref(value)) else value.value / 1000

    def _running(self, name: str, device: ctypes.c_void_p) -> list[_ProcessInfo]:
        room = 64
        while True:
            count, found = ctypes.c_uint(room), (_ProcessInfo * room)()
            status = getattr(self._library, name)(device, ctypes.byref(count), found)
            if status == _INSUFFICIENT_SIZE and room < 2**16:
                room *= 2
                continue
            # A driver that does not tell is no reason not to go on: the caller has other sources.
            return list(found[: count.value]) if not status else []

    def _gpu(self, index: int) -> InstalledGpu:
        device = self._device(index)
        memory, minor = _Memory(), ctypes.c_uint()
        self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        self._call("nvmlDeviceGetMinorNumber", device, ctypes.byref(minor))
        mode, pending = ctypes.c_uint(), ctypes.c_uint()
        no_mig = self._library.nvmlDeviceGetMigMode(device, ctypes.byref(mode), ctypes.byref(pending))
        busy = _Utilization()
        error = self._library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(busy))
        return InstalledGpu(
            index=index,
            uuid=self._text("nvmlDeviceGetUUID", device),
            name=self._text("nvmlDeviceGetName", device),
            minor=minor.value,
            memory=memory.total,
            free=memory.free,
            mig=not no_mig and bool(mode.value),
            utilization=None if error else busy.gpu / 100,
        )

    def _device(self, index: int) -> ctypes.c_void_p:
        device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
        return device

    def _text(self, name: str, device: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(_NAME)
        self._call(name, device, text, ctypes.c_uint(_NAME))
        return text.value.decode()

    def _call(self, name: str, *values: object) -> None:
        status = getattr(self._library, name)(*values)
        if status:
            raise DeviceError(f"{name} failed with NVML's error {status}: see what nvidia-smi says")
