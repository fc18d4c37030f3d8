"""What is started before torch is loaded is what the service then asks for."""

import pytest
import torch

from warpbus.engine import prestart
from warpbus.engine.options import ServiceOptions
from warpbus.engine.placement import devices_of
from warpbus.errors import WarpbusError


@pytest.mark.parametrize("there", [0, 1, 4])
@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:3", "cuda:x", "tpu"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_devices_are_those_of_the_service(there: int, device: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
    monkeypatch.setattr(prestart, "count_gpus", lambda: there)
    started: list[str] = []
    monkeypatch.setattr(prestart, "start_early", lambda devices, module, apart: started.extend(devices))
    options = ServiceOptions(device=device, tensor_parallel=count)
    prestart.start_processes(options)
    try:
        asked = devices_of(options)
    except WarpbusError:
        return  # what was started, if anything, ends with the command
    assert started == list(map(str, asked))


def test_a_cluster_starts_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prestart, "start_early", lambda *_, **__: pytest.fail("started"))
    prestart.start_processes(ServiceOptions(device="cpu", cluster="auto"))
