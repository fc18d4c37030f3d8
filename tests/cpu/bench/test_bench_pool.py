"""`warpbus bench pool`: what becomes of what clients measure, and the clients' own parts; nobody is measured here."""

import socket
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from warpbus.bench import Run, pool, run
from warpbus.bench.options import PoolBenchOptions
from warpbus.bench.pool import PARTS, pool_benchmark
from warpbus.bench.pool_client import _echoed, operator_calls
from warpbus.bench.pool_plot import pool_figure
from warpbus.bench.pool_processes import ClientLocation, do, echo
from warpbus.bench.pool_tenants import _products, _products_until
from warpbus.bench.pool_training import SMALL_GPT, Gpt, GptShape, Training
from warpbus.errors import DeviceError, UsageError

COUNTED = {"operators": 89.0, "batches": 2.0, "round_trips": 1.0, "bytes_sent": 9000.0, "bytes_received": 4.0}
MOVES = [{"pause": 0.02, "seconds": 2.0, "bytes": 10**7, "wait": 0.05, "usual": 0.001}] * 3
ANSWERS = {
    "operators": {"remote": {"add": [1e-5, 2e-5, 3e-5]}, "local": {"add": [1e-6, 2e-6, 3e-6]}, "read": [1e-4]},
    "transfers": {
        "upload": [0.5],
        "upload again": [0.25],
        "download": [1.0],
        "socket": [0.125],
        "echo": [2e-5],
    },
    "training": {
        "seconds": {"remote": [0.03], "local": [0.02]},
        "losses": {"remote": [2.0, 1.0], "local": [2.0, 1.5]},
        "counted": COUNTED,
        "parameters": 470_528,
        "usage": {"captured": 0},
    },
    "decode": {"seconds": {"remote": [0.03], "local": [0.02]}, "counted": COUNTED},
    "migration": {"moves": MOVES},
}


@pytest.fixture
def asked(monkeypatch):
    """What clients would have been asked; they answer `ANSWERS`."""
    found = []

    @contextmanager
    def daemon(*flags):
        yield "warpbus://127.0.0.1:7700"

    @contextmanager
    def link(gigabits, *flags):
        yield ClientLocation(f"warpbuss://far:{gigabits:.0f}")

    @contextmanager
    def echo():
        yield 7

    def do(job, place, **arguments):
        found.append((job, place.address, arguments))
        return ANSWERS[job]

    class Clients:
        """The second one swaps the first one out; together both are slower than one alone."""

        def ask(self, *which):
            return [{"seconds": 0.25, "copy": 0.125} for _ in which]

        def measure(self, *which):
            return [40.0, 50.0] if len(which) == 2 else [100.0]

    @contextmanager
    def clients(*_, **__):
        yield Clients()

    fakes = {"daemon": daemon, "link": link, "echo": echo, "do": do, "connected": clients, "tenants": clients}
    for name, fake in (*fakes.items(), ("gpu_memory", lambda place: 10**9)):
        monkeypatch.setattr(pool, name, fake)
    monkeypatch.setattr(pool, "why_no_links", lambda: None)
    return found


def records_of(*parts, **work):
    settings = Run(torch.device("cpu"), "warpbus bench pool")
    return run(pool_benchmark(PoolBenchOptions(parts=parts, **work)), settings), settings.notes


def test_every_part_gives_records_and_a_picture(asked):
    records, notes = records_of(gigabits=(1.0, 10.0))
    assert {record.case["part"] for record in records} == set(PARTS) - {"shares"}
    assert any(note.startswith("shares were left out") for note in notes)
    assert any("apart by 0.5 at most" in note for note in notes)
    figure = pool_figure(records)
    assert len(figure.axes) == 4
    assert len(pool_figure([record for record in records if record.case["part"] == "training"]).axes) == 1
    for _, _, arguments in asked:
        assert arguments.get("device") in (None, "cpu")


