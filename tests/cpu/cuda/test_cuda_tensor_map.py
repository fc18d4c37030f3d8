"""What the copy engine cannot address is refused before the driver is asked."""

import pytest
import torch

from warpbus.cuda.tensor_map import box_rows, fits, tensor_map
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


@pytest.mark.parametrize("tile", [16, 32, 64, 128, 256])
def test_boxes_bring_the_rows_of_a_matrix_that_are_there(tile):
    """`copies_of` in schedule.cuh, and what the kernels that use it do with it."""
    for rows in (1, 7, 15, 16, 17, 33, 64, 65, 100, 128, 129, 192, 255, 256, 257, 300, 384, 1000, 1024, 4095):
        box = box_rows(rows, tile)
        brought = set()
        for first in range(0, rows + tile, tile):  # the last one is not there at all
            copies = (max(min(tile, rows - first), 0) + box - 1) // box
            assert copies * box <= tile  # what a stage has room for
            assert copies <= 1 or box % 8 == 0  # the swizzle of the next begins anew
            assert copies == 0 or first + (copies - 1) * box < rows
            brought.update(range(first, first + copies * box))
        assert set(range(rows)) <= brought
        assert len(brought) - rows < 64
        assert rows > tile or len(brought) == rows
