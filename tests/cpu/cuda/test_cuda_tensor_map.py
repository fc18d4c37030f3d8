"""What the copy engine cannot address is refused before the driver is asked."""

import pytest
import torch

from warpbus.cuda.tensor_map import _map, _tile_maps, fits, tensor_map, tile_maps
from warpbus.errors import TensorError


def aligned(*shape: int) -> torch.Tensor:
    """A matrix of float16 that begins at a multiple of 16 bytes."""
    storage = torch.zeros(shape[0] * shape[1] + 8, dtype=torch.float16)
    return storage[-storage.data_ptr() // 2 % 8 :][: shape[0] * shape[1]].view(shape)


def test_fits() -> None:
    whole = aligned(4, 64)
    assert fits(whole)
    assert fits(whole[:, 8:])
    assert not fits(whole[:, 1:])
    assert not fits(whole.T)
    assert not fits(aligned(4, 63))


def test_what_is_not_aligned() -> None:
    with pytest.raises(TensorError, match="aligned to 16 bytes"):
        tensor_map(aligned(4, 64)[:, 1:], 4, 8)


def test_panels_have_to_be_whole() -> None:
    with pytest.raises(TensorError, match="96 columns has no whole number of panels of 64"):
        tensor_map(aligned(4, 96), 4, 64, panels=2)


def forget_maps() -> None:
    _map.cache_clear()
    _tile_maps.cache_clear()


@pytest.mark.parametrize(
    ("rows", "whole", "rest"),
    [(1, 1, 1), (100, 100, 100), (128, 128, 128), (129, 128, 1), (300, 128, 44), (384, 128, 128)],
)
def test_maps_of_tiles_ask_for_rows_that_are_there(rows: int, whole: int, rest: int, monkeypatch) -> None:
    boxes = []

    def encode(address, element, sides, strides, box, swizzle):
        assert sides == (64, rows)
        boxes.append(box)
        return bytes(128)

    monkeypatch.setattr("warpbus.cuda.tensor_map._encode", encode)
    forget_maps()
    assert len(tile_maps(aligned(rows, 64), 128, 32)) == 256
    assert sorted(boxes) == sorted({(32, whole), (32, rest)})
    forget_maps()