def test_operators_are_beside_torch_and_the_target(asked):
    records, _ = records_of("operators")
    add, target, read = records
    assert (add.unit, add.ours, add.peer.value) == ("us", pytest.approx(20), pytest.approx(2))
    assert (target.peer.name, target.peer.value) == ("the target", 15.0)
    assert (read.ours, read.peer.value) == (pytest.approx(100), pytest.approx(20))


def test_rates_are_of_the_bytes_that_were_sent(asked):
    records, _ = records_of("transfers")
    [nbytes] = {arguments["nbytes"] for _, _, arguments in asked}
    assert [record.ours for record in records] == [pytest.approx(nbytes / 1e9 / s) for s in (0.5, 0.25, 1.0)]
    assert all(record.peer.value == pytest.approx(nbytes / 1e9 / 0.125) for record in records)


def test_a_training_step_is_counted(asked):
    step, recorded, trips, sent = records_of("training")[0]
    assert (step.unit, step.ours, step.ratio) == ("ms", pytest.approx(30), pytest.approx(2 / 3))
    assert (step.case["sent"], recorded.case["sent"]) == ("each operator", "one message")
    assert [arguments["recorded"] for _, _, arguments in asked] == [False, True]
    assert (trips.metric, trips.ours, trips.ratio) == ("count", 1.0, 1.0)
    assert (sent.ours, sent.peer.value) == (9000.0, 8 * SMALL_GPT.batch * (SMALL_GPT.context + 1))


def test_a_large_batch_that_does_not_fit_is_left_out(asked, monkeypatch):
    def do(job, place, *, shape, **_):
        if shape["batch"] > 8:
            raise DeviceError("no GPU of the pool can hold a lease of 65.00 GB")
        return ANSWERS[job]

    monkeypatch.setattr(pool, "LITTLE", replace(pool.LITTLE, gpts=pool.FULL.gpts))
    records, notes = records_of("training")
    assert [record.case["tokens"] for record in records] == 4 * ["8 x 512"] + 4 * ["32 x 1,024"]
    monkeypatch.setattr(pool, "do", do)
    records, notes = records_of("training")
    assert {record.case["tokens"] for record in records} == {"8 x 512"}
    assert "training steps of 32 x 1,024 tokens were left out: no GPU of the pool can hold a lease of 65.00 GB" in notes


def test_tenants_get_parts_of_what_both_get(monkeypatch, capsys):
    class Both:
        def measure(self, *which):
            return [(100.0, 300.0)[index] * (1 if len(which) == 2 else 1.5) for index in which]

    @contextmanager
    def tenants(place, shares, **_):
        yield Both()

    monkeypatch.setattr(pool, "tenants", tenants)
    measured = pool._PoolMeasurements(Run(torch.device("cpu"), ""), pool.LITTLE, PoolBenchOptions())
    rows = measured._shared(ClientLocation("warpbus://127.0.0.1:7700"), "mps")
    got = [(row.parameters["of"], row.parameters["granted"], row.ours, row.peers[0][2]) for row in rows]
    rate = 2 * pool.LITTLE.side**3 / 1e12
    assert got == [
        ("share", 0.25, pytest.approx([25.0] * 3), [25.0]),
        ("beside another", 0.25, pytest.approx([100 * rate] * 3), pytest.approx([150 * rate] * 2)),
        ("share", 0.75, pytest.approx([75.0] * 3), [75.0]),
        ("beside another", 0.75, pytest.approx([300 * rate] * 3), pytest.approx([450 * rate] * 2)),
    ]
    assert len(capsys.readouterr().err.splitlines()) == 1 + 3 + 2


def test_a_tenant_multiplies_in_the_middle_of_its_time():
    done = []
    assert _products(lambda: done.append(1), 0.02) > 0
    assert _products(lambda: done.append(1), 0.0) > 0  # a device that is slower than its time
    assert done


