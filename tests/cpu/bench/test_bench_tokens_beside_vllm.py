"""benchmarks/tokens_beside_vllm.py: a small model on a CPU beside a program that stands in for vLLM's Python."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from warpbus.formats import Checkpoint
from warpbus.models import read_config

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "tokens_beside_vllm.py"
PEER = """#!{python}
import json, sys
from pathlib import Path
model, file = Path(sys.argv[-2]), Path(sys.argv[-1])
answers = json.loads(model.with_name(model.name + "-warpbus.json").read_text())
steps = answers[2]
{change}
file.write_text(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A directory with a quantized model in it."""
    return tmp_path_factory.mktemp("work")


def run(work, tmp_path, change):
    """The benchmark beside a program that gives Warpbus' answers with a change."""
    python = tmp_path / "python"
    python.write_text(PEER.format(python=sys.executable, change=change), encoding="utf-8")
    python.chmod(0o755)
    command = [sys.executable, str(BENCHMARK), str(work), "--vllm", str(python), "--models", "air", "--tokens", "3"]
    return subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True)


def test_both_have_the_same_answers(work, tmp_path):
    finished = run(work, tmp_path, "")
    assert finished.returncode == 0, finished.stderr
    said = (
        "air-w4a16-g128: 8 of 8 answers of 3 tokens are the same as vLLM's; log probabilities differ by at most 0.0000"
    )
    assert finished.stdout.splitlines() == [said]
    model = Checkpoint(work / "air-w4a16-g128")
    assert read_config(model, mtp="stored").mtp is not None
    assert model.config["architectures"] == ["Glm4MoeForCausalLM"]
    groups = model.config["quantization_config"]["config_groups"]
    assert [group["weights"]["group_size"] for group in groups.values()] == [128, 64]
    answers = json.loads((work / "air-w4a16-g128-warpbus.json").read_text(encoding="utf-8"))
    assert all(step["first"] >= step["second"] for answer in answers for step in answer)


def test_another_token_is_a_difference_unless_it_is_a_tie(work, tmp_path):
    finished = run(work, tmp_path, "steps[1].update(token=5, first=-1.0, second=-3.0); steps[2].update(token=6)")
    assert "7 of 8 answers" in finished.stdout
    assert "prompt of 16 tokens: token 2 is" in finished.stdout
    assert "vLLM 5; margin" in finished.stdout
    step = json.loads((work / "air-w4a16-g128-warpbus.json").read_text(encoding="utf-8"))[2][1]
    assert (finished.returncode == 1) == (step["first"] - step["second"] > 0.05)
    finished = run(work, tmp_path, "steps[1].update(token=5, first=-1.0, second=-1.01)")
    assert finished.returncode == 0
    assert "7 of 8 answers" in finished.stdout


def test_a_failure_of_vllm_is_shown(work, tmp_path):
    finished = run(work, tmp_path, "raise ValueError('no such expert')")
    assert finished.returncode == 1
    assert "ValueError: no such expert" in finished.stdout
    assert "error: 1 of 1 models" in finished.stderr
