"""`serving` and `parallel` on the CPU with next to no model: what is sent when, what is counted, and what is said."""

import json
import math
import threading
import time
import types
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from dense_configs import with_traits
from typer.testing import CliRunner

from warpbus.bench import parallel, serving, serving_http, serving_peer
from warpbus.bench.cases import Run, run
from warpbus.bench.options import ParallelBenchOptions, ServingBenchOptions
from warpbus.bench.plots import figure
from warpbus.bench.records import read
from warpbus.bench.serving import serving_benchmark
from warpbus.bench.serving_engine import decode_while_growing, drive
from warpbus.bench.serving_floors import ServingFloors
from warpbus.bench.serving_http import Served
from warpbus.bench.serving_load import Figures, Load, RequestSource, Trace, closed, poisson, quantile, random_prompts
from warpbus.bench.serving_memory import cycle_rows
from warpbus.cli import app
from warpbus.engine.engine import Engine
from warpbus.errors import DataError, DeviceError, UsageError
from warpbus.models import SHAPES, random_model
from warpbus.qtensor import Scheme

CPU = torch.device("cpu")
TINY = with_traits(
    serving.SMALL_SHAPE,
    vocab_size=320,
    hidden_size=64,
    num_layers=1,
    num_heads=2,
    head_dim=32,
    ffn_size=96,
    rope=replace(serving.SMALL_SHAPE.rope, rotary_dim=16),
    max_context=256,
)
SIZES = {"prompt": 6, "tokens": 4, "vocabulary": 300}


def settings(**changes):
    return Run(**{"device": CPU, "command": "warpbus bench serving", **changes})


# What is sent when.


def test_a_closed_loop_sends_as_many_as_were_answered():
    load = closed(5, 2, seed=1, **SIZES)
    source = RequestSource(load)
    first = source.due(0.5, 0)
    assert [prompt for prompt, _ in first] == load.prompts[:2]
    assert [trace.sent for _, trace in first] == [0.5, 0.5]
    assert source.due(1.0, 2) == []
    assert source.wait(1.0) == math.inf
    assert [prompt for prompt, _ in source.due(2.0, 1)] == load.prompts[2:3]
    assert [prompt for prompt, _ in source.due(3.0, 0)] == load.prompts[3:]
    assert source.exhausted


def test_an_open_loop_sends_what_is_due_and_counts_from_then():
    source = RequestSource(Load([[1], [2], [3]], 4, arrivals=(0.1, 0.2, 5.0)))
    assert source.wait(0.0) == 0.1
    assert source.due(0.05, 0) == []
    assert [(prompt, trace.sent) for prompt, trace in source.due(0.7, 99)] == [([1], 0.1), ([2], 0.2)]
    assert not source.exhausted
    assert source.wait(1.0) == 4.0
    assert source.wait(9.0) == 0.0
    assert len(source.due(9.0, 0)) == 1
    assert source.wait(9.0) == math.inf


def test_arrivals_are_those_of_a_poisson_process():
    load = poisson(4000, 50.0, seed=3, **SIZES)
    gaps = [later - earlier for earlier, later in zip((0.0, *load.arrivals), load.arrivals, strict=False)]
    assert min(gaps) >= 0
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.05)
    assert load.arrivals == poisson(4000, 50.0, seed=3, **SIZES).arrivals
    assert load.arrivals != poisson(4000, 50.0, seed=4, **SIZES).arrivals


def test_no_two_prompts_begin_alike():
    one, other = random_prompts(8, 32, 300, 1), random_prompts(8, 32, 300, 2)
    assert len({tuple(prompt[:16]) for prompt in one + other}) == 16
    assert all(0 <= token < 300 for prompt in one for token in prompt)
    ended = random_prompts(8, 32, 300, 1, end=(298, 299))
    assert ended == [[*prompt[:-2], 298, 299] for prompt in one]
    assert closed(8, 2, prompt=32, tokens=3, vocabulary=300, seed=1, end=(298, 299)).prompts == ended
    assert poisson(8, 2.0, prompt=32, tokens=3, vocabulary=300, seed=1, end=(298, 299)).prompts == ended


# What is counted.


def test_figures_of_what_came():
    early, late = Trace(1.0), Trace(2.0)
    for when in (3.0, 4.0, 6.0):
        early.came(when, 2)
    late.came(5.0, 6)
    found = Figures.of([early, late])
    assert (found.tokens_per_second, found.requests_per_second) == (12 / 5, 2 / 5)
    assert list(found.first_token) == [2.0, 3.0]
    assert list(found.between_tokens) == [1.0, 2.0]