def test_a_tenant_that_waits_is_not_credited_for_what_comes_late():
    now = [0.0]

    def multiply():
        now[0] += 1.0 if now[0] != 3.0 else 100.0  # it waits for its turn for longer than it is measured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warpbus.bench.pool_tenants.time.perf_counter", lambda: now[0])
        assert _products_until(multiply, 10.0) == 3 * 8 / 10


def test_links_have_their_rate_as_limit(asked):
    records, notes = records_of("links", gigabits=(10.0,))
    limits = {record.case["of"]: record.floor for record in records}
    assert limits == {"upload": 1.25, "download": 1.25, "training step": None, "decode step": None}
    # What is local is measured once, over the loopback, where both take turns.
    assert [arguments.get("device") for job, _, arguments in asked if job == "training"] == ["cpu", None]
    assert any("TLS" in note for note in notes)


def test_links_that_cannot_be_made_are_reported(asked, monkeypatch):
    monkeypatch.setattr(pool, "why_no_links", lambda: "making network namespaces needs root")
    _, notes = records_of("links", "transfers")
    assert "links were left out: making network namespaces needs root" in notes


def test_pauses_are_beside_the_whole_move(asked):
    records, _ = records_of("migration")
    assert {record.case["of"] for record in records} == {"pause", "client's longest wait"}
    assert all(record.peer.value == pytest.approx(2000) for record in records)
    assert all(arguments["targets"] == ["far/0", "near/0"] for _, _, arguments in asked)


def test_a_stay_in_host_memory_is_beside_its_copy_and_turns_beside_one_alone(asked):
    records, _ = records_of("swapping")
    first = [record for record in records if record.case["of"] == "first operator after host memory"]
    assert {record.unit for record in first} == {"ms"}
    assert [record.ours for record in first] == pytest.approx([250] * len(first))
    assert [record.peer.value for record in first] == pytest.approx([125, 250] * (len(first) // 2))
    [turns] = [record for record in records if record.case["of"] == "two leases that take turns"]
    assert (turns.unit, turns.ours, turns.peer.value) == ("% of one alone", pytest.approx(90), pytest.approx(100))


@pytest.mark.parametrize("wrong", [{"parts": ("operator",)}, {"shape": "gpt-5"}])
def test_what_there_is_not_is_refused(wrong):
    with pytest.raises(UsageError, match="choose among"):
        pool_benchmark(PoolBenchOptions(**wrong))


def test_the_gpt_has_100_million_parameters():
    with torch.device("meta"):
        gpt = Gpt(GptShape())
    assert 95e6 < sum(each.numel() for each in gpt.parameters()) < 105e6


def test_the_gpt_learns_a_batch_by_heart():
    shape = GptShape(vocabulary=32, width=32, layers=1, heads=2, context=8, batch=2, autocast=False)
    training = Training(Gpt(shape), shape, torch.device("cpu"))
    losses = [training.step(0) for _ in range(30)]
    assert losses[-1] < losses[0] - 0.05
    assert Training(Gpt(shape), shape, torch.device("cpu")).step(0) == losses[0]


def test_operators_are_what_they_are_called():
    calls = operator_calls(torch.device("cpu"))
    assert calls["mul by a number"]().sum() == 1.5 * 64 * 64
    assert calls["matmul"]().sum() == 64 * 64 * 64
    assert calls["add in place"]() is not calls["add"]()


def test_bytes_go_over_the_plain_socket_and_come_back_as_one():
    with echo() as port, socket.create_connection(("127.0.0.1", port)) as plain:
        for size in (8, 5_000_000, 0):
            _echoed(plain, memoryview(bytes(size)))


def test_a_client_that_fails_is_reported_in_a_line():
    with pytest.raises(DeviceError, match=r"bench pool: operators failed: .*127\.0\.0\.1:1") as caught:
        do("operators", ClientLocation("warpbus://127.0.0.1:1"), device="cpu", rounds=1)
    assert "\n" not in str(caught.value)
