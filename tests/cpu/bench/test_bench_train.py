"""`train` on the CPU with a tiny model: what is measured of each method, and beside what."""

import functools
import math

import pytest
import torch
from dense_configs import with_traits
from typer.testing import CliRunner

from warpbus.bench import train as bench_train
from warpbus.bench.cases import Run, run
from warpbus.bench.ceilings import precision_rate
from warpbus.bench.options import TrainBenchOptions
from warpbus.bench.plots import figure
from warpbus.bench.records import read
from warpbus.bench.train import train_benchmark
from warpbus.bench.train_plain import PlainModel
from warpbus.bench.train_process import ProcessMeasurement, TrainBenchTask, job
from warpbus.bench.train_variants import SHAPES_OF_TRAINING, TINY, Variant, shape_named
from warpbus.cli import app
from warpbus.dist import Group, launch
from warpbus.errors import DeviceError, UsageError
from warpbus.models import random_model
from warpbus.train.loss import summed_cross_entropy

CPU = torch.device("cpu")
CONFIG = with_traits(SHAPES_OF_TRAINING[TINY], num_layers=1)


@pytest.fixture(autouse=True)
def _here_and_quick(monkeypatch):
    """In this process, and with a limit that nobody has to measure."""

    def in_this_process(self, what, count, said, *arguments):
        assert count == 1
        what(Group(0, 1, CPU), said.append, *arguments)

    monkeypatch.setattr(bench_train._Measurements, "_in_processes", in_this_process)
    monkeypatch.setattr(bench_train, "precision_rate", lambda device, precision: 1e12)


def task(variant: str, *, plain: bool = False, steps: int = 2, rows: int = 2, recompute: int = 0) -> TrainBenchTask:
    settings = Variant(*variant.split("-")).settings(32, rows, recompute, "w4a16-g128", "ddp")
    return TrainBenchTask(CONFIG, settings, tf32=False, plain=plain, warm=1, steps=steps)


def measured(given: TrainBenchTask) -> ProcessMeasurement:
    said: list[ProcessMeasurement] = []
    job(Group(0, 1, CPU), said.append, given)
    return said[0]


def test_a_table_the_records_and_a_picture(tmp_path):
    words = "bench train --layers 1 --length 32 --rows 1 --variant full-fp32-eager --variant ptuning-bf16-eager"
    found = CliRunner().invoke(
        app,
        [*words.split(), "--price", "3.6", "--device", "cpu", "--output", str(tmp_path)],
        catch_exceptions=False,
        env={"COLUMNS": "160"},
    )
    assert found.exit_code == 0
    for text in (
        "Training a model of random weights, cpu",
        "ptuning-bf16-eager, 1 process:",
        "ms for a token of its answers",
    ):
        assert text in found.stdout
    records = read(tmp_path / "train-cpu.json")
    assert (tmp_path / "train-cpu.png").is_file()
    assert {record.metric for record in records} == {"speed", "time", "memory", "cost", "perplexity", "latency"}
    speeds = [record for record in records if record.metric == "speed"]
    assert [(record.case["method"], record.peer.name) for record in speeds] == [
        ("full", "torch, full-fp32-eager"),
        ("full", "warpbus, full-fp32-eager"),
        ("ptuning", "warpbus, full-fp32-eager"),
    ]
    for record in speeds:
        assert record.floor is not None
        assert len(record.samples["ours"]) == 3
    of_full = {record.metric: record for record in records if record.case.get("method") == "full"}
    assert of_full["time"].ours == pytest.approx(1e6 / of_full["speed"].ours)
    assert of_full["cost"].ours == pytest.approx(of_full["time"].ours / 1000)


def test_quantized_weights_answer_beside_others_and_pictures_have_all_bars():
    work = TrainBenchOptions(layers=1, length=32, rows=1, peer=False)
    variants = ("lora-fp32-eager", "qlora-fp32-eager")
    settings = Run(CPU, "warpbus bench train", variants=variants)
    records = run(train_benchmark(work), settings)
    answers = [record.case["scheme"] for record in records if record.metric == "latency"]
    assert answers == ["none", "w4a16-g128"]
    assert all(not record.peer.name.startswith("torch") for record in records)
    drawn = figure(records, "Training", train_benchmark(work).plot)
    assert [text.get_text() for text in drawn.axes[0].get_yticklabels()] == ["lora fp32 eager", "qlora fp32 eager"]


