"""`--effort high` on one GPU: lower KL, the same bytes twice and after an interruption, close to the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from warpbus.demo import calibration_path, model_path
from warpbus.models.random_checkpoint import write_random_checkpoint
from warpbus.quantization import Calibration, Progress, QuantizationEstimate, Report, quantize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

REPORT = "warpbus-report.json"


def poet(output: Path, **options: Any) -> Report:
    """glm-poet at 2 bits with high effort."""
    settings = {"device": "cuda:0", "calibration": calibration_path(), "samples": 64, "scheme": "w2a16-g64"}
    return quantize(model_path(), output, effort="high", **settings | options)


def files(directory: Path) -> dict[str, bytes]:
    """All files but the report, which has timings."""
    found = {file.name: file.read_bytes() for file in directory.iterdir() if file.name != REPORT}
    assert any(name.endswith(".safetensors") for name in found)
    return found


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report, QuantizationEstimate]:
    output, found = tmp_path_factory.mktemp("tuned") / "out", []
    report = poet(output, progress=Progress(estimated=found.append))
    return output, report, found[0]


def test_the_divergence_falls(tuned: tuple[Path, Report, QuantizationEstimate]) -> None:
    _, report, _ = tuned
    assert report.tuning is not None
    assert report.tuning.after < report.tuning.before
    assert report.tuning.epoch > 0


def test_twice_gives_the_same_bytes(tuned: tuple[Path, Report, QuantizationEstimate], tmp_path: Path) -> None:
    poet(tmp_path / "out")
    assert files(tmp_path / "out") == files(tuned[0])


def test_an_interrupted_tuning_goes_on(tuned: tuple[Path, Report, QuantizationEstimate], tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == total - 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        poet(tmp_path / "out", progress=Progress(tuning=stop))
    poet(tmp_path / "out")
    assert files(tmp_path / "out") == files(tuned[0])


def test_as_on_the_cpu(tuned: tuple[Path, Report, QuantizationEstimate], tmp_path: Path) -> None:
    """Other codes are chosen where sums differ in the last bits, so only the divergences are close."""
    report, other = poet(tmp_path / "out", device="cpu"), tuned[1]
    assert report.tuning is not None
    assert other.tuning is not None
    assert other.tuning.before == pytest.approx(report.tuning.before, rel=0.03)
    assert other.tuning.after == pytest.approx(report.tuning.after, rel=0.03)


def test_the_estimate_includes_tuning(tuned: tuple[Path, Report, QuantizationEstimate]) -> None:
    _, report, needs = tuned
    assert needs.seconds["tuning"] > 0
    assert needs.time is not None
    assert needs.gpus[0].total >= (report.peak_gpu_memory or 0)


@pytest.mark.parametrize(("name", "layers"), [("glm-4-9b", 1), ("glm-4.7-flash", 2)])
def test_layers_of_the_real_size(name: str, layers: int, tmp_path: Path) -> None:
    """Dense, and with experts and latent attention; peak memory stays within the estimate."""
    model, output, found = tmp_path / "model", tmp_path / "out", []
    write_random_checkpoint(model, name, torch.bfloat16, layers=layers, device="cuda:0")
    generator = torch.Generator().manual_seed(3)
    lengths = [512, 700, 2048, 300]
    data = Calibration(tuple(tuple(torch.randint(1000, (each,), generator=generator).tolist()) for each in lengths))
    progress = Progress(estimated=found.append)
    report = quantize(
        model, output, scheme="w2a16-g64", effort="high", device="cuda:0", calibration=data, progress=progress
    )
    assert report.tuning is not None
    assert report.tuning.after <= report.tuning.before
    assert found[0].gpus[0].total >= (report.peak_gpu_memory or 0)
