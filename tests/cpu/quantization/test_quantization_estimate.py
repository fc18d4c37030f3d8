"""What a run is going to need, and what is said where it is not there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantization_models import write_model

from warpbus.errors import DeviceError, StorageError, UsageError
from warpbus.models import SHAPES
from warpbus.qtensor import Scheme
from warpbus.quantization import estimate as module
from warpbus.quantization.algorithms.gptq import SWEEPS
from warpbus.quantization.estimate import QuantizationEstimate, device_rates, estimate, time_range
from warpbus.quantization.preflight import Plan, prepare
from warpbus.quantization.survey import RankDevice

GB = 10**9
BOTH = frozenset({"moments", "drift"})
RATES = {torch.float16: 1e9, torch.bfloat16: 1e8, torch.float32: 1e9}
RECORDS = sorted((Path(__file__).parents[3] / "benchmarks" / "results").glob("quantize-*.json"))
GPUS = tuple(torch.device("cuda", index) for index in range(8))

# TINY: hidden 128, ffn 256, 4 heads and 2 of keys and values of 32, 2 layers.
LAYER = 256 * 128 + 128 * 128 + 512 * 128 + 128 * 256


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_model(directory, dtype=torch.float16)
    return prepare(directory, directory.with_name("out"), Scheme.parse("w4a16-g128"))


def run(plan: Plan, tmp_path: Path, world: int = 1, **changes: Any) -> QuantizationEstimate:
    arguments: dict[str, Any] = {
        "output": tmp_path / "out",
        "algorithm": "gptq",
        "needed": BOTH,
        "tokens": 80_000,
        "batch_tokens": 1000,
        "rates": RATES,
    }
    devices = changes.pop("devices", GPUS[:world])
    free = changes.pop("free", [80 * GB] * len(devices))
    arguments["ranks"] = [
        RankDevice("here", str(device), size, size if device.type == "cpu" else None)
        for device, size in zip(devices, free, strict=True)
    ]
    return estimate(plan, **arguments | changes)


@pytest.mark.parametrize(("world", "tokens"), [(1, 80_000), (2, 40_000), (3, 30_000), (8, 10_000)])
def test_memory_of_a_gpu(plan: Plan, tmp_path: Path, world: int, tokens: int) -> None:
    found = run(plan, tmp_path, world)
    assert [need.place for need in found.gpus] == [f"cuda:{index}" for index in range(world)]
    for rank, need in enumerate(found.gpus):
        assert need.parts["states"] == tokens * 128 * 2 * 2
        assert need.parts["activations"] == tokens * 256 * 2
        assert need.parts["layers"] == LAYER * 3 * 2
        # Five sums of each kind of 256 columns, or seven squares and seven matrices of 128 rows: what is larger.
        assert need.parts["moments and solve"] == max(
            2 * 5 * 4 * 256**2,
            7 * 4 * 256 * (256 + 128 * tokens // 80_000),
            7 * 4 * 128 * (128 + 512 * tokens // 80_000),
        )
        assert ("finished layers" in need.parts) == (rank == 0)
        assert need.fits
        assert need.total == sum(need.parts.values())
    assert found.keep
    found.check()


def test_what_an_algorithm_does_not_ask_for_is_not_counted(plan: Plan, tmp_path: Path) -> None:
    both, one = run(plan, tmp_path), run(plan, tmp_path, algorithm="awq", needed=frozenset({"moments", "mean_abs"}))
    assert both.gpus[0].parts["states"] == 2 * one.gpus[0].parts["states"]
    assert both.gpus[0].parts["layers"] == 3 / 2 * one.gpus[0].parts["layers"]
    assert one.seconds["forward"] == both.seconds["forward"] / 2
    assert one.seconds["moments"] == pytest.approx(both.seconds["moments"] / 3)
    assert run(plan, tmp_path, algorithm="other", needed=frozenset({"max_abs"})).seconds.keys() == {"forward"}
    without = run(plan, tmp_path, algorithm="rtn", needed=frozenset(), tokens=0)
    assert without.gpus[0].parts["a matrix"] == 512 * 128 * 16
    assert not without.seconds


def test_the_time_of_the_products(plan: Plan, tmp_path: Path) -> None:
    one, four = run(plan, tmp_path), run(plan, tmp_path, 4)
    assert one.seconds["forward"] == pytest.approx(2 * 4 * 80_000 * LAYER / 1e9)
    squares = 3 * 128**2 + 256**2
    assert one.seconds["moments"] == pytest.approx(2 * 3 * 80_000 * squares / 1e9)
    assert one.seconds["factors"] == pytest.approx(2 * 3 * (3 * 128**3 + 256**3) / 3 / 1e8)
    products = (256 + 128 + 512) * 128**2 + 128 * 256**2
    assert one.seconds["solve"] == pytest.approx(2 * 2 * (5.5 + 2 * SWEEPS) * products / 1e8)
    for name in ("forward", "moments", "solve"):
        assert four.seconds[name] == pytest.approx(one.seconds[name] / 4)
    assert four.seconds["factors"] == one.seconds["factors"]  # each process does all of it


def test_the_time_is_a_range_above_the_products(plan: Plan, tmp_path: Path) -> None:
    found = run(plan, tmp_path)
    assert found.time is not None
    assert found.time.least == pytest.approx(sum(found.seconds.values()))
    assert found.time.most > found.time.least
    assert found.figures()["seconds"] == found.time.least
    without = run(plan, tmp_path, algorithm="rtn", needed=frozenset(), tokens=0)
    assert without.time is None
    assert "seconds" not in without.figures()


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_recorded_runs_are_within_the_range(path: Path) -> None:
    """From the products' times that were recorded as floors of the stages, to the time of the whole run."""
    times = [record for record in json.loads(path.read_text(encoding="utf-8")) if "stage" in record["case"]]
    kinds = {"forward": "forward", "statistics": "moments", "factorization": "factors", "solve": "solve"}
    for gpus in {record["case"]["gpus"] for record in times}:
        stages = {record["case"]["stage"]: record for record in times if record["case"]["gpus"] == gpus}
        config = SHAPES[stages["all"]["case"]["shape"]]
        found = time_range(
            {kind: stages[stage]["floor"] for stage, kind in kinds.items()},
            "cuda",
            matrices=len(list(config.matrices)),
            file_bytes=2 * config.num_parameters,
        )
        assert found.least < stages["all"]["ours"] < found.most


