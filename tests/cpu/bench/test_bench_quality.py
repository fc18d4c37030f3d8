"""benchmarks/quality.py: its records of ours and of other programs, and what stays of an earlier run."""

import sys
from pathlib import Path
from typing import Any

import pytest

from warpbus.bench.records import read, results_path

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
# In the place of the Python with the other programs: one of them copies the model, the other one fails.
PEERS = f"""#!{sys.executable}
import shutil, sys
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
if given["--peer"] == "broken":
    sys.exit("loading\\nValueError: no such layer | at all")
shutil.copytree(given["--model"], given["--output"])
with open(given["--output"] + "/made_by.txt", "w") as file:
    file.write("stub " + given["--samples"] + given["--device"])
"""


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import quality

    yield quality
    del sys.modules["quality"]


def test_records_of_a_model_beside_other_programs(
    quality: Any, poet_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = tmp_path / "peers"
    peers.write_text(PEERS)
    peers.chmod(0o700)

    def measured(schemes: str, runs: str, *more: str) -> list[Any]:
        given = ["--model", str(poet_moe), "--schemes", schemes, "--runs", runs, "--documents", "3"]
        monkeypatch.setattr(sys, "argv", ["quality.py", *given, "--output", str(tmp_path), *more])
        quality.main()
        return read(results_path(tmp_path, "quality-poet-moe-small", "cpu"))

    work = tmp_path / "work"
    asked = ("--peers", "copied:2,broken", "--peer-python", str(peers), "--work", str(work))
    ours, beside = measured("w4a16-g64", "rtn", *asked)
    assert (ours.case["model"], ours.case["algorithm"], ours.case["documents"]) == ("poet-moe-small", "rtn", 3)
    assert ours.peer.name == "the original"
    assert ours.case["kl"] > 0
    assert (beside.peer.name, beside.peer.version, beside.case["peer_samples"]) == ("copied", "stub 2cpu", 2)
    assert beside.case["peer_kl"] < 1e-6
    assert beside.peer.value == pytest.approx(ours.peer.value)
    assert beside.command.startswith("python benchmarks/quality.py --model poet-moe-small --schemes w4a16-g64")
    assert "| w4a16-g64 | | broken | ValueError: no such layer / at all | |" in capsys.readouterr().out
    # Another scheme is added, and the same one replaces what was there.
    assert [each.case["scheme"] for each in measured("w3a16-g64-asym", "rtn")] == ["w4a16-g64"] * 2 + ["w3a16-g64-asym"]
    after = measured("w4a16-g64", "rtn", "--work", str(work))
    assert [each.case["scheme"] for each in after] == ["w3a16-g64-asym", "w4a16-g64"]


def test_a_run_is_compared_with_the_peer_of_as_many_samples(quality: Any) -> None:
    runs = [quality.Run.parse(text) for text in ("rtn", "gptq:128", "gptq+high:128", "gptq:1024")]
    found = {str(run): type("", (), {"divergence": kl})() for run, kl in zip(runs, (4, 3, 2, 1), strict=True)}
    assert str(quality.best(runs, found, quality.Run("autoround", 128))) == "gptq+high:128"
    assert str(quality.best(runs, found, quality.Run("autoround", 1024))) == "gptq:1024"
    assert str(quality.best(runs, found, quality.Run("hqq", 0))) == "gptq:1024"
