"""The random state of the remote GPU's generator: read, set, forked, and kept by checkpointed layers."""

import io
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from pool_direct import connected
from pool_tied_gpt import TiedGpt, train
from pool_training import assert_equal_weights
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from warpbus.errors import ProtocolError, StateError, UsageError
from warpbus.pool.client.program import recorded
from warpbus.pool.client.session import Session
from warpbus.pool.quota import Quota
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.random_state import random_state, set_random_state

REMOTE, CPU = "warpbus", torch.device("cpu")


@pytest.fixture
def session() -> Iterator[Session]:
    with connected() as (found, _):
        yield found


def test_a_state_that_was_read_can_be_set_again(session: Session) -> None:
    torch.rand(3, device=REMOTE)
    state = torch.warpbus.get_rng_state()
    assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
    first = torch.randn(7, device=REMOTE).cpu()
    assert not torch.equal(torch.randn(7, device=REMOTE).cpu(), first)
    torch.warpbus.set_rng_state(state)
    assert torch.equal(torch.randn(7, device=REMOTE).cpu(), first)
    file = io.BytesIO()
    torch.save(torch.warpbus.get_rng_state_all(), file)
    file.seek(0)
    second = torch.randn(7, device=REMOTE).cpu()
    torch.warpbus.set_rng_state_all(torch.load(file))
    assert torch.equal(torch.randn(7, device=REMOTE).cpu(), second)


def test_the_state_is_the_tenants_own(session: Session) -> None:
    """Numbers that the client draws do not change it, and the other way round."""
    torch.manual_seed(1)
    here, there = torch.get_rng_state(), torch.warpbus.get_rng_state()
    assert torch.equal(here, there)  # one seed for all devices
    torch.rand(3)
    assert torch.equal(torch.warpbus.get_rng_state(), there)
    torch.set_rng_state(here)
    torch.rand(3, device=REMOTE).cpu()
    assert torch.equal(torch.get_rng_state(), here)


def test_the_generator_is_forked(session: Session) -> None:
    torch.manual_seed(5)
    with torch.random.fork_rng():
        torch.manual_seed(6)
        torch.rand(9), torch.rand(9, device=REMOTE)
    found, on_cpu = torch.rand(4, device=REMOTE).cpu(), torch.rand(4)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4, device=REMOTE).cpu(), found)
    assert torch.equal(torch.rand(4), on_cpu)


def test_cpu_code_forks_its_generator_without_a_connection() -> None:
    with connected():
        pass
    torch.manual_seed(5)
    with torch.random.fork_rng():
        torch.rand(3)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)
    assert (torch.warpbus.is_available(), torch.warpbus.device_count()) == (False, 0)
    with pytest.raises(StateError, match="no remote GPU is connected"):
        torch.warpbus.get_rng_state()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_dropout_drops_the_same_twice(session: Session, use_reentrant: bool) -> None:
    x = torch.ones(64, device=REMOTE, requires_grad=True)
    y = checkpoint(lambda t: F.dropout(2 * t), x, use_reentrant=use_reentrant)
    y.sum().backward()
    assert 0 < y.count_nonzero() < 64
    assert torch.equal(x.grad.cpu(), y.detach().cpu())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_gpt_with_dropout_trains_as_on_the_cpu(session: Session, use_reentrant: bool) -> None:
    def make() -> TiedGpt:
        return TiedGpt(0.2, {"use_reentrant": use_reentrant})

    expected_losses, expected = train(make, "cpu", optimizer_first=True)
    losses, weights = train(make, REMOTE, optimizer_first=True)
    assert losses == expected_losses
    assert_equal_weights(weights, expected)
    assert losses == train(lambda: TiedGpt(0.2), REMOTE, optimizer_first=True)[0]  # as without checkpoints


def test_a_checkpoint_without_the_random_state_waits_for_nothing(session: Session) -> None:
    x = torch.ones(4, device=REMOTE, requires_grad=True)
    before = session.statistics.round_trips
    y = checkpoint(lambda t: t * 2, x, use_reentrant=False, preserve_rng_state=False)
    y.sum().backward()
    assert session.statistics.round_trips == before


def test_the_state_is_not_touched_while_a_program_is_recorded(session: Session) -> None:
    state = torch.warpbus.get_rng_state()
    for touch in (
        torch.warpbus.get_rng_state,
        lambda: torch.warpbus.set_rng_state(state),
        lambda: torch.manual_seed(3),
    ):
        with pytest.raises(UsageError, match="while a program is recorded"), recorded(session):
            touch()
    torch.warpbus.set_rng_state(state)


def test_what_is_no_state_is_refused(session: Session) -> None:
    state = torch.warpbus.get_rng_state()
    for wrong in (state.float(), state.to(REMOTE)):
        with pytest.raises(UsageError, match="uint8 on the CPU"):
            torch.warpbus.set_rng_state(wrong)
    with pytest.raises(UsageError, match="70000 bytes"):
        torch.warpbus.set_rng_state(torch.zeros(70000, dtype=torch.uint8))
    torch.warpbus.set_rng_state(state[:-1])
    with pytest.raises(ProtocolError, match="5055 bytes are no state"):
        torch.zeros(1, device=REMOTE).item()
    assert torch.equal(torch.warpbus.get_rng_state(), state)


def changed(state: bytes, left: int, following: int) -> bytes:
    numbers = torch.frombuffer(bytearray(state), dtype=torch.int32).clone()
    numbers[2], numbers[4] = left, following
    return numbers.numpy().tobytes()


def test_a_tenant_takes_every_state_that_a_generator_has_had() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        for drawn in (0, 1, 1, 600, 21, 1, 1, 623, 624, 625, 5000):
            torch.rand(drawn)
            state = random_state(CPU)
            expected = torch.rand(700)
            set_random_state(CPU, state)
            assert torch.equal(torch.rand(700), expected)


@pytest.mark.parametrize(("left", "following"), [(624, 624), (624, 2), (2, 624), (0, 1), (-1, 1), (625, 0), (1, -1)])
def test_a_state_that_reads_beyond_its_words_is_refused(left: int, following: int) -> None:
    """PyTorch would give what lies behind them as random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        before = random_state(CPU)
        with pytest.raises(ProtocolError, match="no generator has had it"):
            set_random_state(CPU, changed(before, left, following))
        assert random_state(CPU) == before


def test_states_of_other_devices_and_damaged_ones_are_refused() -> None:
    for wrong in (b"", bytes(16), random_state(CPU)[:-1], random_state(CPU) + b"x"):
        with pytest.raises(ProtocolError, match="bytes are no state"):
            set_random_state(CPU, wrong)


def test_a_moved_lease_has_its_random_state() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(13)
        torch.rand(5)
        state = Executor(CPU, Quota(1000, 1.0)).state()
        expected: Tensor = torch.rand(5)
        Executor(CPU, Quota(1000, 1.0)).restore(state)
        assert torch.equal(torch.rand(5), expected)
        with pytest.raises(ProtocolError, match="no generator has had it"):
            Executor(CPU, Quota(1000, 1.0)).restore({**state, "random": changed(state["random"], 624, 624)})
