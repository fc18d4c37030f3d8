"""Whole models quantized on several GPUs: what one gives, byte for byte, also after one of the processes was killed."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from warpbus.demo import calibration_path, data_path, model_path
from warpbus.errors import DeviceError
from warpbus.formats import FinishedParts
from warpbus.models.random_checkpoint import write_random_checkpoint
from warpbus.models.shapes import SHAPES
from warpbus.quantization import Calibration, Progress, Report, quantize

pytestmark = pytest.mark.multigpu

REPORT = "warpbus-report.json"
SCHEMES = {"gptq": "w3a16-g128", "awq": "w4a16-g128-asym", "smoothquant": "w8a8-fp8"}
_SECONDS = 120.0


def needs(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")


def poet(output: Path, algorithm: str, gpus: str | int, **options: Any) -> Report:
    """glm-poet, calibrated on a part of its validation data."""
    return quantize(
        model_path(),
        output,
        algorithm=algorithm,
        scheme=SCHEMES[algorithm],
        calibration=data_path("validation.jsonl"),
        samples=64,
        seqlen=256,
        device="cuda",
        gpus=gpus,
        **options,
    )


def files(directory: Path) -> dict[str, bytes]:
    """All files but the report, which has timings."""
    found = {file.name: file.read_bytes() for file in directory.iterdir() if file.name != REPORT}
    assert any(name.endswith(".safetensors") for name in found)
    return found


def errors(report: Report) -> list[tuple[str, float]]:
    return [(row.name, row.error) for row in report.layers]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, bytes], Report]]:
    """What one GPU gives, by algorithm."""
    needs(2)
    directory = tmp_path_factory.mktemp("alone")
    reports = {algorithm: poet(directory / algorithm, algorithm, 1) for algorithm in SCHEMES}
    return {algorithm: (files(directory / algorithm), report) for algorithm, report in reports.items()}


@pytest.mark.parametrize("algorithm", SCHEMES)
@pytest.mark.parametrize("gpus", [2, "1,0", 3, 4, 8])
def test_the_files_are_those_of_one_gpu(tmp_path: Path, alone: Any, algorithm: str, gpus: str | int) -> None:
    count = gpus if isinstance(gpus, int) else 2
    needs(count)
    report = poet(tmp_path / "out", algorithm, gpus)
    expected, single = alone[algorithm]
    assert files(tmp_path / "out") == expected
    assert errors(report) == errors(single)
    assert len(report.devices) == count
    assert report.gpu_seconds == pytest.approx(count * report.seconds)
    assert psutil.Process().children() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_of_chatglm(tmp_path: Path, dtype: torch.dtype) -> None:
    """The shapes of ChatGLM2-6B: many tokens, panels, and blocks of columns."""
    needs(2)
    write_random_checkpoint(tmp_path / "model", "chatglm2-6b", dtype, layers=2, device="cuda:0")
    size = SHAPES["chatglm2-6b"].vocab_size
    tokens = torch.randint(size, (48, 1024), generator=torch.Generator().manual_seed(0))
    counts = [count for count in (1, 2, 4) if count <= torch.cuda.device_count()]
    for count in counts:
        quantize(
            tmp_path / "model",
            tmp_path / str(count),
            scheme="w4a16-g128",
            calibration=Calibration(tuple(map(tuple, tokens.tolist()))),
            device="cuda",
            gpus=count,
        )
    for count in counts[1:]:
        assert files(tmp_path / str(count)) == files(tmp_path / "1")


@pytest.mark.parametrize("algorithm", SCHEMES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_costs_nothing_that_was_finished(
    tmp_path: Path, alone: Any, algorithm: str, rank: int
) -> None:
    """The run ends, with what happened; as many GPUs or one go on from there to the same files."""

    def kill(done: int, total: int, result: object) -> None:
        end = time.monotonic() + _SECONDS
        while done == total // 2 and FinishedParts(tmp_path / "out").facts("layer-00000") is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        if done == total // 2:
            children = sorted(psutil.Process().children(), key=lambda child: child.create_time())
            assert len(children) == 2
            os.kill(children[rank].pid, signal.SIGKILL)

    with pytest.raises(DeviceError, match=rf"^process {rank} on cuda:{rank} was killed by signal 9") as raised:
        poet(tmp_path / "out", algorithm, 2, progress=Progress(matrix=kill))
    assert "\n" not in str(raised.value)
    assert psutil.Process().children() == []
    assert not (tmp_path / "out").exists()
    report = poet(tmp_path / "out", algorithm, 1 + rank)
    assert report.resumed_layers > 0
    assert files(tmp_path / "out") == alone[algorithm][0]


@pytest.mark.parametrize("algorithm", SCHEMES)
def test_a_mixture_of_experts(tmp_path: Path, poet_moe: Path, algorithm: str) -> None:
    """Experts with many tokens and with few; one GPU and two."""
    needs(2)
    for count in (1, 2):
        quantize(
            poet_moe,
            tmp_path / str(count),
            algorithm=algorithm,
            scheme="w8a8-int8" if algorithm == "smoothquant" else "w4a16-g64",
            calibration=calibration_path(),
            samples=32,
            device="cuda",
            gpus=count,
        )
    assert files(tmp_path / "1") == files(tmp_path / "2")


def test_experts_of_the_real_size(tmp_path: Path) -> None:
    """A dense layer of GLM-4.7-Flash and one with experts: one GPU and two."""
    needs(2)
    write_random_checkpoint(tmp_path / "model", "glm-4.7-flash", torch.bfloat16, layers=2, device="cuda:0")
    size = SHAPES["glm-4.7-flash"].vocab_size
    tokens = torch.randint(size, (32, 1024), generator=torch.Generator().manual_seed(0))
    for count in (1, 2):
        quantize(
            tmp_path / "model",
            tmp_path / str(count),
            scheme="w4a16-g128",
            calibration=Calibration(tuple(map(tuple, tokens.tolist()))),
            device="cuda",
            gpus=count,
        )
    assert files(tmp_path / "1") == files(tmp_path / "2")
