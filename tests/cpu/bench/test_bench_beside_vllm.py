"""benchmarks/beside_vllm.py: a small model on a CPU beside a program that stands in for vLLM's Python."""

import subprocess
import sys
from pathlib import Path

import pytest

from warpbus.bench.records import read, results_path

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "beside_vllm.py"
PEER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
words = sys.argv[1:]

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass

if words[0] == "-c":
    print("9.9")
elif "bench" in words:
    after = lambda name: words[words.index(name) + 1]
    count = int(after("--num-prompts"))
    found = {{"completed": count, "output_throughput": 10.0, "mean_ttft_ms": 20.0, "p99_itl_ms": 30.0}}
    open(after("--result-dir") + "/" + after("--result-filename"), "w").write(json.dumps(found))
elif "serve" in words:
    HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
else:
    samples = {{"one sequence": [1.0] * 3, "2 requests": [2.0] * 2, "first token": [3.0] * 5}}
    print(json.dumps({{"version": "9.9", "samples": samples}}))
"""


@pytest.fixture
def peer(tmp_path):
    """A program that does what beside_vllm.py asks of the Python of an environment with vLLM."""
    python = tmp_path / "python"
    python.write_text(PEER.format(python=sys.executable), encoding="utf-8")
    python.chmod(0o755)
    return python


def test_it_writes_a_record_for_each_load(tmp_path, peer, poet_moe):
    arguments = [str(poet_moe), "--vllm", str(peer), "--clients", "2", "--context", "512", "--rounds", "1"]
    arguments += ["--prompt", "32", "--answer", "8"]
    command = [sys.executable, str(BENCHMARK), *arguments, "--output", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    records = read(results_path(tmp_path, "vllm", "cpu"))
    found = {(record.case["level"], record.case.get("load") or record.case["of"]): record for record in records}
    assert {key: record.peer.value for key, record in found.items()} == {
        ("engine", "one sequence"): 1.0,
        ("engine", "2 requests"): 2.0,
        ("engine", "first token"): 3.0,
        ("http", "output"): 10.0,
        ("http", "first token, mean"): 20.0,
        ("http", "between tokens, p99"): 30.0,
    }
    assert {(record.peer.name, record.peer.version) for record in records} == {("vLLM", "9.9")}
    assert len(found["engine", "first token"].samples["ours"]) == 5
    assert found["engine", "first token"].ratio == 3.0 / found["engine", "first token"].ours
    assert records[0].command == "python benchmarks/beside_vllm.py " + " ".join(arguments)


def test_a_python_without_vllm_is_an_error(tmp_path):
    arguments = ["model", "--vllm", sys.executable, "--output", str(tmp_path)]
    finished = subprocess.run([sys.executable, str(BENCHMARK), *arguments], capture_output=True, text=True)
    assert finished.returncode == 1
    assert finished.stderr.startswith("error: vllm: ModuleNotFoundError")
    assert not list(tmp_path.iterdir())
