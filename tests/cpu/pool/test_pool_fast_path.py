"""`dispatch.cpp`: repeated calls are done without Python, give the same bits, and leave to Python what they must."""

import itertools
import logging
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from pool_direct import connected
from torch.nn import functional as F

from warpbus.cuda.host_compiler import load_library
from warpbus.errors import StateError
from warpbus.pool.client import fast_path
from warpbus.pool.client.device import register
from warpbus.pool.client.dispatch import Operator

ROUNDS = 3
SOURCES = Path(__file__).parents[3] / "src"


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """These tests are of the compiled kernels."""
    if fast_path.load_fast_path() is None:
        pytest.skip("this machine cannot compile extensions of PyTorch")


@pytest.fixture
def both():
    with connected() as found:
        yield found


@pytest.fixture
def in_python(monkeypatch):
    """How often each operator was called in Python."""
    calls = Counter()
    original = Operator.__call__

    def call(self, *args, **kwargs):
        calls[self.overload.name()] += 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Operator, "__call__", call)
    return calls


# Functions of two tensors [3, 4] and of a number, another one in each round.
FAST = {
    "a tensor and a number": lambda a, b, n: (a * n, a + n, n - a, a**n),
    "an integer, a bool": lambda a, b, n: (a * 2 + 3, a * True),
    "numbers that are a default, or not": lambda a, b, n: (
        torch.add(a, b),
        torch.add(a, b, alpha=1),
        torch.add(a, b, alpha=2),
        torch.add(a, b, alpha=n),
        torch.add(a, b, alpha=1.0),
        torch.addmm(a[:, :3], a, b.t(), beta=1, alpha=n),
        torch.addmm(a[:, :3], a, b.t(), beta=n, alpha=1),
        torch.addmm(a[:, :3], a, b.t(), beta=0),
    ),
    "results of other strides": lambda a, b, n: (a.t() + b.t(), a[:, ::2] * b[:, 1::2], a.t().clone()),
    "views": lambda a, b, n: (a.t()[1:3].reshape(-1)[::2].unfold(0, 2, 1) + n, a.view(torch.int32), a[1, None]),
    "in place": lambda a, b, n: a.clone().add_(b, alpha=n).mul_(n)[1:].clamp_(-n, 1).fill_(n),
    "into a result": lambda a, b, n: torch.mul(a, n, out=torch.empty_like(a)),
    "several results": lambda a, b, n: (*torch.max(a * n, 1), *F.layer_norm(a, (4,), b[0], b[1], n).unbind()),
    "lists": lambda a, b, n: (
        *torch._foreach_mul([a, b, a.t()], n),
        *torch._foreach_add([a, b], [b, a], alpha=n),
        *torch._foreach_mul([a, b], [n, 2.0]),
        torch.cat([a, b], 1),
        torch.stack([a * n, b]),
    ),
    "in place of lists": lambda a, b, n: (c := [a.clone(), b.clone()], torch._foreach_mul_(c, n))[0],
    "without tensors": lambda a, b, n: torch.arange(4, device=a.device) * n,
    "of no elements": lambda a, b, n: (a[:0] * n, a[:0].sum(0)),
    "conversions": lambda a, b, n: ((a * n).to(torch.bfloat16).float(), (a * n).to(torch.int32), a.double()),
    "copies": lambda a, b, n: (c := torch.empty_like(a), c.copy_(b * n), c[:, 1:].copy_(a[:, 1:].bfloat16()))[0],
    "a step": lambda a, b, n: (
        c := a.clone().requires_grad_(),
        F.gelu(F.linear(c, b) * n).softmax(-1).square().sum().backward(),
        c.grad,
    )[2],
}
# What is left to Python each time.
SLOW = {
    "a tensor of the CPU without axes": lambda a, b, n: (a * torch.tensor(n), (a > 0) * torch.tensor(n)),
    "indices of the CPU": lambda a, b, n: a[torch.tensor([0, 2])] * n,
    "numbers that are marked": lambda a, b, n: torch.view_as_real((torch.complex(a, b).conj() * n).resolve_conj()),
    "shapes that values decide": lambda a, b, n: (a > 0).nonzero(),
}


def results(function, device):
    found = []
    for turn in range(ROUNDS):
        generator = torch.Generator().manual_seed(turn)
        a, b = (torch.randn(3, 4, generator=generator).to(device) for _ in range(2))
        result = function(a.abs() + 0.5, b, 1.25 + turn)
        found += [
            each.detach().cpu()
            for each in ([result] if isinstance(result, torch.Tensor) else result)
            if each is not None
        ]
    return found


def assert_same(function, device):
    found, expected = results(function, device), results(function, "cpu")
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", FAST)
def test_repeated_calls_are_done_without_python(both, in_python, name):
    session, _ = both
    results(FAST[name], session.device)
    before, operators = in_python.copy(), session.statistics.operators
    assert_same(FAST[name], session.device)
    assert in_python == before
    assert session.statistics.operators > operators


@pytest.mark.parametrize("name", SLOW)
def test_what_it_does_not_know_is_left_to_python(both, name):
    session, _ = both
    assert_same(SLOW[name], session.device)


def test_dtypes_are_promoted_as_on_the_cpu(both):
    session, _ = both
    tensors = [torch.arange(3), torch.arange(3.0), torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bool)]
    tensors += [torch.ones((), dtype=torch.int32), torch.ones(())]
    numbers = [torch.tensor(1.5, dtype=torch.float64), torch.tensor(3), torch.tensor(True), 1.5, 2, True]
    for a in tensors:
        for b in numbers:
            for function in (torch.mul, torch.add, torch.true_divide):
                expected, found = function(a, b), function(a.to(session.device), b)
                assert found.dtype is expected.dtype, (a, b, function)
                assert torch.equal(found.cpu(), expected)
    x = tensors[1]
    assert torch.equal(
        torch.maximum(x.to(session.device), numbers[1].float()).cpu(), torch.maximum(x, numbers[1].float())
    )


