"""benchmarks/quality.py: its records of ours and of other programs, and what stays of an earlier run."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from warpbus.bench.records import Record, read, results_path

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
# In the place of the Python with the other programs: one of them copies the model, the other one fails.
PEERS = f"""#!{sys.executable}
import shutil, sys
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
if given["--peer"] == "broken":
    sys.exit("loading\\nValueError: no such layer | at all")
shutil.copytree(given["--model"], given["--output"])
with open(given["--output"] + "/made_by.txt", "w") as file:
    file.write("stub " + given["--samples"] + given["--device"] + given["--seed"])
"""


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import quality

    yield quality
    del sys.modules["quality"]


@pytest.fixture
def peers(tmp_path: Path) -> Path:
    path = tmp_path / "peers"
    path.write_text(PEERS)
    path.chmod(0o700)
    return path


@pytest.fixture
def measured(
    quality: Any, poet_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Record]]:
    """Runs the benchmark with three poems and gives all records."""

    def run(schemes: str, runs: str, *more: str) -> list[Record]:
        given = ["--model", str(poet_moe), "--schemes", schemes, "--runs", runs, "--documents", "3"]
        monkeypatch.setattr(sys, "argv", ["quality.py", *given, "--output", str(tmp_path), *more])
        quality.main()
        return read(results_path(tmp_path, "quality-poet-moe-small", "cpu"))

    return run


def test_records_of_a_model_beside_other_programs(
    measured: Callable[..., list[Record]], peers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    asked = ("--peers", "copied:2,broken", "--peer-python", str(peers), "--work", str(work))
    ours, beside = measured("w4a16-g64", "rtn", *asked)
    assert (ours.case["model"], ours.case["algorithm"], ours.case["documents"]) == ("poet-moe-small", "rtn", 3)
    assert ours.peer.name == "the original"
    assert ours.case["kl"] > 0
    assert (beside.peer.name, beside.peer.version, beside.case["peer_samples"]) == ("copied", "stub 2cpu0", 2)
    assert beside.case["peer_kl"] < 1e-6
    assert beside.peer.value == pytest.approx(ours.peer.value)
    assert beside.command.startswith("python benchmarks/quality.py --model poet-moe-small --schemes w4a16-g64")
    assert "| w4a16-g64 | | broken | ValueError: no such layer / at all | |" in capsys.readouterr().out
    # Another scheme is added, and the same one replaces what was there.
    assert [each.case["scheme"] for each in measured("w3a16-g64-asym", "rtn")] == ["w4a16-g64"] * 2 + ["w3a16-g64-asym"]
    after = measured("w4a16-g64", "rtn", "--work", str(work))
    assert [each.case["scheme"] for each in after] == ["w3a16-g64-asym", "w4a16-g64"]


def test_a_seed_draws_other_conversations_and_has_records_of_its_own(
    measured: Callable[..., list[Record]], peers: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    asked = ("--peers", "copied:2", "--peer-python", str(peers), "--work", str(work))
    measured("w4a16-g64", "awq:2", *asked)
    found = measured("w4a16-g64", "awq:2", *asked, "--seed", "3")
    assert [each.case["seed"] for each in found] == [0, 0, 3, 3]
    assert found[0].case["kl"] != found[2].case["kl"]
    assert [found[number].peer.version for number in (1, 3)] == ["stub 2cpu0", "stub 2cpu3"]
    assert "--seed" not in found[0].command
    assert found[2].command.endswith("--documents 3 --seed 3")
    report = json.loads((work / "w4a16-g64-awq-2-seed-3" / "warpbus-report.json").read_text(encoding="utf-8"))
    assert report["settings"]["seed"] == 3
    # The same seed replaces its own records only.
    assert [each.case["seed"] for each in measured("w4a16-g64", "rtn", "--seed", "3")] == [0, 0, 3]


def test_a_run_is_compared_with_the_peer_of_as_many_samples(quality: Any) -> None:
    runs = [quality.Run.parse(text) for text in ("rtn", "gptq:128", "gptq+high:128", "gptq:1024")]
    found = {str(run): type("", (), {"divergence": kl})() for run, kl in zip(runs, (4, 3, 2, 1), strict=True)}
    assert str(quality.best(runs, found, quality.Run("autoround", 128))) == "gptq+high:128"
    assert str(quality.best(runs, found, quality.Run("autoround", 1024))) == "gptq:1024"
    assert str(quality.best(runs, found, quality.Run("hqq", 0))) == "gptq:1024"
