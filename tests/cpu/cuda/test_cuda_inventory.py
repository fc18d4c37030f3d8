"""The GPUs of a machine, by an NVML that answers as these say."""

import ctypes

import pytest

from warpbus.cuda.inventory import InstalledGpu, Inventory
from warpbus.errors import DeviceError, UsageError

GB = 10**9


def value(reference):
    """What a `ctypes.byref` or an array refers to."""
    return getattr(reference, "_obj", reference)


class FakeNvml:
    """Two GPUs, of which the second is cut into instances. `processes` are those of both."""

    def __init__(self, processes=(), mps=(), room_wanted=0):
        self.processes, self.mps = list(processes), list(mps)
        self.room_wanted = room_wanted
        self.nvlink = True
        self.asked = []

    def nvmlInit_v2(self):  # noqa: N802
        return 0

    def nvmlDeviceGetCount_v2(self, count):  # noqa: N802
        value(count).value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, device):  # noqa: N802
        value(device).value = 1000 + index.value
        return 0

    def nvmlDeviceGetMemoryInfo(self, device, memory):  # noqa: N802
        value(memory).total, value(memory).free, value(memory).used = 80 * GB, 70 * GB, 10 * GB
        return 0

    def nvmlDeviceGetMinorNumber(self, device, minor):  # noqa: N802
        value(minor).value = device.value - 1000 + 4
        return 0

    def nvmlDeviceGetMigMode(self, device, mode, pending):  # noqa: N802
        value(mode).value = device.value - 1000
        return 3 if device.value == 1000 else 0  # the first does not know the question

    def nvmlDeviceGetUtilizationRates(self, device, rates):  # noqa: N802
        value(rates).gpu, value(rates).memory = 37, 99
        return 3 if device.value == 1001 else 0  # instances are not asked so

    def nvmlDeviceGetUUID(self, device, text, size):  # noqa: N802
        text.value = f"GPU-{device.value}".encode()
        return 0

    def nvmlDeviceGetP2PStatus(self, first, second, index, status):  # noqa: N802
        assert (first.value, second.value, index.value) == (1000, 1001, 2)  # over NVLink?
        value(status).value = 0 if self.nvlink else 5
        return 3 if self.nvlink is None else 0

    def nvmlDeviceGetName(self, device, text, size):  # noqa: N802
        text.value = b"NVIDIA H100"
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device, count, found):  # noqa: N802
        return self._fill(self.processes, count, found)

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, device, count, found):  # noqa: N802
        return self._fill(self.mps, count, found)

    def _fill(self, processes, count, found):
        room = value(count).value
        self.asked.append(room)
        if room < self.room_wanted:
            return 7
        for place, (pid, memory) in zip(found, processes, strict=False):
            place.pid, place.memory = pid, memory
        value(count).value = len(processes)
        return 0


def test_gpus_are_described():
    first, second = Inventory(FakeNvml()).gpus()
    assert first == InstalledGpu(0, "GPU-1000", "NVIDIA H100", 4, 80 * GB, 70 * GB, mig=False, utilization=0.37)
    assert (second.index, second.uuid, second.minor, second.mig, second.utilization) == (1, "GPU-1001", 5, True, None)
    assert Inventory(FakeNvml()).gpu(1) == second


@pytest.mark.parametrize("index", [-1, 2])
def test_a_gpu_that_is_not_there(index):
    with pytest.raises(UsageError, match=r"this machine has 2 GPU\(s\)"):
        Inventory(FakeNvml()).gpu(index)


def test_processes_with_and_without_mps():
    inventory = Inventory(FakeNvml(processes=[(10, 3 * GB), (11, 2**64 - 1)], mps=[(12, GB)]))
    assert inventory.processes(inventory.gpu(0)) == {10: 3 * GB, 11: None, 12: GB}


def test_more_processes_than_there_was_room_for():
    library = FakeNvml(processes=[(pid, pid) for pid in range(1, 101)], room_wanted=100)
    inventory = Inventory(library)
    assert len(inventory.processes(inventory.gpu(0))) == 100
    assert library.asked == [64, 128, 64, 128]


def test_gpus_that_are_linked():
    library = FakeNvml()
    inventory = Inventory(library)
    for library.nvlink, linked in ((True, True), (False, False), (None, False)):
        assert inventory.linked(*inventory.gpus()) is linked


def test_the_library_fails():
    library = FakeNvml()
    library.nvmlDeviceGetCount_v2 = lambda count: 999
    with pytest.raises(DeviceError, match="nvmlDeviceGetCount_v2 failed with NVML's error 999"):
        Inventory(library).gpus()


def test_without_a_driver(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DeviceError, match="no NVIDIA driver"):
        Inventory()