def test_the_quota_is_kept(both):
    session, _ = both
    x = torch.ones(session.memory // 16, device=session.device)
    kept = [x + 1]
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate"):
        kept.extend(x + 1 for _ in range(16))
    used = both[0].used
    del kept[1:]
    y = x + 1
    assert y[0].item() == 2
    assert both[0].used < used <= both[0].memory == both[1].storages.memory
    assert both[0].peak <= both[0].memory


def test_the_same_bytes_are_counted_as_in_python(both):
    session, executor = both
    x = torch.ones(3, 4, device=session.device)
    for _ in range(4):
        y = x.t() * 2
        z = x[:, ::2] + 1
    session.flush()
    assert session.used == executor.storages.used
    del y, z
    session.flush()
    assert session.used == executor.storages.used


def test_an_error_of_an_earlier_call_is_raised(both):
    session, _ = both
    x, wrong = torch.ones(3, 4, device=session.device), torch.tensor([5], device=session.device)
    good = torch.tensor([1], device=session.device)
    for index in (good, wrong):
        x.index_select(0, index)
    with pytest.raises(IndexError):
        [x + 1 for _ in range(200)]
    assert torch.equal((x + 1).cpu(), torch.full((3, 4), 2.0))


def test_plans_end_with_their_session():
    for turn in range(2):
        with connected() as (session, executor):
            x = torch.ones(3, 4, device=session.device)
            for _ in range(turn + 1):  # what the first session has learned would be wrong in the second
                torch.zeros(2, device=session.device).neg()
                y = x * 3
            assert y.sum().item() == 36
            assert executor.usage()["definitions"] > 2
    with pytest.raises(StateError):
        x * 3
    with connected(), pytest.raises(RuntimeError, match="it was freed, or never made"):
        (x * 3).sum().item()


def test_two_devices_are_left_to_python(both):
    session, _ = both
    x = torch.ones(3, 4, device=session.device)
    first = [x * 2 for _ in range(2)]
    with connected() as (other, _):
        y = torch.ones(3, 4, device=other.device)
        found = [y * 2 for _ in range(2)]
        assert [each.device for each in found] == [other.device] * 2
        assert (x * 2).device == session.device
        with pytest.raises(RuntimeError, match="same device"):
            x * y
    assert torch.equal(first[1].cpu(), (x * 2).cpu())


def test_numbers_of_definitions_that_are_used_again(both, monkeypatch):
    session, _ = both
    monkeypatch.setattr("warpbus.pool.client.session.MAX_DEFINITIONS", 64)
    for turn in range(3):
        for n in range(1, 40):
            x = torch.full((n,), 2.0, device=session.device)
            assert torch.equal((x * x + turn).cpu(), torch.full((n,), 4.0 + turn))
    assert session.generation > 1


# Kinds of calls whose encoded calls have different lengths.
KINDS = {
    "exp": lambda x: x.exp(),
    "product": lambda x: x @ x,
    "number": lambda x: x * 1.5,
    "list": lambda x: torch.cat([x, x, x]),
    "in place": lambda x: x.clone().mul_(x),
}


@pytest.mark.parametrize("loaded", [False, True], ids=["loaded once", "loaded again"])
def test_no_plan_of_an_earlier_session_is_used(loaded):
    """Each session defines the kinds of calls in an order of its own, so that a number means another kind in each."""
    x = torch.arange(9.0).reshape(3, 3)
    for names in itertools.islice(itertools.permutations(KINDS), 0, None, 7):
        if loaded:
            assert fast_path.load_fast_path() is not None
        with connected() as (session, _):
            there = x.to(session.device)
            for name in names * 2:
                assert torch.equal(KINDS[name](there).cpu(), KINDS[name](x))


def test_threads_at_once(both):
    session, executor = both
    x = torch.ones(5, device=session.device)
    failures = []

    def work(seed):
        try:
            for turn in range(200):
                y = (x * seed + turn) * 2
                if turn % 50 == 0:
                    assert y[0].item() == (seed + turn) * 2
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    session.flush()
    assert session.used == executor.storages.used


def test_a_client_without_it_gives_the_same(tmp_path):
    program = """
import torch
from pool_direct import connected
from warpbus.pool.client.device import load_fast_path
with connected() as (session, _):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 8, generator=generator).to(session.device).requires_grad_()
    optimizer = torch.optim.AdamW([x], lr=0.1)
    for turn in range(4):
        optimizer.zero_grad()
        (torch.nn.functional.layer_norm(x @ x, (8,)).tanh() * (turn + 0.5)).sum().backward()
        optimizer.step()
    print(load_fast_path() is None, session.statistics.operators, x.detach().cpu().view(torch.int32).sum().item())
"""
    answers = []
    for switch in ("0", "1"):
        environment = os.environ | {"WARPBUS_POOL_FAST_PATH": switch}
        environment["PYTHONPATH"] = os.pathsep.join([str(SOURCES), str(Path(__file__).parent)])
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        answers.append(done.stdout.split())
    assert [each[0] for each in answers] == ["True", "False"]
    assert answers[0][1:] == answers[1][1:]


def test_without_a_compiler_it_is_said(monkeypatch, tmp_path, caplog):
    register()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("warpbus.cuda.host_compiler.find_compiler", lambda: ("false",))
    load_library.cache_clear()
    with caplog.at_level(logging.WARNING, "warpbus.pool"):
        assert fast_path.load_fast_path() is None
    assert "operators take longer" in caplog.text
    assert "WARPBUS_POOL_FAST_PATH=0" in caplog.text
    load_library.cache_clear()
