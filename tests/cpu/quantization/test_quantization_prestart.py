"""What is started before torch is loaded is what the run then asks for."""

import pytest
import torch

from warpbus.errors import WarpbusError
from warpbus.quantization import driver, prestart


@pytest.mark.parametrize("there", [0, 1, 4, 16])
@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:3", "cuda:x", "tpu"])
@pytest.mark.parametrize("gpus", ["all", "0", "1", "3", "0,2", "2,1", "0,9", "0,0", "x", ""])
@pytest.mark.parametrize("processes", [1, 3, 9])
def test_devices_are_those_of_the_run(
    there: int, device: str, gpus: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
    monkeypatch.setattr(prestart, "count_gpus", lambda: there)
    started: list[str] = []
    monkeypatch.setattr(prestart, "start_early", lambda devices, module, environment: started.extend(devices))
    prestart.start_processes(device=device, gpus=gpus, processes=processes)
    try:
        asked = driver._devices(device, gpus, processes, "gptq")
    except WarpbusError:
        return  # what was started, if anything, ends with the process
    assert started == list(map(str, asked))