def test_finished_layers_only_have_to_be_passed_through(plan: Plan, tmp_path: Path) -> None:
    whole, half = run(plan, tmp_path), run(plan, tmp_path, finished=[1])
    assert half.seconds["forward"] == whole.seconds["forward"]
    for name in ("moments", "factors", "solve"):
        assert half.seconds[name] == pytest.approx(whole.seconds[name] / 2)
    assert run(plan, tmp_path, finished=[0, 1]).seconds.keys() == {"forward"}


def test_finished_layers_that_are_not_passed_through_take_no_time(plan: Plan, tmp_path: Path) -> None:
    """Those before saved states, and those after the last layer that is missing."""
    whole = run(plan, tmp_path)
    half = run(plan, tmp_path, finished=[0], passed=[1], kept_bytes=plan.bytes_after // 2)
    for name in ("forward", "moments", "factors", "solve"):
        assert half.seconds[name] == pytest.approx(whole.seconds[name] / 2)
    nothing = run(plan, tmp_path, finished=[0, 1], passed=[], kept_bytes=plan.bytes_after)
    assert nothing.seconds == {}
    for less, more in ((half, whole), (nothing, half)):
        assert less.time is not None
        assert more.time is not None
        assert less.time.least < more.time.least
        assert less.time.most < more.time.most


def test_without_room_activations_are_not_kept(plan: Plan, tmp_path: Path) -> None:
    wide = run(plan, tmp_path, needed=frozenset({"moments"}))
    assert run(plan, tmp_path, needed=frozenset({"moments"}), free=[wide.gpus[0].total]).keep
    tight = run(plan, tmp_path, needed=frozenset({"moments"}), free=[wide.gpus[0].total - 1])
    assert not tight.keep
    assert tight.gpus[0].parts["activations"] == 80_000 * 128 * 2
    tight.check()


def test_a_gpu_that_is_too_small(plan: Plan, tmp_path: Path) -> None:
    found = run(plan, tmp_path, 2, free=[80 * GB, 1010 * 10**6])
    said = (
        r"cuda:1: needs about 1\.0\d GB \(states .*, activations .*\), 1\.01 GB free: "
        r"use fewer --samples or a shorter --seqlen \(\d+ % of the tokens fit\), more GPUs, or --device cpu"
    )
    with pytest.raises(DeviceError, match=said) as raised:
        found.check()
    share = int(str(raised.value).split("(")[2].split()[0]) / 100
    run(plan, tmp_path, 2, free=[80 * GB, 1010 * 10**6], tokens=int(80_000 * share)).check()
    with pytest.raises(DeviceError, match="free: use GPUs with more memory, or --device cpu"):
        run(plan, tmp_path, free=[10**6]).check()


def test_a_disk_that_is_too_small(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = plan.bytes_after + 16 * 10**6
    monkeypatch.setattr(module, "free_space", lambda path: needed - 1000)
    with pytest.raises(StorageError, match=r"needs about 16\.\d MB \(model 16\.\d MB\), 16\.\d MB free: make room or"):
        run(plan, tmp_path).check()
    run(plan, tmp_path, kept_bytes=1000).check()


def test_the_disk_is_named_by_the_full_path_of_its_directory(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "real")
    for output, place in (
        ("out", "real"),
        ("../out", ""),
        ("new/out", "real/new"),
        (tmp_path / "link" / "out", "real"),
    ):
        assert run(plan, tmp_path, output=Path(output)).disk.place == str((tmp_path / place).resolve())


def test_main_memory_is_a_warning(plan: Plan, tmp_path: Path) -> None:
    cpu = [torch.device("cpu")]
    found = run(plan, tmp_path, devices=cpu, free=[100 * 10**6])
    found.check()
    assert len(found.warnings) == 1
    assert found.warnings[0].startswith("main memory: needs about ")
    assert "100.0 MB free: it may get slow or be killed" in found.warnings[0]
    assert not found.keep
    assert run(plan, tmp_path, devices=cpu, free=[None]).warnings == ()
    twice = run(plan, tmp_path, devices=cpu * 2, free=[None, None])
    assert twice.gpus == ()
    one = run(plan, tmp_path, devices=cpu, free=[None])
    assert twice.memory.parts["states"] == one.memory.parts["states"]
    assert twice.memory.parts["layers"] == 2 * one.memory.parts["layers"]
    assert twice.seconds["forward"] == one.seconds["forward"]  # two processes share the cores


def test_more_devices_than_shares(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="9 devices: the work is cut into 8 shares: use 1 to 8 devices"):
        run(plan, tmp_path, devices=[torch.device("cpu")] * 9)


def test_json(plan: Plan, tmp_path: Path) -> None:
    found = json.loads(json.dumps(run(plan, tmp_path).to_json()))
    assert found["gpus"][0]["place"] == "cuda:0"
    assert found["gpus"][0]["parts"]["states"] == 80_000 * 128 * 4
    assert found["tokens"] == 80_000


def test_rates_are_measured(plan: Plan, tmp_path: Path) -> None:
    found = device_rates(torch.device("cpu"), torch.float16)
    assert found.keys() == {torch.float32}  # what the CPU computes in
    assert found[torch.float32] > 1e6
    own = run(plan, tmp_path, ranks=[RankDevice.of(torch.device("cpu"))], rates=found)
    assert own.memory.available is not None
    assert own.seconds["forward"] > 0


def test_several_machines(plan: Plan, tmp_path: Path) -> None:
    cpus = [RankDevice(name, "cpu", memory, memory) for name, memory in (("a", 9 * GB), ("b", 2 * GB), ("b", 2 * GB))]
    found = run(plan, tmp_path, ranks=cpus)
    assert found.memory.place == "main memory of b"  # it has less to spare
    assert found.memory.available == 2 * GB
    assert found.memory.parts["processes"] == 2 * run(plan, tmp_path, ranks=cpus[:1]).memory.parts["processes"]
    assert "finished layers" not in found.memory.parts  # these wait where they are written
    gpus = [RankDevice(name, "cuda:0", 80 * GB, 90 * GB) for name in ("a", "b")]
    assert [need.place for need in run(plan, tmp_path, ranks=gpus).gpus] == ["process 0 on a", "process 1 on b"]
    one = run(plan, tmp_path, ranks=gpus[:1] * 2)
    assert [need.place for need in one.gpus] == ["process 0 on a", "process 1 on a"]
    assert one.memory.place == "main memory"
