"""Several leases in one process, of two machines, and copies between them."""

import io
import pickle
import threading
from contextlib import suppress

import pytest
import torch
from pool_daemons import serving

import warpbus
from warpbus.errors import AuthorizationError, StateError, UsageError
from warpbus.pool.client import links

_PROGRAM = "warpbus.pool.tenant.process"


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Two machines: `mill` with the broker, and `dam`."""
    one, two = tmp_path_factory.mktemp("mill"), tmp_path_factory.mktemp("dam")
    with (
        serving(one, 2, _PROGRAM, spare=0) as mill,
        serving(two, 1, _PROGRAM, spare=0, name="dam", peers=(str(mill.address),)),
    ):
        yield str(mill.address)


@pytest.fixture(scope="module")
def gpus(pool):
    """Two of one machine, and one of the other."""
    found = [warpbus.pool.connect(pool, memory="100MB", share=0.3, on=on) for on in ("mill/0", "mill/1", "dam")]
    yield found
    for gpu in reversed(found):
        gpu.close()


def test_each_lease_is_a_device(gpus):
    assert [gpu.device for gpu in gpus] == [torch.device("warpbus", index) for index in range(3)]
    assert torch.warpbus.device_count() == 3
    for gpu in gpus:
        x = torch.arange(6.0, device=gpu.device).view(2, 3)
        assert (x @ x.t()).device == gpu.device
        assert x[:, 1:].float().nonzero().device == gpu.device
        assert x.t().contiguous().tolist() == [[0, 3], [1, 4], [2, 5]]
        assert x.clone().resize_(3, 3).device == x.clone().unsqueeze_(0).device == gpu.device
    assert gpus[2].name.startswith("dam/")


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0), (0, 2), (2, 1)])
def test_copies_do_not_pass_through_the_client(gpus, source, target):
    a, b = gpus[source], gpus[target]
    x = torch.randn(700_000, 2, device=a.device)  # more than one frame
    a.synchronize()
    links.copy(x[:1], torch.empty(1, 2, device=b.device))  # connects them
    sent, received = (sum(getattr(g.statistics, n) for g in (a, b)) for n in ("bytes_sent", "bytes_received"))
    y = x.to(b.device)
    z = (x + 1).t().to(b.device, torch.float64)
    y2 = torch.zeros(2, 700_000, device=b.device)
    y2.copy_(x.t())
    part = torch.zeros(700_000, 4, device=b.device)
    part[:, 1:3] = x
    b.synchronize()
    assert sum(g.statistics.bytes_sent for g in (a, b)) - sent < 20_000
    assert sum(g.statistics.bytes_received for g in (a, b)) == received
    expected = x.cpu()
    assert y.device == z.device == b.device
    assert torch.equal(y.cpu(), expected)
    assert torch.equal(z.cpu(), (expected + 1).t().double())
    assert torch.equal(y2.cpu(), expected.t())
    assert torch.equal(part.cpu()[:, 1:3], expected)
    assert part.cpu()[:, [0, 3]].abs().sum() == 0


def test_views_numbers_and_empty_tensors_are_copied(gpus):
    a, b, _ = gpus
    x = torch.arange(12, device=a.device).view(3, 4)
    assert x[1:, ::2].to(b.device).tolist() == [[4, 6], [8, 10]]
    assert x[0].expand(2, 4).to(b.device).tolist() == [[0, 1, 2, 3]] * 2
    assert x[2, 3].to(b.device).item() == 11
    assert x[:0].to(b.device).shape == (0, 4)
    spectrum = torch.fft.fft(torch.arange(4.0, device=a.device))
    assert torch.equal(spectrum.conj().to(b.device).cpu(), spectrum.cpu().conj().resolve_conj())


def test_tensors_of_two_devices_do_not_mix(gpus):
    a, b, _ = gpus
    x, y = torch.ones(2, device=a.device), torch.ones(2, device=b.device)
    with pytest.raises(
        RuntimeError, match=r"same device, but aten::add.Tensor got one on warpbus:0 and one on war.*:1"
    ):
        x + y
    with pytest.raises(RuntimeError, match="warpbus:0"):
        torch.cat([y, x])
    with pytest.raises(RuntimeError, match="warpbus:1"):
        y.index_put_((torch.zeros(1, dtype=torch.long, device=a.device),), torch.ones(1, device=b.device))
    assert (x + 1).tolist() == [2, 2]
    assert (y * torch.tensor(3.0)).tolist() == [3, 3]
    assert y[torch.tensor([0])].tolist() == [1]


def test_gradients_cross_devices_as_they_do_locally(gpus):
    def run(first, second):
        torch.manual_seed(0)
        model = [torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)]
        x = torch.randn(5, 8)
        model = [model[0].to(first), model[1].to(second)]
        optimizer = torch.optim.AdamW([p for part in model for p in part.parameters()], lr=0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            hidden = model[0](x.to(first)).tanh().to(second)
            loss = model[1](hidden).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert model[0].weight.grad.device.index == first.index
        return losses

    assert run(gpus[1].device, gpus[2].device) == run(torch.device("cpu"), torch.device("cpu"))


def test_gradients_of_another_device_in_a_thread(gpus):
    x = torch.ones(3, device=gpus[1].device, requires_grad=True)
    thread = threading.Thread(target=lambda: (x * x).sum().backward())
    thread.start()
    thread.join()
    assert x.grad.tolist() == [2, 2, 2]


def test_factories_are_on_the_current_device(gpus):
    assert torch.warpbus.current_device() == 0
    with torch.warpbus.device(1):
        assert torch.zeros(2, device="warpbus").device.index == 1
    torch.warpbus.set_device(gpus[2].device)
    try:
        assert torch.ones(2, device="warpbus").device.index == torch.warpbus.current_device() == 2
    finally:
        torch.warpbus.set_device(0)
    with pytest.raises(StateError, match="warpbus:3: this process has warpbus:0, warpbus:1, warpbus:2"):
        torch.zeros(2, device="warpbus:3")


def test_random_numbers_of_each_device(gpus):
    torch.manual_seed(5)
    draws = [torch.rand(3, device=gpu.device).cpu() for gpu in gpus]
    assert torch.equal(draws[0], draws[1])
    state = torch.warpbus.get_rng_state(1)
    draw = torch.rand(3, device="warpbus:1").cpu()
    torch.rand(3, device="warpbus:0")
    torch.warpbus.set_rng_state(state, 1)
    assert torch.equal(torch.rand(3, device="warpbus:1").cpu(), draw)
    generator = torch.Generator(gpus[1].device).manual_seed(1)
    assert generator.device == gpus[1].device
    torch.rand(3, device=gpus[1].device, generator=generator)
    with pytest.raises(RuntimeError, match="draws on this device only"):
        torch.rand(3, device=gpus[0].device, generator=generator)


def test_saved_tensors_come_back_to_their_devices(gpus):
    tensors = {gpu.device: torch.arange(3, device=gpu.device) for gpu in gpus}
    file = io.BytesIO()
    torch.save(tensors, file)
    for found in (torch.load(io.BytesIO(file.getvalue())), pickle.loads(pickle.dumps(tensors))):
        assert [tensor.device for tensor in found.values()] == [gpu.device for gpu in gpus]
        assert [tensor.tolist() for tensor in found.values()] == [[0, 1, 2]] * 3
    moved = torch.load(io.BytesIO(file.getvalue()), map_location=gpus[1].device)
    assert {tensor.device for tensor in moved.values()} == {gpus[1].device}


def test_a_failed_call_poisons_what_is_copied_from_it(gpus):
    a, b, _ = gpus
    x = torch.ones(2, device=a.device)
    assert x.to(b.device).tolist() == [1, 1]
    target = torch.zeros(1, device=b.device)
    with suppress(RuntimeError):  # the first operation that hears of it
        target.copy_(x.gather(0, torch.tensor([5], device=a.device)))
    with suppress(RuntimeError):
        a.synchronize()
    with pytest.raises(RuntimeError, match="out of bounds"):
        (target + 1).cpu()
    assert x.to(b.device).tolist() == [1, 1]  # the connection is as before


def test_a_lease_moves_between_copies(gpus):
    a, b, c = gpus
    x = torch.arange(4.0, device=b.device)
    assert x.to(a.device).tolist() == [0, 1, 2, 3]
    here = b.name
    b.migrate(c.name)
    assert x.to(a.device).tolist() == x.to(c.device).tolist() == [0, 1, 2, 3]
    with pytest.raises(StateError, match="in a group with other leases"):
        a._control.ask("migrate", {"lease": b.lease, "to": here})
    b.migrate(here)
    assert x.to(a.device).tolist() == [0, 1, 2, 3]


def test_copies_are_not_recorded(gpus):
    a, b, _ = gpus
    x, y = torch.ones(2, device=a.device), torch.ones(2, device=b.device)
    with pytest.raises(UsageError, match="copy: a program that is recorded cannot have it"), a.record():
        y.copy_(x)


def test_a_lease_is_connected_only_with_its_link_key(gpus):
    a, b, c = gpus
    for other in (a, c):
        b.session.ask(["join", bytes(16), 1, 2, 5.0])
        with pytest.raises(AuthorizationError, match="link key"):
            b.session.member.connect(other.lease, bytes(32), bytes(16), 0)
        b.session.ask(["leave", bytes(16)])
    # The key alone does not let anybody into a group that the lease's own client has not joined.
    for other in (a, c):
        b.session.ask(["join", bytes([7] * 16), 1, 2, 5.0])
        with pytest.raises(StateError, match="its client has to join first"):
            b.session.member.connect(other.lease, other.session.member.link_key, bytes([7] * 16), 0)
        b.session.ask(["leave", bytes([7] * 16)])


def test_closing_one_leaves_the_others(pool, gpus):
    extra = warpbus.pool.connect(pool, memory="10MB", share=0.1)
    assert extra.device.index == 3
    x = torch.ones(2, device=extra.device)
    assert x.to(gpus[0].device).tolist() == [1, 1]
    extra.close()
    with pytest.raises(StateError):
        x.cpu()
    assert torch.ones(2, device=gpus[0].device).tolist() == [1, 1]
    assert torch.warpbus.device_count() == 3
