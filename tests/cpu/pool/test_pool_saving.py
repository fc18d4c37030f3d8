"""Tensors of the device in files: `torch.save`, `torch.load`, `pickle`."""

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_direct import connected
from torch import Tensor, nn

REMOTE = "warpbus"
VALUES = torch.arange(12.0).reshape(3, 4)


@pytest.fixture
def pool() -> Iterator[None]:
    with connected():
        yield


def saved(value: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("where", [REMOTE, f"{REMOTE}:0", None], ids=str)
@pytest.mark.parametrize("source", ["cpu", REMOTE])
def test_loading_to_the_device(pool: None, source: str, where: Any, weights_only: bool) -> None:
    whole = VALUES.to(source)
    file = saved({"whole": whole, "row": whole[1], "parameter": nn.Parameter(whole.t())})
    loaded = torch.load(file, map_location=where, weights_only=weights_only)
    expected = source if where is None else REMOTE
    assert {each.device.type for each in loaded.values()} == {expected}
    assert torch.equal(loaded["whole"].cpu(), VALUES)
    assert torch.equal(loaded["parameter"].cpu(), VALUES.t())
    assert loaded["parameter"].requires_grad
    loaded["row"].zero_()  # one storage, as when it was saved
    assert not loaded["whole"][1].any()
    assert torch.equal(whole.cpu(), VALUES)


def test_a_training_goes_on_from_a_file(pool: None, tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2).to(REMOTE)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(VALUES.to(REMOTE)).square().mean().backward()
        optimizer.step()

    model, optimizer = made()
    step(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    step(model, optimizer)
    again, its_optimizer = made()
    checkpoint = torch.load(tmp_path / "checkpoint.pt", map_location=torch.device(REMOTE, 0))
    again.load_state_dict(checkpoint["model"])
    its_optimizer.load_state_dict(checkpoint["optimizer"])
    step(again, its_optimizer)
    assert torch.equal(again.weight.cpu(), model.weight.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_pickling(pool: None, dtype: torch.dtype) -> None:
    values = VALUES.to(dtype)
    far = values.to(REMOTE)
    whole, part = pickle.loads(pickle.dumps((far, far[1:].t())))
    assert (whole.device.type, part.device.type, whole.dtype) == (REMOTE, REMOTE, dtype)
    assert torch.equal(whole.cpu(), values)
    assert torch.equal(part.cpu(), values[1:].t())


def test_the_older_format_and_empty_tensors(pool: None) -> None:
    tensors: list[Tensor] = [VALUES.to(REMOTE), torch.zeros(0, 3, device=REMOTE)]
    for where in (None, "cpu", REMOTE):
        file = saved(tensors, _use_new_zipfile_serialization=False)
        for found, expected in zip(torch.load(file, map_location=where), tensors, strict=True):
            assert found.device.type == (where or REMOTE)
            assert torch.equal(found.cpu(), expected.cpu())


def test_storages_are_converted(pool: None) -> None:
    far = VALUES.to(REMOTE).untyped_storage()
    assert far.to(device=torch.device(REMOTE, 0)) is far
    near = far.to(device="cpu")
    assert torch.equal(torch.empty(0).set_(near), VALUES.flatten())
    assert torch.equal(torch.empty(0, device=REMOTE).set_(near.to(device=REMOTE)).cpu(), VALUES.flatten())


def test_loading_to_the_device_needs_a_connection() -> None:
    with connected():
        file = saved(VALUES.to(REMOTE))
    with pytest.raises(RuntimeError, match=r"torch.warpbus.is_available\(\) is False"):
        torch.load(file)
    file.seek(0)
    assert torch.equal(torch.load(file, map_location="cpu"), VALUES)
