"""The moments of a layer's inputs."""

import pytest
import torch

from warpbus.errors import NumericError
from warpbus.quantization import Hessian


def test_mean_of_the_outer_products():
    x = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    hessian = Hessian(8)
    for part in x.split([1, 30, 0, 69]):
        hessian.add(part)
    assert hessian.tokens == 100
    expected = x.double().T @ x.double() / 100
    assert torch.allclose(hessian.matrix().double(), expected, rtol=1e-5, atol=1e-6)


def test_many_large_16_bit_inputs_neither_overflow_nor_drift():
    hessian = Hessian(4)
    x = torch.full((1000, 4), 60000.0, dtype=torch.float16)
    for _ in range(300):
        hessian.add(x)
    expected = float(x[0, 0]) ** 2
    assert torch.allclose(hessian.matrix(), torch.full((4, 4), expected), rtol=1e-5)


def test_no_token_is_refused():
    with pytest.raises(NumericError, match=r"^layers\.0\.mlp\.down: no token"):
        Hessian(4, name="layers.0.mlp.down").matrix()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_refused(value):
    hessian = Hessian(4, name="layers.1.attention.o")
    x = torch.ones(5, 4)
    x[2, 1] = value
    hessian.add(x)
    with pytest.raises(NumericError, match=r"^layers\.1\.attention\.o: NaN or infinity"):
        hessian.matrix()
