"""`warpbus bench` as a person uses it on a machine without a GPU."""

import json

import pytest
import typer
from typer.testing import CliRunner

from warpbus.bench import cases, ceilings, timing
from warpbus.bench.catalog import BENCHMARKS
from warpbus.bench.records import read
from warpbus.bench.timing import TimingEffort
from warpbus.cli import app
from warpbus.cli import bench as cli_bench
from warpbus.errors import DeviceError, UsageError
from warpbus.language import use_language


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(cases, "QUICK", TimingEffort(samples=2, sample_seconds=1e-6, seconds=0.1))
    monkeypatch.setattr(ceilings, "FULL", TimingEffort(samples=1, sample_seconds=1e-6, seconds=0.1))
    monkeypatch.setattr(ceilings, "_CPU_BYTES", 2**16)
    monkeypatch.setattr(timing, "cpu_cache_bytes", lambda: 2**12)


def invoke(*words):
    return CliRunner().invoke(app, ["bench", *map(str, words)], catch_exceptions=False, env={"COLUMNS": "140"})


def test_a_table_the_records_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = invoke("vector-add", "--quick", "--size", 64, "--size", 100)
    assert found.exit_code == 0
    assert "Vector addition, float32, cpu" in found.stdout
    assert "numpy" in found.stdout
    assert "There is no GPU here" in found.stdout
    place = tmp_path / "benchmarks" / "results"
    assert "records: benchmarks/results/vector-add-cpu.json" in found.stdout
    assert sorted(path.name for path in place.iterdir()) == ["vector-add-cpu.json", "vector-add-cpu.png"]
    assert (place / "vector-add-cpu.png").read_bytes().startswith(b"\x89PNG")
    records = read(place / "vector-add-cpu.json")
    assert [record.case["n"] for record in records] == [64, 100]
    assert {record.command for record in records} == {"warpbus bench vector-add --size 64 --size 100 --quick"}


def test_json_is_all_of_stdout_and_what_was_written(tmp_path):
    picture = tmp_path / "pictures" / "a.png"
    words = ("matmul", "--size", 8, "--quick", "--device", "cpu", "--variant", "tiled")
    found = invoke(*words, "--output", tmp_path / "out", "--plot", picture, "--json")
    assert found.exit_code == 0
    (record,) = json.loads(found.stdout)
    assert record == json.loads((tmp_path / "out" / "matmul-cpu.json").read_text(encoding="utf-8"))[0]
    assert record["case"]["n"] == 8
    # What says where to write is no part of what was measured.
    assert record["command"] == "warpbus bench matmul --size 8 --variant tiled --quick --device cpu"
    assert picture.stat().st_size > 5000
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["matmul-cpu.json"]


def test_a_switch_is_recorded_as_it_was_typed():
    command = typer.main.get_command(app).commands["bench"].commands["train"]
    for typed in (["--no-peer", "--quick"], ["--peer"]):
        with command.make_context("train", [*typed]) as context:
            assert cli_bench._command(context).split()[3:] == typed


def test_a_later_run_replaces_the_records(tmp_path):
    for size in (8, 9):
        assert invoke("matmul", "--size", size, "--quick", "--output", tmp_path).exit_code == 0
    assert [record.case["n"] for record in read(tmp_path / "matmul-cpu.json")] == [9]


@pytest.mark.parametrize("name", ["ladder", "gemm", "gemv", "wna16", "wna8", "w8a8", "attention", "decode"])
def test_without_a_gpu_one_line_says_so(name, tmp_path):
    with pytest.raises(DeviceError, match=f"bench {name}: needs an NVIDIA GPU"):
        invoke(name, "--quick", "--output", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be(tmp_path):
    with pytest.raises(UsageError, match="--dtype float32: give float16 or bfloat16"):
        invoke("gemm", "--dtype", "float32", "--output", tmp_path)
    with pytest.raises(UsageError, match="bench vector-add has no --dtype: leave it out"):
        invoke("vector-add", "--dtype", "float16", "--output", tmp_path)
    with pytest.raises(UsageError, match="bench gemv has no --variant: leave it out"):
        invoke("gemv", "--variant", "fast", "--output", tmp_path)
    with pytest.raises(UsageError, match="--size -1"):
        invoke("matmul", "--size", -1, "--output", tmp_path)
    with pytest.raises(DeviceError, match="torch sees no GPU"):
        invoke("matmul", "--device", "cuda", "--output", tmp_path)
    with pytest.raises(DeviceError, match="bench decode: needs an NVIDIA GPU"):
        invoke("decode", "--shape", "glm-4-9b", "--profile", "--output", tmp_path)
    assert invoke("gemm", "--shape", "glm-4-9b").exit_code == 2
    assert invoke("fastest").exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_help_lists_the_benchmarks():
    text = invoke("--help").stdout
    assert all(name in text for name in BENCHMARKS)
    assert "--variant" in invoke("gemm", "--help").stdout


def commands(group):
    for command in group.commands.values():
        yield command
        if hasattr(command, "commands"):
            yield from commands(command)


def test_help_is_as_wide_as_the_terminal():
    """typer keeps the line breaks of all paragraphs but the first."""
    listed = list(commands(typer.main.get_command(app)))
    assert len(listed) > len(BENCHMARKS)
    later = [paragraph for command in listed for paragraph in command.help.strip().split("\n\n")[1:]]
    assert [paragraph for paragraph in later if "\n" in paragraph.strip()] == []


def test_the_table_is_chinese_under_a_chinese_locale(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    use_language("zh")
    try:
        found = invoke("vector-add", "--quick", "--size", 64, "--output", tmp_path)
    finally:
        use_language("en")
    for expected in ("向量加法，float32，cpu", "本程序", "倍数", "这里没有 GPU", "记录："):
        assert expected in found.stdout
    for left in ("ours", "ratio", "There is no GPU"):
        assert left not in found.stdout
