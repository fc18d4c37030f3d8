"""`warpbus pool serve` and the verbs that ask it. Its leases are tested in tests/cpu/pool."""

import io
import json
import re
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from warpbus.cli import app
from warpbus.cli.language import translated_object
from warpbus.cli.pool_leases import pool_table
from warpbus.errors import ConnectionLostError, UsageError
from warpbus.language import in_language, translated
from warpbus.pool.broker.broker import Broker
from warpbus.pool.broker.leases import PoolGpu
from warpbus.pool.broker.status import HostResidency, LeaseResidency
from warpbus.pool.quota import Quota

GB = 10**9


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of a machine that serves a pool, and ends in order."""
    directory = tmp_path_factory.mktemp("mill")
    command = [sys.executable, "-m", "warpbus", "pool", "serve", "--port", "0", "--name", "mill", "--spare", "0"]
    command += ["--directory", str(directory), "--cpu-memory", "1GB"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    while not (found := re.search(r"warpbus://\S+", "".join(lines))):  # a warning that all are admins comes first
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    yield found[0]
    process.send_signal(signal.SIGTERM)
    assert process.wait(90) == 0
    assert json.loads((directory / "pool.json").read_text())


def invoke(*arguments, **environment):
    return CliRunner().invoke(app, ["pool", *arguments], env=environment)


def test_status_as_json_and_as_a_table(address):
    reported = json.loads(invoke("status", "--json", "--address", address).stdout)
    assert [gpu["name"] for gpu in reported["gpus"]] == ["mill/0"]
    assert reported["gpus"][0]["memory"] == GB
    shown = invoke("status", WARPBUS_POOL=address).stdout
    assert "mill/0" in shown
    assert "mill joined" in shown


def test_verbs_say_what_they_did_or_why_not(address):
    assert "mill takes no leases any more, leases moved: 0" in invoke("drain", "mill", "--address", address).stdout
    assert "mill takes leases again" in invoke("undrain", "mill", "--address", address).stdout
    for verb in (
        ["release", "abcd"],
        ["migrate", "abcd", "--to", "mill/0"],
        ["suspend-lease", "ab"],
        ["resume-lease", "ab"],
    ):
        outcome = invoke(*verb, "--address", address)
        assert isinstance(outcome.exception, UsageError)
        assert "there is none" in str(outcome.exception)
    assert "has no host nowhere" in str(invoke("drain", "nowhere", "--address", address).exception)


def test_nobody_there():
    outcome = invoke("status", "--address", "warpbus://127.0.0.1:9")
    assert isinstance(outcome.exception, ConnectionLostError)


def test_serve_refuses_what_would_be_open_to_everybody(tmp_path):
    for arguments, what in (
        (["--host", "0.0.0.0"], "give --certificate, --key and --tokens"),
        (["--sharing", "fair"], "give auto, mps or slices"),
        (["--certificate", "x"], "go together"),
        (["--name", "a/b"], "--name is 'a/b'"),
        (["--peer-token-file", str(tmp_path / "none")], "cannot be read"),
        (["--cluster", "auto", "--peer", "warpbus://localhost"], "give one of them"),
    ):
        outcome = invoke("serve", "--directory", str(tmp_path), *arguments)
        assert isinstance(outcome.exception, UsageError)
        assert what in str(outcome.exception)


def test_sharing_by_mps_needs_mps(tmp_path):
    outcome = invoke("serve", "--directory", str(tmp_path), "--sharing", "mps", CUDA_VISIBLE_DEVICES="")
    assert isinstance(outcome.exception, UsageError)
    assert "give slices" in str(outcome.exception)


def test_a_token_is_printed():
    assert re.fullmatch(r"[\w-]{43}\n", invoke("token").stdout)


def test_the_table_shows_all_that_the_pool_has():
    broker = Broker()
    broker.join(
        "mill", [PoolGpu("mill/0", "mill", 0, "H[200]", 100 * GB), PoolGpu("mill/1", "mill", 1, "H200", 100 * GB)], 0.0
    )
    first = broker.request("ann", Quota(60 * GB, 0.5), now=10.0)
    broker.seen(first.id, 12.0, memory_used=30 * GB)
    broker.request("bob", Quota(100 * GB, 1.0), now=20.0)
    broker.request("eve", Quota(70 * GB, 0.25), now=30.0)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(pool_table(broker.status(150.0)))
    shown = console.export_text()
    assert re.search(r"mill/0\s+H\[200\]\s+██████░░░░\s+60.0 GB of 100.0 GB\s+█████░░░░░\s+0.50\s+1", shown)
    assert re.search(rf"{first.id[:8]}\s+ann\s+mill/0\s+30.0 GB of 60.0 GB\s+0.50\s+placed\s+2 min", shown)
    assert re.search(r"eve\s+70.0 GB\s+0.25\s+2 min\s+\S+", shown)
    assert "2 min ago" in shown


def test_the_table_shows_which_leases_of_an_oversubscribed_gpu_are_in_host_memory():
    broker = Broker()
    broker.join("mill", [PoolGpu("mill/0", "mill", 0, "H200", 100 * GB, (), 1.5)], 0.0)
    first = broker.request("ann", Quota(60 * GB, 0.5), now=10.0)
    second = broker.request("bob", Quota(90 * GB, 0.5), now=20.0)
    resident = LeaseResidency("resident", 1.0, 0, None, "", 0, 0.0, None)
    out = LeaseResidency("swapped out", 2.0, 40 * GB, 7.5, "room on mill/0", 1, 1.25, None)
    broker.resident("mill", HostResidency({first.id: resident, second.id: out}, 200 * GB))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(pool_table(broker.status(150.0)))
    shown = console.export_text()
    assert "150.0 GB of 150.0 GB" in shown
    assert "oversubscribed: 60.0 GB of 100.0 GB resident, 40.0 GB in host memory" in shown
    assert re.search(rf"{first.id[:8]}\s+ann\s+mill/0\s+60.0 GB\s+0.50\s+placed", shown)
    assert re.search(
        rf"{second.id[:8]}\s+bob\s+mill/0\s+90.0 GB\s+0.50\s+swapped out, waits 7 s for room on mill/0", shown
    )


def every_event() -> Broker:
    """A pool in which everything has happened that the broker records."""
    broker = Broker(grace=60)
    cards = [PoolGpu("mill/0", "mill", 0, "H200", 80 * GB, ("mill/1",)), PoolGpu("mill/1", "mill", 1, "H200", 80 * GB)]
    broker.join("mill", cards, 0.0)
    broker.join("dam", [PoolGpu("dam/0", "dam", 0, "H200", 80 * GB)], 0.0)
    first = broker.request("ann", Quota(60 * GB, 0.5), now=1.0, on="mill/0")
    near = broker.request("ann", Quota(60 * GB, 0.5), now=1.0, near=first.id)
    other = broker.request("ben", Quota(60 * GB, 0.5), now=1.0, on="dam")
    broker.request("ben", Quota(10 * GB, 0.1), now=1.0)
    waits = [broker.request("ben", Quota(70 * GB, 0.5), now=2.0, on=on) for on in (None, "mill", "dam")]
    broker.request("ben", Quota(15 * GB, 0.1), now=2.5)
    broker.release(near.id, 3.0)
    moving = broker.request("ann", Quota(5 * GB, 0.1), now=4.0, near=first.id)
    broker.begin_move(moving.id, "dam/0", 5.0)
    broker.end_move(moving.id, True, 6.0)
    broker.begin_move(moving.id, "mill/0", 7.0)
    broker.end_move(moving.id, False, 8.0)
    broker.suspend(moving.id, 9.0)
    broker.lose(other.id, "it was not on dam any more", 10.0)
    broker.drain("dam", 11.0)
    broker.undrain("dam", 12.0)
    broker.release(waits[0].id, 13.0)
    broker.join("mill", [replace(cards[0], links=())], 14.0)
    broker.leave("dam", 15.0)
    broker.request("ben", Quota(70 * GB, 0.5), now=16.0, on="mill")
    broker.expire(100.0)
    return broker


def test_events_are_chinese_where_the_language_is():
    """Also those that a broker has stored, whose texts are English."""
    broker = Broker(grace=60)
    broker.load(json.loads(json.dumps(every_event().dump())), 100.0)
    status = broker.status(100.0)
    kinds = {"joined", "left", "draining", "undrained", "queued", "placed", "moving", "moved", "not moved", "suspended"}
    assert {each["kind"] for each in status["events"]} == {*kinds, "released", "expired", "lost"}
    with in_language("zh"):
        for text in [each["text"] for each in status["events"]] + [each["reason"] for each in status["leases"]]:
            assert not re.search("[a-z]{2,} [a-z]{2,}", translated(text)), (text, translated(text))
        shown = io.StringIO()
        table = translated_object(pool_table(status))
        Console(file=shown, width=200).print(table)  # as the view that is drawn anew each second
    assert "已离开，丢失" in shown.getvalue()
    assert not re.search("[a-z]{2,} [a-z]{2,}", shown.getvalue()), shown.getvalue()