def test_a_peer_that_fails_is_left_out_with_a_note(monkeypatch):
    in_this_process = bench_train._Measurements._in_processes

    def without_peers(self, what, count, said, *arguments):
        if arguments and getattr(arguments[0], "plain", False):
            raise DeviceError("out of memory")
        in_this_process(self, what, count, said, *arguments)

    monkeypatch.setattr(bench_train._Measurements, "_in_processes", without_peers)
    settings = Run(CPU, "warpbus bench train", variants=("lora-fp32-eager",))
    records = run(train_benchmark(TrainBenchOptions(layers=1, length=32, rows=1)), settings)
    assert "torch, lora-fp32-eager, 1: not measured: out of memory" in settings.notes
    assert all(not record.peer.name.startswith("torch") for record in records)


@pytest.mark.parametrize(("method", "recompute"), [("full", 0), ("lora", 1)])
def test_the_plain_model_learns_what_ours_learns(method, recompute):
    ours = measured(task(f"{method}-fp32-eager", steps=5, recompute=recompute))
    theirs = measured(task(f"{method}-fp32-eager", plain=True, steps=5, recompute=recompute))
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-3)
    assert ours.loss < math.log(CONFIG.vocab_size) + 0.7
    assert len(ours.seconds) == 5


@pytest.mark.parametrize("variant", ["full-fp8-eager", "lora-fp8-eager", "qlora-fp32-eager", "ptuning-fp32-eager"])
def test_every_method_learns(variant):
    short, long = measured(task(variant, steps=1)), measured(task(variant, steps=12, recompute=1))
    assert long.loss < short.loss


def test_two_processes_learn_together():
    said: list[ProcessMeasurement] = []
    given = task("lora-fp32-eager", rows=4)
    launch(job, (given,), devices=[CPU, CPU], receive=said.append)
    assert len(said) == 2
    assert said[0].loss == pytest.approx(said[1].loss)


def test_the_plain_model_computes_the_same_loss(monkeypatch):
    source = random_model(CONFIG, None, CPU, torch.float32)
    plain = PlainModel(CONFIG)
    plain.load_state_dict(source.state_dict())
    tokens, targets = (torch.randint(CONFIG.vocab_size, (2, 16)) for _ in range(2))
    expected = summed_cross_entropy(source.hidden(tokens), source.head, targets)
    torch.testing.assert_close(plain(tokens, targets), expected)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    plain.recompute(2)
    plain.compile_parts()
    torch.testing.assert_close(plain(tokens, targets), expected)
    with pytest.raises(UsageError, match="give --no-peer"):
        PlainModel(with_traits(CONFIG, layer_norm=True))


def test_shapes():
    assert 0.9e9 < SHAPES_OF_TRAINING["1b"].num_parameters < 1.1e9
    assert shape_named("chatglm2-6b", 2).num_layers == 2


@pytest.mark.parametrize(
    ("work", "variants", "message"),
    [
        (TrainBenchOptions(shape="2b"), (), "--shape 2b: there is no such shape"),
        (TrainBenchOptions(), ("qlora-fp8-eager",), "--variant qlora-fp8-eager: there is no such variant"),
        (TrainBenchOptions(length=100000), (), "--length 100000: the context of tiny is 512 tokens"),
        (TrainBenchOptions(rows=0), (), "--rows 0: it has to be at least 1"),
        (TrainBenchOptions(counts=(0, 1)), (), "--gpus 0: give numbers from 1"),
        (TrainBenchOptions(price=0.0), (), "--price 0: expected dollars"),
    ],
)
def test_what_cannot_be_measured(work, variants, message):
    with pytest.raises(UsageError, match=message):
        run(train_benchmark(work), Run(CPU, "warpbus bench train", variants=variants))


def test_rates_of_a_cpu(monkeypatch):
    asked = []
    monkeypatch.setattr("warpbus.bench.ceilings.measure", lambda *given: asked.append(given) or [_Timing()])
    before = torch.get_float32_matmul_precision()
    assert precision_rate.__wrapped__(CPU, "tf32") == precision_rate.__wrapped__(CPU, "fp8") == 2 * 2048**3
    assert torch.get_float32_matmul_precision() == before
    assert len(asked) == 2


class _Timing:
    median = 1.0
