"""However many processes do it, and however often they are interrupted: the files are the same, byte for byte."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch
from quantization_models import write_model
from quantization_threads import together

from warpbus.dist import Patience
from warpbus.errors import DeviceError, NumericError, UsageError
from warpbus.formats import Checkpoint, CheckpointWriter, FinishedParts
from warpbus.quantization import Calibration, Progress, Report, driver, job, quantize

REPORT = "warpbus-report.json"
SCHEMES = {"gptq": "w3a16-g32-asym", "awq": "w4a16-g32", "smoothquant": "w8a8-int8"}
# Batches that do not divide into the shares of any number of processes.
SEQUENCES = Calibration(tuple(tuple((7 * i + 3 * j) % 400 for j in range(5 + i % 9)) for i in range(37)))
_SECONDS = 60.0


class Threads:
    """`Processes` whose members are threads of this one."""

    def __init__(
        self,
        function: Any,
        *,
        devices: Sequence[torch.device],
        receive: Any,
        environment: Mapping[str, str],
        exit_early: bool,
        patience: Patience,
    ) -> None:
        del environment, exit_early, patience
        self._function, self._world, self._receive = function, len(devices), receive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def run(self, *arguments: object) -> None:
        together(self._world, lambda group: self._function(group, self._receive, *arguments))


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(job.BATCH_TOKENS, "cpu", 32)


def write(directory: Path, layers: int) -> Path:
    """16-bit weights, as published models have them."""
    return write_model(
        directory,
        dtype=torch.bfloat16,
        num_hidden_layers=layers,
        hidden_size=64,
        head_dim=16,
        intermediate_size=96,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("source") / "tiny", 2)


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("source") / "longer", 3)


def run(model: Path, output: Path, algorithm: str, **options: Any) -> Report:
    settings = {"algorithm": algorithm, "scheme": SCHEMES.get(algorithm, "w4a16-g32"), "device": "cpu", "damping": 0.02}
    return quantize(model, output, **{"calibration": SEQUENCES, **settings, **options})


def files(directory: Path) -> dict[str, bytes]:
    """All files but the report, which has timings."""
    found = {file.name: file.read_bytes() for file in directory.iterdir() if file.name != REPORT}
    assert any(name.endswith(".safetensors") for name in found)
    return found


def errors(report: Report) -> dict[str, float]:
    return {row.name: row.error for row in report.layers}


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, bytes], Report]]:
    """What one process gives without interruption, by algorithm."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(job.BATCH_TOKENS, "cpu", 32)
        directory = tmp_path_factory.mktemp("whole")
        reports = {algorithm: run(model, directory / algorithm, algorithm) for algorithm in SCHEMES}
    return {algorithm: (files(directory / algorithm), report) for algorithm, report in reports.items()}


@pytest.mark.parametrize(
    ("algorithm", "world"), [("gptq", 2), ("gptq", 3), ("gptq", 8), ("awq", 3), ("smoothquant", 2), ("smoothquant", 5)]
)
def test_any_number_of_members(
    tmp_path: Path, model: Path, whole: Any, monkeypatch: pytest.MonkeyPatch, algorithm: str, world: int
) -> None:
    """As threads, which takes no time to start."""
    monkeypatch.setattr(driver, "Processes", Threads)
    report = run(model, tmp_path / "out", algorithm, processes=world)
    expected, alone = whole[algorithm]
    assert files(tmp_path / "out") == expected
    assert errors(report) == errors(alone)
    assert report.devices == ("cpu",) * world
    assert report.resumed_layers == 0


@pytest.mark.parametrize(("algorithm", "processes"), [("gptq", 3), ("awq", 2), ("smoothquant", 2)])
def test_processes(tmp_path: Path, model: Path, whole: Any, algorithm: str, processes: int) -> None:
    """As they are: each with its own Python. The small batches of this test do not reach them: shares do."""
    reported: list[Any] = []
    progress = Progress(begun=reported.append, matrix=lambda done, total, result: reported.append((done, total)))
    report = run(model, tmp_path / "out", algorithm, processes=processes, progress=progress)
    alone = tmp_path / "alone"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(job.BATCH_TOKENS, "cpu", 2048)
        expected = run(model, alone, algorithm)
    assert files(tmp_path / "out") == files(alone)
    # Their sums over elements depend on the number of threads, which is another one there.
    assert errors(report) == pytest.approx(errors(expected), rel=1e-6)
    assert report.devices == ("cpu",) * processes
    assert (reported[0].found, reported[0].layers) == ("nothing", 0)
    assert reported[1:] == [(done, 8) for done in range(1, 9)]


def interrupted(model: Path, output: Path, algorithm: str, *, finished: int = 1, **options: Any) -> None:
    """Begin a run, and press Ctrl-C once so many layers are finished and on the disk."""
    part = f"layer-{finished - 1:05}"

    def matrix(done: int, total: int, result: Any) -> None:
        end = time.monotonic() + _SECONDS
        while done > 4 * finished:
            if FinishedParts(output).facts(part) is not None:
                raise KeyboardInterrupt
            assert time.monotonic() < end
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        run(model, output, algorithm, progress=Progress(matrix=matrix), **options)
    assert not output.exists()
    assert FinishedParts(output).facts(part) is not None


