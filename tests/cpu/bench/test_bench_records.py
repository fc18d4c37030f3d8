"""The schema of benchmark records: what it takes, what it refuses, and the file."""

import errno
import json
import os
from dataclasses import replace

import pytest

from warpbus.bench.records import LESS_IS_BETTER, Peer, Record, now, ratio, read, results_path, slug, to_json, write
from warpbus.errors import DataError, StorageError, UsageError

RATE = Record(
    bench="gemm",
    case={"shape": "square", "m": 1024, "n": 1024, "k": 1024},
    metric="throughput",
    unit="TFLOP/s",
    ours=660.0,
    peer=Peer("cuBLAS", "13.1", 600.0),
    ratio=1.1,
    floor=700.0,
    samples={"ours": [650.0, 660.0, 670.0], "peer": [600.0]},
    device="NVIDIA H100 80GB HBM3",
    versions={"warpbus": "0.1.0"},
    date="2026-01-31T12:00:00Z",
    command="warpbus bench gemm",
)
TIME = replace(RATE, metric="time", unit="us", ours=20.0, peer=Peer("torch", "2", 30.0), ratio=1.5, floor=10.0)


def test_more_than_one_is_better_whatever_the_metric():
    assert ratio("throughput", 660, 600) == pytest.approx(1.1)
    assert ratio("bandwidth", 1, 2) == pytest.approx(0.5)
    assert ratio("time", 20, 30) == pytest.approx(1.5)
    assert ratio("memory", 30, 20) == pytest.approx(2 / 3)
    assert ratio("speed", 600, 400) == pytest.approx(1.5)
    assert ratio("energy", 20, 30) == pytest.approx(1.5)
    assert ratio("agreement", 50, 100) == pytest.approx(0.5)
    assert ratio("perplexity", 20, 30) == pytest.approx(1.5)
    assert ratio("count", 2, 3) == pytest.approx(1.5)
    assert ratio("cost", 2, 3) == pytest.approx(1.5)
    assert len(LESS_IS_BETTER) == 11


def test_share_of_the_limit():
    assert RATE.share_of_floor == pytest.approx(660 / 700)
    assert TIME.share_of_floor == pytest.approx(0.5)
    assert replace(RATE, floor=None).share_of_floor is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bench": ""}, "bench must be a text"),
        ({"command": ""}, "command must be a text"),
        ({"metric": "pace"}, "metric is 'pace': expected one of time"),
        ({"ours": float("nan")}, "ours is nan"),
        ({"ours": 0.0}, "ours is 0.0: expected a positive number"),
        ({"peer": Peer("cuBLAS", "13", float("inf"))}, "peer.value is inf"),
        ({"floor": -1.0}, "floor is -1.0"),
        ({"ratio": 0.9}, "ratio is 0.9, but ours is 660.0 and the peer's 600.0"),
        ({"metric": "time"}, "ratio is 1.1"),
        ({"samples": {"ours": [1.0]}}, "samples must hold"),
        ({"samples": {"ours": [1.0], "peer": []}}, "samples must hold"),
        ({"samples": {"ours": [1.0], "peer": [float("nan")]}}, "samples must be positive"),
    ],
)
def test_what_is_no_record(changes, message):
    with pytest.raises(DataError, match=message) as raised:
        replace(RATE, **changes)
    assert "record" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_keys_are_those_of_the_schema():
    keys = "bench case metric unit ours peer ratio floor samples device versions date command"
    assert " ".join(to_json([RATE])[0]) == keys
    assert list(to_json([RATE])[0]["peer"]) == ["name", "version", "value"]


def test_files_are_named_by_benchmark_and_device(tmp_path):
    assert slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    assert slug("NVIDIA GeForce RTX 4090 (D)") == "nvidia-geforce-rtx-4090-d"
    assert results_path(tmp_path, "gemm", "cpu") == tmp_path / "gemm-cpu.json"


def test_a_file_round_trips_and_is_replaced(tmp_path):
    path = write([RATE, TIME], tmp_path / "new")
    assert path == tmp_path / "new" / "gemm-nvidia-h100-80gb-hbm3.json"
    assert read(path) == [RATE, TIME]
    assert len(path.read_text(encoding="utf-8").splitlines()) == 4
    write([TIME], tmp_path / "new")
    assert read(path) == [TIME]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = write([RATE], tmp_path)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="cannot be written"):
            write([TIME], tmp_path)
    assert read(path) == [RATE]
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_file_has_one_benchmark_on_one_device(tmp_path):
    for records in ([], [RATE, replace(RATE, bench="gemv")], [RATE, replace(RATE, device="cpu")]):
        with pytest.raises(UsageError, match="one benchmark on one device"):
            write(records, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "expected a list"),
        ("[1]", "record 0: expected the keys bench, case"),
        (json.dumps([{**to_json([RATE])[0], "more": 1}]), "record 0: expected the keys"),
        (json.dumps([{**to_json([RATE])[0], "peer": {"name": "x"}}]), "record 0"),
        (json.dumps([{**to_json([RATE])[0], "samples": []}]), "record 0"),
        (json.dumps([to_json([RATE])[0], {**to_json([RATE])[0], "ratio": 2}]), "record 1: record gemm .* ratio is 2"),
    ],
)
def test_damaged_files(tmp_path, text, message):
    path = tmp_path / "gemm-cpu.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message) as raised:
        read(path)
    assert str(path) in str(raised.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="measure again with warpbus bench"):
        read(tmp_path / "none.json")


def test_dates_are_utc():
    assert now().endswith("Z")
    assert len(now()) == len(RATE.date)


def test_the_results_in_the_repository_are_in_the_schema(request):
    for path in (request.config.rootpath / "benchmarks" / "results").glob("*.json"):
        records = read(path)
        assert path == results_path(path.parent, records[0].bench, records[0].device)
