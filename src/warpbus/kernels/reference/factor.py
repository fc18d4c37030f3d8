"""A corner's factor and its inverse in plain PyTorch."""

import torch
from torch import Tensor


def factor_corner(matrix: Tensor, upper: Tensor, inverse: Tensor, failed: Tensor) -> None:
    """U of S = U U^T, and U^-1; see `ops.factor.factor_corner`."""
    whole = matrix.triu() + matrix.triu(1).T
    # The last column is eliminated first: the library's factor of what is turned around, turned back.
    lower, info = torch.linalg.cholesky_ex(whole.flip(0, 1))
    failed.masked_fill_(info != 0, 1)
    upper.copy_(lower.flip(0, 1))
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    inverse.copy_(torch.linalg.solve_triangular(upper, identity, upper=True))
