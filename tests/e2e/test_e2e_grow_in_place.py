"""The example that grows memory in two ways, as a reader of the tutorial runs it."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "grow_in_place.py"


def test_it_prints_both_times_for_each_size():
    command = [sys.executable, str(EXAMPLE), "--device", "cpu", "--mb", "8", "--runs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    heading, *rows = done.stdout.splitlines()
    assert heading.split()[0] == "MiB"
    assert [row.split()[:3] for row in rows] == [["2", "to", "4"], ["8", "to", "16"]]
    assert all(float(number) > 0 for row in rows for number in row.split()[3:5])
