"""The project's CUDA kernels on the CPU, thread by thread, compared with their references."""

import pytest
import torch
from simulated import simulated

from warpbus.kernels.ops import norm


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(("rows", "width"), [(3, 64), (2, 1000)])
def test_rms_norm(rows, width):
    x, weight = torch.randn(rows, width).half(), torch.randn(width).half()
    with simulated() as simulation:
        found, _ = norm._launch_rms(x, None, weight, 1e-5)
    assert simulation.launched == ["rms_norm"]
    torch.testing.assert_close(found, norm.rms_norm(x, weight, 1e-5), rtol=1e-3, atol=1e-4)