@pytest.mark.parametrize("algorithm", SCHEMES)
def test_a_run_that_was_interrupted_goes_on(tmp_path: Path, model: Path, whole: Any, algorithm: str) -> None:
    interrupted(model, tmp_path / "out", algorithm)
    reported: list[Any] = []
    progress = Progress(begun=reported.append, matrix=lambda *arguments: reported.append(arguments))
    report = run(model, tmp_path / "out", algorithm, progress=progress)
    expected, alone = whole[algorithm]
    assert files(tmp_path / "out") == expected
    assert errors(report) == errors(alone)
    assert report.resumed_layers == 1
    assert (reported[0].found, reported[0].layers) == ("finished parts", report.resumed_layers)
    assert [call[:2] for call in reported[1:]] == [(done, 8) for done in range(1, 9)]
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert left == ["out"]


@pytest.mark.parametrize("algorithm", ["gptq", "smoothquant"])
def test_what_several_members_began_fewer_finish(
    tmp_path: Path, model: Path, whole: Any, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    interrupted(model, tmp_path / "out", algorithm)
    monkeypatch.setattr(driver, "Processes", Threads)
    report = run(model, tmp_path / "out", algorithm, processes=3)
    assert report.resumed_layers >= 1
    assert files(tmp_path / "out") == whole[algorithm][0]


def test_what_two_processes_began_one_finishes(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(job.BATCH_TOKENS, "cpu", 2048)
    interrupted(model, tmp_path / "out", "gptq", processes=2)
    report = run(model, tmp_path / "out", "gptq")
    assert report.resumed_layers >= 1
    run(model, tmp_path / "alone", "gptq")
    assert files(tmp_path / "out") == files(tmp_path / "alone")


@pytest.mark.parametrize(
    "change", [{"damping": 0.03}, {"scheme": "w4a16-g32"}, {"format": "gptq-v2"}, {"algorithm": "rtn"}, {"shorter": 1}]
)
def test_what_another_run_left_is_removed_only_by_a_restart(
    tmp_path: Path, model: Path, whole: Any, change: dict[str, Any]
) -> None:
    options = {"algorithm": "gptq", **change}
    if options.pop("shorter", 0):
        options["calibration"] = Calibration(SEQUENCES.sequences[:-1])
    interrupted(model, tmp_path / "out", **options)
    kept = FinishedParts(tmp_path / "out").parts()
    with pytest.raises(UsageError, match="finished parts of a run that differs: "):
        run(model, tmp_path / "out", "gptq")
    assert FinishedParts(tmp_path / "out").parts() == kept
    reported: list[Any] = []
    report = run(model, tmp_path / "out", "gptq", restart=True, progress=Progress(begun=reported.append))
    assert [(begun.found, begun.layers) for begun in reported] == [("removed parts", 0)]
    assert report.resumed_layers == 0
    assert files(tmp_path / "out") == whole["gptq"][0]


def test_rounding_to_nearest_goes_on(tmp_path: Path, longer: Path) -> None:
    report = run(longer, tmp_path / "whole", "rtn")
    interrupted(longer, tmp_path / "out", "rtn", finished=2)
    again = run(longer, tmp_path / "out", "rtn")
    assert again.resumed_layers == 2
    assert errors(again) == errors(report)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_damaged_layer_is_done_again(tmp_path: Path, longer: Path) -> None:
    """And those after it are not: they were calibrated on what it is going to be again."""
    run(longer, tmp_path / "whole", "gptq")
    interrupted(longer, tmp_path / "out", "gptq", finished=2)
    file = tmp_path / "out.quantization" / "layer-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    report = run(longer, tmp_path / "out", "gptq")
    assert report.resumed_layers == 1
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_an_error_in_another_process_is_this_ones(tmp_path: Path, model: Path) -> None:
    """With its class and message; what is finished is kept."""
    checkpoint = Checkpoint(model)
    with CheckpointWriter(tmp_path / "broken") as writer:
        for file in model.iterdir():
            if not file.name.startswith("model"):
                writer.copy_file(file)
        for name in checkpoint.names():
            tensor = checkpoint.tensor(name).clone()
            if name == "model.layers.1.mlp.down_proj.weight":
                tensor[-1, 0] = float("inf")
            writer.add(name, tensor)
        writer.finish()
    with pytest.raises(NumericError, match=r"^layers\.1\.mlp\.down: NaN or infinity") as raised:
        run(tmp_path / "broken", tmp_path / "out", "gptq", processes=2)
    assert not isinstance(raised.value, DeviceError)
    assert not (tmp_path / "out").exists()
    assert "layer-00000" in FinishedParts(tmp_path / "out").parts()
