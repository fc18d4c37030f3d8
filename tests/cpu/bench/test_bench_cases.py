"""Benchmarks on the CPU: what their records say, what they leave out, and what they refuse."""

import math
from functools import partial

import pytest
import torch

from warpbus.bench import Benchmark, Run, cases, ceilings, geometric_means, matmul, run, timing
from warpbus.bench.cases import Case, PeerContender, Plot, Result
from warpbus.bench.catalog import BENCHMARKS
from warpbus.bench.dense import LAYERS, decode_shapes
from warpbus.bench.timing import Timing, TimingEffort
from warpbus.errors import DeviceError, UsageError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Tiny buffers, and one sample of each thing."""
    monkeypatch.setattr(cases, "QUICK", TimingEffort(samples=2, sample_seconds=1e-6, seconds=0.1))
    monkeypatch.setattr(ceilings, "FULL", TimingEffort(samples=1, sample_seconds=1e-6, seconds=0.1))
    monkeypatch.setattr(ceilings, "_CPU_BYTES", 2**16)
    monkeypatch.setattr(timing, "cpu_cache_bytes", lambda: 2**12)


def settings(**changes):
    return Run(**{"device": CPU, "command": "warpbus bench x", "quick": True, **changes})


def test_every_benchmark_has_its_name():
    assert list(BENCHMARKS) == [
        "vector-add",
        "matmul",
        "ladder",
        "gemm",
        "gemv",
        "linear",
        "wna16",
        "wna8",
        "w8a8",
        "trellis",
        "moe",
        "attention",
        "mla",
        "decode",
    ]
    assert all(benchmark.title for benchmark in BENCHMARKS.values())


@pytest.mark.parametrize("name", ["vector-add", "matmul"])
def test_without_a_gpu_numpy_is_the_peer(name):
    asked = settings(sizes=(16, 33))
    records = run(BENCHMARKS[name], asked)
    assert [record.case["n"] for record in records] == [16, 33]
    for record in records:
        assert record.bench == name
        assert (record.peer.name, record.device, record.metric, record.unit) == ("numpy", "cpu", "time", "us")
        assert record.case["timed"] == "clock"
        assert len(record.samples["ours"]) == len(record.samples["peer"]) == 2
        assert record.ratio == pytest.approx(record.peer.value / record.ours)
        assert record.floor is not None
        assert record.versions["torch"] == torch.__version__
        assert record.command == "warpbus bench x"
    assert asked.notes == ["There is no GPU here: ours is the operator's CPU reference, the same for every variant."]


def test_linear_beside_torch_and_its_compiler(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    records = run(BENCHMARKS["linear"], settings(sizes=(16,)))
    assert [(record.case["m"], record.peer.name) for record in records] == [
        *((1, "torch"), (1, "torch.compile")),
        *((64, "torch"), (64, "torch.compile")),
    ]
    assert {record.case["dtype"] for record in records} == {"bfloat16"}
    assert math.isfinite(sum(record.ours for record in records))


def test_a_compiler_that_does_not_work_is_left_out_and_said_so(monkeypatch):
    def broken(function, **options):
        def call(*inputs):
            raise OSError("no compiler")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    asked = settings(sizes=(16,))
    assert {record.peer.name for record in run(BENCHMARKS["linear"], asked)} == {"torch"}
    assert asked.notes[-1] == "torch.compile was left out: it does not work here (OSError)."


@pytest.mark.parametrize(
    "name", ["ladder", "gemm", "gemv", "wna16", "w8a8", "trellis", "moe", "attention", "mla", "decode"]
)
def test_some_need_a_gpu(name):
    with pytest.raises(DeviceError, match=f"bench {name}: needs an NVIDIA GPU") as raised:
        run(BENCHMARKS[name], settings())
    assert "\n" not in str(raised.value)


def test_what_cannot_be_asked_for():
    with pytest.raises(UsageError, match="--size 0: a size is a positive number"):
        run(BENCHMARKS["matmul"], settings(sizes=(64, 0)))
    for name in ("vector-add", "matmul", "linear"):
        with pytest.raises(UsageError, match="--variant fastest: there is no such variant: choose among"):
            run(BENCHMARKS[name], settings(variants=("fastest",)))


def test_what_does_not_fit_the_memory():
    with pytest.raises(DeviceError, match="the memory of the CPU does not hold this case"):
        run(BENCHMARKS["vector-add"], settings(sizes=(2**60,)))


def made_up(metric="time", floor=1e-6):
    """A case that takes 2 us, its rivals 3 us (beside it) and 6 us (alone)."""
    return Case(
        parameters={"n": 1},
        metric=metric,
        work=1e6,
        floor_seconds=floor,
        make=tuple,
        ours=lambda: None,
        rivals=[PeerContender("a", "1", lambda: None), PeerContender("b", "2", alone=lambda: Timing((6e-6,), "clock"))],
    )


@pytest.fixture
def instant(monkeypatch):
    def measure(calls, make, effort, touched=None):
        return [Timing((2e-6, 2e-6, 9e-6), "graph"), Timing((3e-6, 3e-6, 1e-6), "graph")][: len(calls)]

    monkeypatch.setattr(cases, "measure", measure)


@pytest.mark.parametrize(
    ("metric", "unit", "ours", "peers", "floor"),
    [
        ("time", "us", 2.0, [3.0, 6.0], 1.0),
        ("throughput", "TFLOP/s", 0.5, [1 / 3, 1 / 6], 1.0),
        ("bandwidth", "GB/s", 500.0, [1e3 / 3, 1e3 / 6], 1000.0),
    ],
)
def test_a_record_for_each_peer(instant, metric, unit, ours, peers, floor):
    steps = []
    benchmark = Benchmark("x", "X", lambda run: [partial(made_up, metric)], Plot(None))
    records = run(benchmark, settings(), lambda *step: steps.append(step))
    assert [record.peer.name for record in records] == ["a", "b"]
    assert [record.unit for record in records] == [unit] * 2
    assert [record.ours for record in records] == pytest.approx([ours] * 2)
    assert [record.peer.value for record in records] == pytest.approx(peers)
    assert [record.ratio for record in records] == pytest.approx([1.5, 3.0])
    assert [record.floor for record in records] == pytest.approx([floor] * 2)
    assert records[0].share_of_floor == pytest.approx(0.5)
    assert len(records[0].samples["ours"]) == 3
    assert records[1].samples["peer"] == pytest.approx(peers[1:])
    assert steps == [("x", 0, 1), ("x", 1, 1)]


def test_geometric_means_by_group_and_variant(instant):
    def case(n, variant):
        return Case({"n": n, "variant": variant}, "time", 1, None, tuple, str, [PeerContender("a", "1", str)])

    def group(case):
        return case["n"] < 3

    benchmark = Benchmark(
        "x",
        "X",
        lambda run: [partial(case, n, variant) for variant in run.variants for n in (1, 2, 3)],
        Plot(None),
        means={"small": group, "none": lambda case: False},
    )
    records = run(benchmark, settings(variants=("one",)))
    assert geometric_means(benchmark, records) == pytest.approx({"small": 1.5})
    assert records[0].floor is None
    assert list(geometric_means(benchmark, run(benchmark, settings(variants=("one", "two"))))) == [
        "small, one",
        "small, two",
    ]


def test_geometric_means_by_peer(instant):
    def case(n):
        calls = [PeerContender("a", "1", str), PeerContender("b", "1", alone=lambda: Timing((8e-6,), "graph"))]
        return Case({"n": n}, "time", 1, None, tuple, str, calls)

    benchmark = Benchmark("x", "X", lambda run: [partial(case, 1)], Plot(None), means={"all": lambda case: True})
    means = geometric_means(benchmark, run(benchmark, settings()))
    assert means == pytest.approx({"all, against a": 1.5, "all, against b": 4.0})


def test_what_is_measured_already_becomes_records_too():
    result = Result(
        {"n": 1}, "speed", "tokens/s", [400.0, 500.0, 600.0], [("a", "1", [200.0]), ("b", "2", [250.0])], 1000.0
    )
    records = run(Benchmark("x", "X", lambda run: [lambda: [result]], Plot(None)), settings())
    assert [(record.peer.name, record.ours, record.ratio) for record in records] == [("a", 500, 2.5), ("b", 500, 2)]
    assert records[0].share_of_floor == 0.5
    assert records[1].samples == {"ours": [400, 500, 600], "peer": [250]}


def test_the_decode_shapes_and_their_tensor_parallel_parts():
    shapes = decode_shapes()
    assert len(shapes) == 15
    assert shapes["lm_head"] == (65024, 4096, 1)
    assert shapes["qkv/2"] == (2304, 4096, 2)
    assert (shapes["down/2"], shapes["down/4"]) == ((4096, 6848, 2), (4096, 3424, 4))
    assert shapes["o/4"] == (4096, 1024, 4)
    assert LAYERS["gate_up"][:2] == (27392, 4096)


def on_hopper(monkeypatch, arch="sm_90a"):
    monkeypatch.setattr(matmul, "architecture", lambda device: arch)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    return settings(device=torch.device("cuda", 0), quick=False)


def test_rungs_that_the_gpu_cannot_run_are_left_out(monkeypatch):
    asked = on_hopper(monkeypatch, "sm_80")
    names = [rung.name for rung in matmul._runnable(asked, matmul.MATMUL_RUNGS, list(matmul.MATMUL_RUNGS))]
    assert "naive" in names
    assert "wgmma" not in names
    assert "wgmma was left out: it needs sm_90a." in asked.notes
    asked = on_hopper(monkeypatch)
    assert len(matmul._runnable(asked, matmul.MATMUL_RUNGS, list(matmul.MATMUL_RUNGS))) == len(matmul.MATMUL_RUNGS)
    asked = on_hopper(monkeypatch, "sm_80")
    with pytest.raises(DeviceError, match="--variant wgmma: NVIDIA H100 cannot run it"):
        matmul._runnable(asked, matmul.MATMUL_RUNGS, ["wgmma"])
    asked.dtype = torch.float64
    with pytest.raises(DeviceError, match="naive was left out: it does not take float64"):
        matmul._runnable(asked, matmul.MATMUL_RUNGS, ["naive"])


def test_how_many_cases_there_are_on_a_gpu(monkeypatch):
    asked = on_hopper(monkeypatch)
    counts = {name: len(benchmark.cases(asked)) for name, benchmark in BENCHMARKS.items()}
    rungs = len(matmul.MATMUL_RUNGS) + len(matmul.GEMV_RUNGS)
    assert counts == {
        "vector-add": 12,
        "matmul": 48,
        "ladder": 2 * rungs,
        "gemm": 15,
        "gemv": 15,
        "linear": 8,
        "wna16": 36,
        "wna8": 16,
        "w8a8": 16,
        "trellis": 72,
        "moe": 14,
        "attention": 48,
        "mla": 18,
        "decode": 3,
    }
    asked.quick = True
    fewer = {name: len(benchmark.cases(asked)) for name, benchmark in BENCHMARKS.items()}
    assert fewer == {
        "vector-add": 6,
        "matmul": 18,
        "ladder": rungs,
        "gemm": 6,
        "gemv": 5,
        "linear": 2,
        "wna16": 12,
        "wna8": 8,
        "w8a8": 4,
        "trellis": 24,
        "moe": 6,
        "attention": 6,
        "mla": 6,
        "decode": 1,
    }
    asked.sizes = (128,)
    assert len(BENCHMARKS["gemm"].cases(asked)) == len(BENCHMARKS["gemv"].cases(asked)) == 1
