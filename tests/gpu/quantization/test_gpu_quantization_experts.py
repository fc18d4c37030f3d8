"""Mixtures of experts quantized on one GPU: the same bits twice, as good as on the CPU; layers of the real sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from warpbus.demo import calibration_path, data_path
from warpbus.evaluation import evaluate
from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.models.random_checkpoint import write_random_checkpoint
from warpbus.models.shapes import SHAPES
from warpbus.quantization import Calibration, Progress, Report, quantize
from warpbus.quantization.report import LEAST_TOKENS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

REPORT = "warpbus-report.json"
RUNS = [("gptq", "w4a16-g64"), ("gptq", "w3a16-g32-asym"), ("awq", "w4a16-g64"), ("smoothquant", "w8a8-int8")]


def poet(model: Path, output: Path, algorithm: str, scheme: str, **options: Any) -> Report:
    """The small mixture of experts, calibrated on 10 conversations: some of its experts get few tokens."""
    settings = {"device": "cuda:0", "calibration": calibration_path(), "samples": 10}
    return quantize(model, output, algorithm=algorithm, scheme=scheme, **{**settings, **options})


def files(directory: Path) -> dict[str, bytes]:
    """All files but the report, which has timings."""
    found = {file.name: file.read_bytes() for file in directory.iterdir() if file.name != REPORT}
    assert any(name.endswith(".safetensors") for name in found)
    return found


@pytest.mark.parametrize(("algorithm", "scheme"), RUNS)
def test_twice_gives_the_same_bytes(poet_moe: Path, tmp_path: Path, algorithm: str, scheme: str) -> None:
    reports = [poet(poet_moe, tmp_path / name, algorithm, scheme) for name in ("a", "b")]
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert [row.error for row in reports[0].layers] == [row.error for row in reports[1].layers]
    assert reports[0].peak_gpu_memory is not None
    assert 0 < reports[0].peak_gpu_memory <= reports[0].estimate["gpu_memory"]
    assert all(0 < row.error < 1 for row in reports[0].layers)
    tokens = [row.routed_tokens for row in reports[0].layers if row.routed_tokens is not None]
    assert min(tokens) < LEAST_TOKENS < max(tokens)


@pytest.mark.parametrize(("algorithm", "scheme"), RUNS)
def test_as_good_as_on_the_cpu(poet_moe: Path, tmp_path: Path, algorithm: str, scheme: str) -> None:
    """On a GPU activations have 16 bits and products fewer: other codes, as good."""
    for device in ("cuda:0", "cpu"):
        poet(poet_moe, tmp_path / device, algorithm, scheme, device=device)
    poet(poet_moe, tmp_path / "rtn", "rtn", scheme)
    names = ("cuda:0", "cpu", "rtn")
    found = evaluate(
        [("original", poet_moe), *((name, tmp_path / name) for name in names)],
        data=data_path("validation.jsonl"),
        limit=200,
        speed=False,
        device=torch.device("cuda:0"),
        dtype=torch.float32,
    )
    lost = dict(zip(names, (each.divergence for each in found[1:]), strict=True))
    assert lost["cuda:0"] < 1.15 * lost["cpu"]
    assert lost["cuda:0"] < lost["rtn"] * (0.8 if algorithm == "gptq" else 1.1)


class _Stopped(KeyboardInterrupt):
    """In place of Ctrl-C."""


def test_an_interrupted_run_goes_on(poet_moe: Path, tmp_path: Path) -> None:
    algorithm, scheme = RUNS[0]
    poet(poet_moe, tmp_path / "whole", algorithm, scheme)

    def stop(done: int, total: int, result: object) -> None:
        if done > total // 2:
            raise _Stopped

    with pytest.raises(_Stopped):
        poet(poet_moe, tmp_path / "out", algorithm, scheme, progress=Progress(matrix=stop))
    assert not (tmp_path / "out").exists()
    report = poet(poet_moe, tmp_path / "out", algorithm, scheme)
    assert report.resumed_layers > 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
@pytest.mark.parametrize("shape", ["glm-4.7-flash", "glm-4.5-air", "qwen3-30b-a3b"])
def test_layers_of_the_real_size(tmp_path: Path, shape: str, algorithm: str) -> None:
    """A dense layer, if the model has one, and a mixture of experts, with random weights."""
    layers = 1 if shape.startswith("qwen") else 2
    write_random_checkpoint(tmp_path / "model", shape, torch.bfloat16, layers=layers, device="cuda:0")
    tokens = torch.randint(SHAPES[shape].vocab_size, (32, 1024), generator=torch.Generator().manual_seed(0))
    torch.cuda.empty_cache()
    report = quantize(
        tmp_path / "model",
        tmp_path / "out",
        algorithm=algorithm,
        scheme="w4a16-g128",
        calibration=Calibration(tuple(map(tuple, tokens.tolist()))),
        device="cuda:0",
    )
    assert all(0 < row.error < 0.4 for row in report.layers)
    assert report.peak_gpu_memory is not None
    assert report.peak_gpu_memory <= report.estimate["gpu_memory"]
    loaded = load_model(Checkpoint(tmp_path / "out"), device="cuda:0", dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.isfinite(loaded(tokens[:1, :32].cuda())).all()