def test_quantiles():
    numbers = list(range(1, 101))
    assert [quantile(numbers, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert quantile([7], 0.01) == 7


def test_limits():
    config = SHAPES["chatglm2-6b"]
    floors = ServingFloors(config, None, torch.float16, 1e12, 1e14)
    weights = 2 * (config.num_parameters - config.vocab_size * config.hidden_size)
    assert floors.step(1, 0) == pytest.approx(weights / 1e12, rel=0.01)  # to read them
    assert floors.step(1000, 0) == pytest.approx(weights * 1000 / 1e14, rel=0.01)  # to multiply with them
    cached = 28 * 2 * 2 * 128 * 2
    assert floors.step(2, 100) - floors.step(2, 0) == pytest.approx(200 * cached / 1e12)
    assert floors.step(1, 0) > 3 * ServingFloors(config, Scheme.parse("w4a16"), torch.float16, 1e12, 1e14).step(1, 0)
    load = closed(4, 2, prompt=10, tokens=5, vocabulary=9, seed=0)
    assert floors.closed(load) == pytest.approx(floors.prompt(40) + 2 * 4 * floors.step(2, 12))


def test_an_engine_under_both_loads():
    engine = Engine(random_model(TINY, None, CPU, torch.float32), max_num_seqs=2, max_model_len=64)
    for load in (closed(5, 2, seed=1, **SIZES), poisson(5, 100.0, seed=2, **SIZES)):
        found = drive(engine, load)
        assert len(found.first_token) == 5
        assert len(found.between_tokens) == 5 * 3
        assert min(found.first_token) > 0
        host = found.host
        assert 0 < host.planning < host.stepping
        assert 0 < host.launching < host.stepping
        assert host.steps >= 4
        assert host.cache_bytes > 0
        assert not engine.has_work


def test_steps_with_growth_are_reported_from_others():
    """A cache that grows in every third step, which takes longer."""

    class Fake:
        def __init__(self):
            self.asked, self.steps, self.bytes = [], 0, 0

        def shrink(self):
            self.bytes = 0

        def add(self, sequence):
            self.asked.append(sequence)

        def step(self):
            self.steps += 1
            if self.steps % 3 == 0:
                self.bytes += 100
                time.sleep(0.002)
            for each in self.asked:
                each.append(1)
            return []

        def stats(self):
            return types.SimpleNamespace(cache_bytes=self.bytes)

        @property
        def has_work(self):
            return not all(each.finish_reason for each in self.asked)

    found = decode_while_growing(Fake(), [[1], [2]], 12)
    assert (len(found.growing), len(found.others), found.grown) == (4, 6, 400)
    assert found.longest == max(found.growing) > 0.002
    assert found.median in found.others or found.median < 0.002


# A whole run.


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(serving, "SMALL_SHAPE", TINY)
    monkeypatch.setattr(parallel, "SMALL_SHAPE", TINY)
    monkeypatch.setattr(serving, "LITTLE", replace(serving.LITTLE, seconds=0.3, grown=1000))


def test_the_records_a_table_and_a_picture(tiny, tmp_path):
    words = "bench serving --scheme w8a16-g32 --concurrency 1,3 --rates 0.5,0.9 --prompt 20 --tokens 6 --device cpu"
    places = ("--output", str(tmp_path))
    found = CliRunner().invoke(app, [*words.split(), *places], catch_exceptions=False, env={"COLUMNS": "160"})
    assert found.exit_code == 0
    for text in ("closed loop, 3 at once:", "% and launching", "0 preemptions", "growth:", "p99", "warpbus, 1 at once"):
        assert text in found.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["serving-cpu.json", "serving-cpu.png"]
    records = read(tmp_path / "serving-cpu.json")
    assert {record.command for record in records} == {f"warpbus {words}"}
    of_loads = [record for record in records if "load" in record.case]
    assert {(record.case["prompt"], record.case["generated"]) for record in of_loads} == {(20, 6)}
    for concurrency, requests in ((1, 4), (3, 4)):
        rows = [record for record in of_loads if record.case.get("concurrency") == concurrency]
        assert {record.case["requests"] for record in rows} == {requests}
        assert [(record.case["of"], record.case.get("quantile", ""), record.unit) for record in rows] == [
            ("output", "", "tokens/s"),
            ("requests", "", "requests/s"),
            *[("first token", name, "ms") for name in ("p50", "p90", "p99")],
            *[("between tokens", name, "ms") for name in ("p50", "p90", "p99")],
            ("scheduling", "", "us"),
            ("launching", "", "us"),
            ("cache", "", "GB"),
        ]
        output, answered, *_ = rows
        assert output.ours == pytest.approx(6 * answered.ours)
        waits = [record.ours for record in rows if record.case["of"] == "first token"]
        assert waits == sorted(waits)
    opened = [record for record in of_loads if record.case["load"] == "open"]
    assert {record.case["rate"] for record in opened} == {0.5, 0.9}
    assert {record.peer.name for record in opened if record.unit == "requests/s"} == {"offered"}
    tasks = {record.case["task"]: record for record in records if "task" in record.case}
    assert set(tasks) == {"growth", "sleep", "wake"}
    assert tasks["growth"].ours >= tasks["growth"].peer.value
    rates, latencies = figure(records, "title", serving_benchmark(ServingBenchOptions()).plot).axes
    assert [list(line.get_xdata()) for line in rates.lines] == [[1.0, 3.0]]
    assert len(latencies.lines) == 6


def test_cycles_are_counted_by_the_driver_alone():
    assert cycle_rows(settings()) == []


def test_what_cannot_be_asked_for():
    def cases(**asked):
        return serving_benchmark(ServingBenchOptions(**asked)).cases(settings())

    with pytest.raises(UsageError, match=r"--shape gpt: there is no such shape: choose among chatglm-6b, .*, small"):
        cases(shape="gpt")
    with pytest.raises(UsageError, match="--tokens 1: it has to be at least 2"):
        cases(tokens=1)
    with pytest.raises(UsageError, match="--prompt 9000 with --tokens 8: the context of small is 2,048"):
        cases(prompt=9000)
    with pytest.raises(UsageError, match="--url and --serve: give one of them"):
        cases(url="http://127.0.0.1:1", serve="demo")
    with pytest.raises(UsageError, match="--shape: a server has its own model"):
        cases(url="http://127.0.0.1:1", shape="small")


# Over HTTP.


class Server(ThreadingHTTPServer):
    """Answers with as many chunks as tokens are asked for, unless it is to do worse."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault, self.asked, self.busy, self.most, self.lock = "", [], 0, 0, threading.Lock()
        self.suffix = None  # of its prompts; what other servers than ours have none of
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words):
        """Nothing is logged."""

    def do_GET(self):
        model = {"id": "poet", "owned_by": "others" if self.server.suffix is None else "warpbus"}
        models = {"data": [model]} if self.server.fault != "no list" else []
        self._answer(200, json.dumps(models).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        if self.path == "/tokenize":
            assert body == {"model": "poet", "prompt": "a", "add_special_tokens": body["add_special_tokens"]}
            whole = [97, 42, 97, 98, *server.suffix]  # 97 and 42 before the text, which is 97 and 98
            self._answer(200, json.dumps({"tokens": whole if body["add_special_tokens"] else [97, 98]}).encode())
            return
        with server.lock:
            server.asked.append((body, self.headers.get("Authorization")))
            server.busy += 1
            server.most = max(server.most, server.busy)
        time.sleep(0.01)
        count = body["max_tokens"] - (server.fault == "short")
        events = [{"choices": [{"text": "a"}], "usage": None}] * body["max_tokens"]
        events.append({"choices": [], "usage": {"completion_tokens": count}})
        if server.fault == "error":
            events = [{"error": {"message": "died"}}]
        with server.lock:
            server.busy -= 1
        if server.fault == "refused":
            self._answer(429, b'{"error": {"message": "too many"}}')
        else:
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            self._answer(200, "".join([": waiting\n\n", *lines, "data: [DONE]\n\n"]).encode())

    def _answer(self, status, content):
        with suppress(ConnectionError):  # who asked may have given up
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_server_under_both_loads(server, monkeypatch, tmp_path):
    monkeypatch.setenv(serving_http.KEY_VARIABLE, "secret")
    assert serving_http.first_model(server.url) == Served("poet")
    load = closed(7, 3, seed=1, **SIZES)
    found = serving_http.drive(server.url, "poet", load)
    assert len(found.first_token) == 7
    assert min(found.first_token) >= 0.01
    assert len(found.between_tokens) == 7 * 3
    assert found.host is None
    assert server.most <= 3
    assert {key for _, key in server.asked} == {"Bearer secret"}
    assert sorted(body["prompt"] for body, _ in server.asked) == sorted(load.prompts)
    assert all((body["max_tokens"], body["ignore_eos"]) == (4, True) for body, _ in server.asked)
    assert len(serving_http.drive(server.url, "poet", poisson(6, 100.0, seed=2, **SIZES)).first_token) == 6
    words = ["bench", "serving", "--url", f"{server.url}/", "--concurrency", "1,2", "--prompt", "4", "--tokens", "3"]
    monkeypatch.setattr(serving, "LITTLE", replace(serving.LITTLE, seconds=0.1))
    command = [*words, "--device", "cpu", "--output", str(tmp_path)]
    found = CliRunner().invoke(app, command, catch_exceptions=False)
    assert found.exit_code == 0
    records = read(tmp_path / "serving-http-cpu.json")
    assert {(record.case["level"], record.case["shape"]) for record in records} == {("http", "poet")}
    assert {record.case["of"] for record in records} == {"output", "requests", "first token", "between tokens"}


@pytest.mark.parametrize("suffix", [[], [98, 99]])
def test_prompts_over_http_end_as_the_models_do(server, monkeypatch, tmp_path, suffix):
    server.suffix = suffix
    assert serving_http.first_model(server.url) == Served("poet", tuple(suffix))
    monkeypatch.setattr(serving, "LITTLE", replace(serving.LITTLE, seconds=0.1))
    work = ServingBenchOptions(url=server.url, concurrency=(2,), prompt=6, tokens=3)
    run(serving_benchmark(work), settings())
    prompts = [body["prompt"] for body, _ in server.asked]
    assert all(len(prompt) == 6 for prompt in prompts)
    assert len({tuple(prompt[:4]) for prompt in prompts}) > 4
    if suffix:
        assert all(prompt[-2:] == suffix for prompt in prompts)
        with pytest.raises(UsageError, match="--prompt 2: those of poet end in 2 tokens of their own: give more"):
            run(serving_benchmark(replace(work, prompt=2)), settings())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("refused", "the server answered 429: .*too many"),
        ("error", "the server ended an answer: .*died"),
        ("short", "the server gave 3 tokens of 4: it has to know ignore_eos"),
    ],
)
def test_a_server_that_does_not_answer_is_an_error_in_one_line(server, fault, said):
    server.fault = fault
    with pytest.raises(DeviceError, match=said) as raised:
        serving_http.drive(server.url, "poet", closed(5, 3, seed=1, **SIZES))
    assert "\n" not in str(raised.value)


def test_no_server(server):
    server.fault = "no list"
    with pytest.raises(DataError, match="the program that answers has no list of models"):
        serving_http.first_model(server.url)
    with pytest.raises(DeviceError, match=r"--url http://127.0.0.1:9: no server answers there"):
        serving_http.first_model("http://127.0.0.1:9")
    with pytest.raises(DeviceError, match="the server was lost"):
        serving_http.drive("http://127.0.0.1:9", "poet", closed(1, 1, seed=1, **SIZES))


def test_without_httpx(monkeypatch):
    monkeypatch.setattr(serving_http, "HAS_HTTPX", False)
    with pytest.raises(UsageError, match="--url and --serve need httpx, which is missing: pip install httpx"):
        run(serving_benchmark(ServingBenchOptions(url="http://127.0.0.1:9")), settings())


def test_a_server_that_does_not_start(tmp_path):
    with (
        pytest.raises(DeviceError, match=f"bench serving: {tmp_path} is not served: .*config.json"),
        serving_http.served(str(tmp_path), "cpu"),
    ):
        pass


# transformers.


class Manager:
    """Batches like transformers: tokens come in threads of its own; here at once."""

    def __init__(self, fault=""):
        self.fault, self.names, self.results = fault, 0, []

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.left = True

    def add_request(self, prompt, *, max_new_tokens, record_timestamps):
        assert record_timestamps
        count = max_new_tokens - (self.fault == "short")
        start = time.perf_counter()
        self.names += 1
        result = types.SimpleNamespace(
            request_id=f"req_{self.names}",
            generated_tokens=[1] * count,
            timestamps=[start + 0.1 * at for at in range(1, count + 2)],  # one of a token that it dropped
            error=None,
            is_finished=lambda: True,
        )
        self.results.append(result)
        return result.request_id

    def get_result(self, timeout):
        return None if self.fault == "dead" else self.results.pop(0)

    def is_running(self):
        return False


@pytest.fixture
def batching(monkeypatch):
    pytest.importorskip("transformers")
    manager = Manager()
    model = types.SimpleNamespace(
        config=types.SimpleNamespace(_attn_implementation="paged|sdpa"),
        continuous_batching_context_manager=lambda **given: manager,
    )
    monkeypatch.setattr(serving_peer, "transformers_model", lambda config, device: model)
    return manager


def test_transformers_figures(batching):
    found, attention = serving_peer.transformers_figures(TINY, CPU, closed(4, 4, seed=1, **SIZES))
    assert attention == "paged|sdpa"
    assert batching.left
    assert list(found.first_token) == pytest.approx([0.1] * 4, abs=0.01)
    assert list(found.between_tokens) == pytest.approx([0.1] * 12, abs=0.01)
    assert found.tokens_per_second == pytest.approx(16 / 0.4, rel=0.05)


@pytest.mark.parametrize(
    ("fault", "said"), [("dead", "transformers has stopped while"), ("short", "gave 7 tokens of 8: no error")]
)
def test_transformers_that_fail_are_left_out(batching, fault, said):
    batching.fault = fault
    asked = settings()
    load = closed(4, 4, seed=1, **SIZES)
    assert serving._transformers(asked, TINY, load, lambda *given: None) is None
    (note,) = asked.notes
    assert note.startswith("transformers was left out: it does not work here (DeviceError: ")
    assert said in note


# One sequence, several processes.


def test_parallel(tiny, tmp_path):
    words = "bench parallel --gpus 2,1 --tokens 4 --device cpu"
    found = CliRunner().invoke(app, [*words.split(), "--output", str(tmp_path)], catch_exceptions=False)
    assert found.exit_code == 0
    assert "2 CPU processes:" in found.stdout
    one, two = read(tmp_path / "parallel-cpu.json")
    assert (one.case["processes"], two.case["processes"]) == (1, 2)
    assert one.ratio == 1
    assert two.ratio == pytest.approx(one.ours / two.ours)
    assert (one.unit, len(one.samples["ours"]), one.case["variant"]) == ("ms", 2, "none")


def test_parallel_with_whole_experts(monkeypatch):
    whole = SHAPES["glm-4.7-flash"]
    config = whole.resized(num_layers=2, hidden_size=64, num_heads=2, ffn_size=64)
    monkeypatch.setattr(parallel, "SMALL_SHAPE", config)
    work = ParallelBenchOptions(counts=(1, 2), tokens=2, scheme="w4a16-g32", expert_parallel=True)
    one, two = run(parallel.parallel_benchmark(work), settings())
    assert (one.case["experts"], two.case["processes"]) == ("whole", 2)
    assert min(one.ours, two.ours) > 0


def test_chatglm_6b_in_this_process(monkeypatch, tmp_path):
    """Its prompts end in <sop>: without it the engine refuses them."""
    first = with_traits(
        SHAPES["chatglm-6b"],
        vocab_size=320,
        hidden_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=32,
        ffn_size=128,
        rope=replace(SHAPES["chatglm-6b"].rope, rotary_dim=16),
        max_context=256,
        prompt_end=310,
    )
    monkeypatch.setattr(serving, "SMALL_SHAPE", first)
    monkeypatch.setattr(parallel, "SMALL_SHAPE", first)
    monkeypatch.setattr(serving, "LITTLE", replace(serving.LITTLE, seconds=0.1, grown=1000))
    work = ServingBenchOptions(scheme="w8a16-g32", concurrency=(2,), rates=(0.5,), prompt=4, tokens=3)
    assert any(record.case.get("of") == "output" for record in run(serving_benchmark(work), settings()))
    (record,) = run(parallel.parallel_benchmark(ParallelBenchOptions(counts=(1,), tokens=3)), settings())
    assert record.ours > 0


def test_what_parallel_cannot_be_asked_for():
    def cases(**asked):
        return parallel.parallel_benchmark(ParallelBenchOptions(**asked)).cases(settings())

    for asked, said in (
        ({"shape": "gpt"}, "--shape gpt: there is no such shape"),
        ({"layers": 0}, "--layers 0: it has to be at least 1"),
        ({"tokens": 1}, "--tokens 1: it has to be at least 2"),
        ({"tokens": 5000}, "--tokens 5000: small has room for 1,920 after the prompt"),
        ({"counts": (0, 1)}, "--gpus 0: give numbers from 1 to"),
        ({"expert_parallel": True}, "--expert-parallel: small has no experts: choose the --shape of a mixture"),
    ):
        with pytest.raises(UsageError, match=said):
            cases(**asked)


def test_a_run_of_the_benchmark_itself(tiny):
    work = ServingBenchOptions(scheme="w4a16-g32", concurrency=(2,), rates=(0.5,), prompt=4, tokens=3)
    records = run(serving_benchmark(work), settings())
    assert {record.peer.name for record in records if record.case.get("of") == "output"} == {"warpbus, 2 at once"}
