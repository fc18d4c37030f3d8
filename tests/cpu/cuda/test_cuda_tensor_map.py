"""What the copy engine cannot address is refused before the driver is asked."""

import pytest
import torch

from warpbus.cuda.tensor_map import fits, tensor_map
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
