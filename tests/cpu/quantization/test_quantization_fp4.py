"""Models in NVFP4 and MXFP4: quantized by rtn and GPTQ, resumed, loaded, converted, and read by transformers."""

from pathlib import Path

import pytest
import torch
from quantization_models import logits
from typer.testing import CliRunner

import warpbus
from warpbus.cli import app
from warpbus.errors import UsageError
from warpbus.formats import Checkpoint, CheckpointWriter
from warpbus.formats.dequantizing import dequantized
from warpbus.models.convert import convert
from warpbus.qtensor import Scheme
from warpbus.quantization.algorithms.gptq import gptq
from warpbus.quantization.algorithms.rtn import rtn

SCHEMES = ("w4a16-nvfp4", "w4a16-mxfp4")


@pytest.fixture(scope="module")
def model(make_model, tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("fp4") / "model")


@pytest.mark.parametrize("name", SCHEMES)
def test_gptq_loses_less_than_rounding(name):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 128, generator=generator) * 0.05
    mixing = torch.randn(128, 128, generator=generator) * 0.3 + torch.eye(128)
    inputs = torch.randn(400, 128, generator=generator) @ mixing
    hessian, scheme = inputs.T @ inputs, Scheme.parse(name)
    losses = []
    for found in (
        gptq(weight, hessian, scheme, scale_dtype=torch.bfloat16),
        rtn(weight, scheme, scale_dtype=torch.bfloat16, importance=hessian.diagonal()),
    ):
        change = found.dequantize() - weight
        losses.append(float((change @ hessian * change).sum()))
    assert losses[0] < 0.8 * losses[1]


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_do_not_depend_on_each_other(name):
    generator = torch.Generator().manual_seed(0)
    weight, inputs = (torch.randn(rows, 64, generator=generator) for rows in (20, 90))
    hessian, scheme = inputs.T @ inputs, Scheme.parse(name)
    whole = gptq(weight, hessian, scheme, scale_dtype=torch.bfloat16)
    half = gptq(weight[:10], hessian, scheme, scale_dtype=torch.bfloat16)
    assert torch.equal(whole.rows(0, 10).dequantize(), half.dequantize())


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_a_model_is_quantized_loaded_and_converted(model, verses, tmp_path, name, algorithm):
    calibration = {} if algorithm == "rtn" else {"calibration": str(verses)}
    report = warpbus.quantize(
        str(model), str(tmp_path / "q"), scheme=name, algorithm=algorithm, device="cpu", **calibration
    )
    assert 0 < max(layer.error for layer in report.layers) < 0.3
    checkpoint = Checkpoint(tmp_path / "q")
    assert checkpoint.config["quantization_config"]["format"] == f"{name[6:]}-pack-quantized"
    done = convert(tmp_path / "q", tmp_path / "plain", to="bfloat16")
    assert (done.source, done.matrices) == (name[6:], 12)
    before, after = Checkpoint(model), Checkpoint(tmp_path / "plain")
    assert after.names() == before.names()
    for each in after.names():
        original = before.tensor(each).float()
        assert (after.tensor(each).float() - original).norm() <= 0.2 * original.norm(), each
    read = dequantized(checkpoint, torch.float32)
    with CheckpointWriter(tmp_path / "wide") as writer:
        writer.write_json("config.json", read.config)
        for each in read.names():
            writer.add(each, read.tensor(each))
        writer.finish()
    assert torch.equal(logits(tmp_path / "q"), logits(tmp_path / "wide"))
    with pytest.raises(UsageError, match=f"in {name[6:].upper()}, have no such form"):
        convert(tmp_path / "q", tmp_path / "new", to="gptq")


def test_modelopt_and_compressed_tensors_hold_the_same_numbers(model, tmp_path):
    for form in ("modelopt", "compressed-tensors"):
        arguments = ["--scheme", "w4a16-nvfp4", "--algorithm", "rtn", "--format", form, "--device", "cpu"]
        run = CliRunner().invoke(app, ["quantize", str(model), str(tmp_path / form), *arguments])
        assert run.exit_code == 0, run.output
    one, other = (dequantized(Checkpoint(tmp_path / form)) for form in ("modelopt", "compressed-tensors"))
    assert one.names() == other.names()
    for name in one.names():
        assert torch.equal(one.tensor(name), other.tensor(name)), name


@pytest.mark.parametrize("name", SCHEMES)
def test_transformers_reads_the_same_weights(model, tmp_path, name):
    transformers = pytest.importorskip("transformers")
    warpbus.quantize(str(model), str(tmp_path / "q"), scheme=name, algorithm="rtn", device="cpu")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    with torch.no_grad():
        loaded(torch.arange(9)[None])
    checkpoint = dequantized(Checkpoint(tmp_path / "q"), torch.bfloat16)
    compared = 0
    for module_name, module in loaded.named_modules():
        if module_name.endswith("proj"):
            assert torch.equal(module.weight.bfloat16(), checkpoint.tensor(f"{module_name}.weight")), module_name
            compared += 1
    assert compared == 12
