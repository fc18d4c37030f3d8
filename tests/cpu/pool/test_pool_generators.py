"""Generators of the remote GPU, for operators that take one."""

from collections.abc import Callable, Iterator

import pytest
import torch
from pool_direct import connected
from torch import Tensor

from warpbus.errors import DeviceError

REMOTE = "warpbus"


@pytest.fixture(autouse=True)
def pool() -> Iterator[None]:
    with connected():
        yield


DRAWS: dict[str, Callable[[str, torch.Generator], Tensor]] = {
    "randn": lambda device, g: torch.randn(3, 4, generator=g, device=device),
    "rand": lambda device, g: torch.rand(5, generator=g, device=device),
    "randint": lambda device, g: torch.randint(0, 100, (6,), generator=g, device=device),
    "normal_": lambda device, g: torch.zeros(3, device=device).normal_(1.0, 2.0, generator=g),
    "bernoulli": lambda device, g: torch.bernoulli(torch.full((9,), 0.5, device=device), generator=g),
    "multinomial": lambda device, g: torch.multinomial(torch.ones(7, device=device), 3, generator=g),
    "poisson": lambda device, g: torch.poisson(torch.full((5,), 4.0, device=device), g),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_the_cpus(name: str) -> None:
    near, far = torch.Generator().manual_seed(5), torch.Generator(device=REMOTE).manual_seed(5)
    torch.manual_seed(1)
    before = torch.warpbus.get_rng_state()
    for _ in range(2):
        found = DRAWS[name](REMOTE, far)
        assert found.device.type == REMOTE
        assert torch.equal(found.cpu(), DRAWS[name]("cpu", near))
    assert torch.equal(far.get_state(), near.get_state())
    assert torch.equal(torch.warpbus.get_rng_state(), before)


def test_a_generator_is_one_of_pytorchs() -> None:
    far, near = torch.Generator(torch.device(REMOTE, 0)), torch.Generator()
    assert isinstance(far, torch.Generator)
    assert isinstance(near, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance(3, torch.Generator)
    assert (far.device, near.device) == (torch.device(REMOTE, 0), torch.device("cpu"))
    assert far.initial_seed() == near.initial_seed()
    assert torch.equal(torch.rand(3, generator=far, device=REMOTE).cpu(), torch.rand(3, generator=near))
    assert far.seed() == far.initial_seed() != near.initial_seed()


def test_a_state_is_read_and_set() -> None:
    far = torch.Generator(device=REMOTE).manual_seed(3)
    state = far.get_state()
    first = torch.rand(4, generator=far, device=REMOTE).cpu()
    far.set_state(state)
    assert torch.equal(torch.rand(4, generator=far, device=REMOTE).cpu(), first)


def test_an_error_leaves_the_devices_own_generator() -> None:
    far = torch.Generator(device=REMOTE)
    before = torch.warpbus.get_rng_state()
    with pytest.raises(RuntimeError):
        torch.multinomial(torch.ones(2, device=REMOTE), 3, generator=far)
    assert torch.equal(torch.warpbus.get_rng_state(), before)


def test_a_generator_of_another_device_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"randn.*: a generator on cpu .*torch.Generator\(device=gpu.device"):
        torch.randn(3, generator=torch.Generator(), device=REMOTE)
