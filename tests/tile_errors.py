"""The error of a matrix seen tile by tile and element by element: one norm for all of it hides a wrong tile."""

import torch
from torch import Tensor

TILE = 16
# Of errors that are spread as those of rounding are: those of a tile have about the norm expected of them, and of 10^8
# elements none is further than six standard deviations. The rest allows for factors that the error is proportional to.
_OF_TILES, _OF_ELEMENTS = 4.0, 16.0


def assert_close_everywhere(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """No tile of 16 x 16 elements and no element is further off than rounding explains.

    The sum of k products x w in float32, of factors with random signs, has an error of about eps sqrt(k) |x| |w|, and
    is itself about sqrt(k) |x| |w|: errors are proportional to the size of the row, not of the element. So the bounds
    are multiples of `tolerance` times the root mean square of the row; rounding the result adds eps of the element.

    Args:
        found: `[..., n]`; rows of fewer than 16 elements are measured by all rows together.
        expected: alike, float64.
        tolerance: the error that is expected of the whole, relative to it.
    """
    assert found.shape == expected.shape
    assert found.isfinite().all()
    found, expected = found.reshape(-1, found.shape[-1]), expected.reshape(-1, expected.shape[-1])
    if expected.numel() == 0:
        return
    eps = torch.finfo(found.dtype).eps
    away = (found.double() - expected).abs()
    size = expected.square().mean(-1, keepdim=True).sqrt()
    if expected.shape[1] < TILE:
        size = expected.square().mean().sqrt().expand_as(size)
    bound = _OF_ELEMENTS * tolerance * size + eps * expected.abs()
    wrong = away > bound
    assert not wrong.any(), f"{int(wrong.sum())} elements are wrong, the first at {wrong.nonzero()[0].tolist()}"
    of_tiles = _tiles(away.square()) / _tiles((tolerance * size).square().expand_as(away)).clamp_min(1e-300)
    wrong = (of_tiles > _OF_TILES**2) & (_tiles(away) > 0)
    assert not wrong.any(), f"{int(wrong.sum())} tiles are wrong, the first is tile {wrong.nonzero()[0].tolist()}"


def _tiles(matrix: Tensor) -> Tensor:
    """The sums over tiles that lie wholly within a matrix, or over all of one that holds none."""
    rows, columns = min(TILE, matrix.shape[0]), min(TILE, matrix.shape[1])
    whole = matrix[: matrix.shape[0] // rows * rows, : matrix.shape[1] // columns * columns]
    return whole.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).sum((1, 3))
