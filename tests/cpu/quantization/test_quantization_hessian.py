"""The moments of a layer's inputs."""

import pytest
import torch

from warpbus.errors import NumericError
from warpbus.quantization import Hessian


def test_mean_of_the_outer_products():
    x = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    hessian = Hessian(8)
    for part in x.split([1, 30, 0, 69]):
        hessian.add(part, part)
    assert hessian.tokens == 100
    expected = x.double().T @ x.double() / 100
    assert torch.allclose(hessian.moments().double(), expected, rtol=1e-5, atol=1e-6)


def test_many_large_16_bit_inputs_neither_overflow_nor_drift():
    hessian = Hessian(4)
    x = torch.full((1000, 4), 60000.0, dtype=torch.float16)
    for _ in range(300):
        hessian.add(x, x)
    expected = float(x[0, 0]) ** 2
    assert torch.allclose(hessian.moments(), torch.full((4, 4), expected), rtol=1e-5)


def test_no_token_is_refused():
    with pytest.raises(NumericError, match=r"^layers\.0\.mlp\.down: no token"):
        Hessian(4, name="layers.0.mlp.down").moments()


def test_drift_is_the_mean_of_what_was_lost_times_what_is_there():
    generator = torch.Generator().manual_seed(1)
    original = torch.randn(60, 5, generator=generator)
    x = original + 0.1 * torch.randn(60, 5, generator=generator)
    hessian = Hessian(5)
    for part in (slice(0, 7), slice(7, 60)):
        hessian.add(x[part], original[part])
    assert torch.allclose(hessian.drift(), (original - x).T @ x / 60, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_refused(value):
    hessian = Hessian(4, name="layers.1.attention.o")
    x = torch.ones(5, 4)
    x[2, 1] = value
    hessian.add(x, x)
    with pytest.raises(NumericError, match=r"^layers\.1\.attention\.o: NaN or infinity"):
        hessian.moments()


def test_an_original_that_is_no_number_is_refused():
    hessian = Hessian(4, name="layers.1.attention.o")
    hessian.add(torch.ones(5, 4), torch.full((5, 4), float("inf")))
    with pytest.raises(NumericError, match=r"^layers\.1\.attention\.o: NaN or infinity"):
        hessian.drift()
