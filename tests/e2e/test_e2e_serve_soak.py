"""benchmarks/soak.py, in short: `warpbus serve` with a tiny model stands requests of all kinds at once."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def finished():
    command = [sys.executable, str(SOAK), "--requests", "150", "--concurrency", "16"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_everything_ends_and_nothing_is_left(finished):
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "nothing is wrong" in finished.stdout


def test_there_was_something_of_everything(finished):
    outcomes = {line.strip().split("  ")[1]: int(line.split()[0]) for line in _outcomes(finished.stdout)}
    assert outcomes["same as alone: answered"] + outcomes["same as alone: answered in a stream"] > 5
    assert outcomes["burst: 429, come again"] > 5
    assert outcomes["burst: answered"] > 5
    assert outcomes["leaves before the answer: left"] > 0
    assert outcomes["leaves in mid-stream: left"] > 0
    assert sum(count for outcome, count in outcomes.items() if outcome.startswith("refused: ")) > 5
    assert int(re.search(r"(\d+) preemptions$", finished.stdout, re.MULTILINE)[1]) > 0


def _outcomes(said):
    return [line for line in said.splitlines() if re.match(r" *\d+  [a-z -]+: ", line)]
