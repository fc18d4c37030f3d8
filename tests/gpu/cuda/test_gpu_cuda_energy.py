"""The meter of energy on real sensors."""

import time

import pytest
import torch

from warpbus.cuda.energy import EnergyMeter, gpu_uuid
from warpbus.cuda.inventory import Inventory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GPU = torch.device("cuda", 0)


def test_the_sensors_know_the_gpu_that_torch_means() -> None:
    watts = Inventory().power(gpu_uuid(GPU))
    assert watts is not None
    assert 5 < watts < 2000


def test_energy_lies_between_what_a_gpu_takes_idle_and_at_most() -> None:
    started = time.perf_counter()
    with EnergyMeter([GPU]) as meter:
        x = torch.randn(4096, 4096, device=GPU)
        while time.perf_counter() - started < 1.0:
            torch.mm(x, x)
            torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    assert meter.total is not None
    assert 5 * seconds < meter.total < 2000 * seconds
    assert meter.joules == {GPU: meter.total}
