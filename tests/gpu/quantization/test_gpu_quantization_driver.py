"""Whole models quantized on one GPU: the same bits twice, and as good as on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from warpbus.demo import data_path, model_path
from warpbus.evaluation import evaluate
from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.models.random_checkpoint import write_random_checkpoint
from warpbus.models.shapes import SHAPES
from warpbus.quantization import Calibration, Progress, Report, quantize

LINEARS = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

REPORT = "warpbus-report.json"
RUNS = [
    ("gptq", "w4a16-g128"),
    ("gptq", "w3a16-g128"),
    ("gptq", "w4a16-g32-asym"),
    ("awq", "w4a16-g128"),
    ("awq", "w3a16-g128-asym"),
    ("smoothquant", "w8a8-int8"),
    ("smoothquant", "w8a8-fp8"),
]
CALIBRATION = {"samples": 64, "seqlen": 256}


def poet(output: Path, algorithm: str, scheme: str, **options: Any) -> Report:
    """glm-poet, calibrated on a part of its validation data."""
    data = data_path("validation.jsonl")
    settings = {"device": "cuda:0", "calibration": data, **CALIBRATION}
    return quantize(model_path(), output, algorithm=algorithm, scheme=scheme, **{**settings, **options})


def files(directory: Path) -> dict[str, bytes]:
    """All files but the report, which has timings."""
    found = {file.name: file.read_bytes() for file in directory.iterdir() if file.name != REPORT}
    assert any(name.endswith(".safetensors") for name in found)
    return found


def divergence(directory: Path) -> float:
    """From the original, in float32, so that only the weights differ. Perplexity would be too noisy."""
    return evaluate(
        [("original", model_path()), ("poet", directory)],
        data=data_path("validation.jsonl"),
        limit=200,
        speed=False,
        device=torch.device("cuda:0"),
        dtype=torch.float32,
    )[1].divergence


@pytest.mark.parametrize(("algorithm", "scheme"), RUNS)
def test_twice_gives_the_same_bytes(tmp_path: Path, algorithm: str, scheme: str) -> None:
    reports = [poet(tmp_path / name, algorithm, scheme) for name in ("a", "b")]
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert [row.error for row in reports[0].layers] == [row.error for row in reports[1].layers]
    report = reports[0]
    assert report.device == "cuda:0"
    assert report.devices == (torch.cuda.get_device_name(0),)
    assert report.peak_gpu_memory is not None
    assert 0 < report.peak_gpu_memory <= report.estimate["gpu_memory"]
    assert report.gpu_seconds == pytest.approx(report.seconds)
    assert all(0 < row.error < 1 for row in report.layers)


@pytest.mark.parametrize(
    ("algorithm", "scheme"), [("gptq", "w4a16-g128"), ("gptq", "w3a16-g128"), ("awq", "w3a16-g128")]
)
def test_as_good_as_on_the_cpu_and_better_than_rounding(tmp_path: Path, algorithm: str, scheme: str) -> None:
    """On a GPU activations have 16 bits and products fewer: other codes, as good."""
    for device in ("cuda:0", "cpu"):
        poet(tmp_path / device, algorithm, scheme, device=device)
    poet(tmp_path / "rtn", "rtn", scheme)
    lost = {name: divergence(tmp_path / name) for name in ("cuda:0", "cpu", "rtn")}
    assert lost["cuda:0"] < 0.9 * lost["rtn"]
    assert lost["cuda:0"] == pytest.approx(lost["cpu"], rel=0.1)


def test_rounding_to_nearest_is_the_cpus(tmp_path: Path) -> None:
    for scheme in ("w4a16-g128", "w3a16-g32-asym", "w8a8-int8", "w8a8-fp8"):
        found = {}
        for device in ("cpu", "cuda:0"):
            output = tmp_path / f"{scheme}-{device}"
            poet(output, "rtn", scheme, device=device)
            loaded = load_model(Checkpoint(output), device="cpu", dtype=torch.float32)
            layers = [layer.get_submodule(linear).weight for layer in loaded.layers for linear in LINEARS]
            found[device] = [weight.dequantize(torch.float32) for weight in layers]
        for one, other in zip(found["cpu"], found["cuda:0"], strict=True):
            assert torch.equal(one, other)


class _Stopped(KeyboardInterrupt):
    """In place of Ctrl-C."""


@pytest.mark.parametrize(("algorithm", "scheme"), [RUNS[1], RUNS[4], RUNS[6]])
def test_an_interrupted_run_goes_on(tmp_path: Path, algorithm: str, scheme: str) -> None:
    poet(tmp_path / "whole", algorithm, scheme)

    def stop(done: int, total: int, result: object) -> None:
        if done > total // 2:
            raise _Stopped

    with pytest.raises(_Stopped):
        poet(tmp_path / "out", algorithm, scheme, progress=Progress(matrix=stop))
    assert not (tmp_path / "out").exists()
    report = poet(tmp_path / "out", algorithm, scheme)
    assert report.resumed_layers > 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("algorithm", "scheme", "format"),
    [
        ("gptq", "w4a16-g128", "gptq"),
        ("gptq", "w3a16", "compressed-tensors"),
        ("awq", "w4a16-g128-asym", "awq"),
        ("smoothquant", "w8a8-fp8", "compressed-tensors"),
    ],
)
def test_a_layer_of_chatglm(tmp_path: Path, dtype: torch.dtype, algorithm: str, scheme: str, format: str) -> None:
    """The shapes of ChatGLM2-6B, with random weights: columns that do not divide into the kernels' blocks."""
    write_random_checkpoint(tmp_path / "model", "chatglm2-6b", dtype, layers=1, device="cuda:0")
    generator, size = torch.Generator().manual_seed(0), SHAPES["chatglm2-6b"].vocab_size
    tokens = torch.randint(size, (24, 512), generator=generator)
    report = quantize(
        tmp_path / "model",
        tmp_path / "out",
        algorithm=algorithm,
        scheme=scheme,
        format=format,
        calibration=Calibration(tuple(map(tuple, tokens.tolist()))),
        device="cuda:0",
    )
    assert len(report.layers) == len(LINEARS)
    assert all(0 < row.error < 0.4 for row in report.layers)
    assert report.peak_gpu_memory is not None
    assert report.peak_gpu_memory <= report.estimate["gpu_memory"]
    loaded = load_model(Checkpoint(tmp_path / "out"), device="cuda:0", dtype=dtype)
    with torch.no_grad():
        assert torch.isfinite(loaded(tokens[:1, :32].cuda())).all()
