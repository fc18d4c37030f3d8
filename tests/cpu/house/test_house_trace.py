"""`scripts/trace_files.py` sees each task whole: a rename that leaves it behind fails here."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_tasks_pass_through_the_files_that_do_the_work():
    script = [sys.executable, str(ROOT / "scripts" / "trace_files.py"), "--json"]
    figures = json.loads(subprocess.run(script, capture_output=True, text=True, check=True).stdout)
    expected = {
        "load": {"engine/llm.py", "formats/checkpoint.py", "models/config.py", "qtensor/qtensor.py"},
        "decode step": {"engine/engine.py", "models/decoder.py", "models/tokenizers/base.py"},
        "GPTQ layer": {"models/decoder.py", "quantization/job.py", "quantization/algorithms/gptq.py"},
    }
    assert figures.keys() == expected.keys()
    for task, row in figures.items():
        assert expected[task] <= set(row["paths"]), task
        assert len(row["paths"]) == row["files"] <= row["functions"] <= row["calls"]
    assert "formats/checkpoint.py" not in figures["decode step"]["paths"]  # one token reads no file
    assert "engine/engine.py" not in figures["GPTQ layer"]["paths"]
