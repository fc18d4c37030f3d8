"""Models of trellises: quantized by GPTQ, resumed, by two processes, loaded, converted, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from quantization_models import MOE, logits, write_model
from torch import Tensor
from typer.testing import CliRunner

import warpbus
from warpbus.cli import app
from warpbus.errors import CheckpointError, SchemeError, TensorError, UsageError, WarpbusError
from warpbus.formats import Checkpoint, CheckpointWriter, format_of
from warpbus.formats.dequantizing import dequantized, dequantized_matrices
from warpbus.models import load_model
from warpbus.models.convert import convert
from warpbus.qtensor import Scheme
from warpbus.quantization import Progress
from warpbus.quantization.algorithms.gptq import gptq
from warpbus.quantization.algorithms.rtn import rtn

SCHEMES = ("w2a16-trellis", "w3a16-trellis")


@pytest.fixture(scope="module")
def model(make_model, tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("trellis") / "model")


@pytest.fixture(scope="module")
def quantized(model, verses, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("trellis") / "quantized"
    made(model, output, verses)
    return output


@pytest.fixture(scope="module")
def expert_model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("trellis") / "experts", **MOE, use_qk_norm=True)


def made(model: Path, output: Path, verses: Path, **others: object) -> None:
    options = {"scheme": "w3a16-trellis", "format": "warpbus", "calibration": str(verses), "device": "cpu"}
    warpbus.quantize(str(model), str(output), **(options | others))


def weights(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.suffix == ".safetensors"}


def problem(rows: int = 32, columns: int = 128) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    mixing = torch.randn(columns, columns, generator=generator) * 0.3 + torch.eye(columns)
    inputs = torch.randn(400, columns, generator=generator) @ mixing
    return weight, inputs.T @ inputs


@pytest.mark.parametrize("name", SCHEMES)
def test_the_error_is_far_below_that_of_codes_of_as_many_bits(name):
    weight, hessian = problem()
    losses = []
    for scheme in (Scheme.parse(name), Scheme(int(name[1]), 128)):
        change = gptq(weight, hessian, scheme, scale_dtype=torch.bfloat16).dequantize(torch.float32) - weight
        losses.append(float((change @ hessian * change).sum()))
    assert losses[0] < 0.75 * losses[1]


def test_bands_of_rows_do_not_depend_on_each_other():
    weight, hessian = problem()
    scheme = Scheme.parse("w3a16-trellis")
    whole = gptq(weight, hessian, scheme, scale_dtype=torch.bfloat16)
    band = gptq(weight[16:], hessian, scheme, scale_dtype=torch.bfloat16)
    assert torch.equal(whole.rows(16, 32).dequantize(), band.dequantize())


def test_rows_of_zeros_stay_zeros():
    weight, hessian = problem()
    weight[:17] = 0
    found = gptq(weight, hessian, Scheme.parse("w2a16-trellis"), scale_dtype=torch.bfloat16).dequantize(torch.float32)
    assert not found[:17].any()
    assert float((found[17:] - weight[17:]).norm() / weight.norm()) < 0.4


def test_a_model_is_quantized_loaded_and_converted(model, quantized, tmp_path):
    report = json.loads((quantized / "warpbus-report.json").read_text())
    assert 0 < max(layer["error"] for layer in report["layers"]) < 0.3
    checkpoint = Checkpoint(quantized)
    assert checkpoint.config["quantization_config"]["schemes"]["default"] == "w3a16-trellis"
    assert format_of(checkpoint.config) is None
    assert len(dequantized_matrices(checkpoint)) == 12
    done = convert(quantized, tmp_path / "plain", to="bfloat16")
    assert (done.source, done.matrices) == ("trellis", 12)
    before, after = Checkpoint(model), Checkpoint(tmp_path / "plain")
    assert after.names() == before.names()
    for name in after.names():
        original = before.tensor(name).float()
        assert (after.tensor(name).float() - original).norm() <= 0.25 * original.norm(), name
    read = dequantized(checkpoint, torch.float32)
    with CheckpointWriter(tmp_path / "wide") as writer:
        writer.write_json("config.json", read.config)
        for name in read.names():
            writer.add(name, read.tensor(name))
        writer.finish()
    assert torch.equal(logits(quantized), logits(tmp_path / "wide"))
    with pytest.raises(UsageError, match="in TRELLIS, have no such form"):
        convert(quantized, tmp_path / "new", to="gptq")


def test_rows_by_head_and_experts(request, expert_model, verses, tmp_path):
    """ChatGLM-6B stores its rows by head, and experts are solved several at once."""
    for number, model in enumerate((request.getfixturevalue("tiny_chatglm"), expert_model)):
        output = tmp_path / str(number)
        made(model, output, verses, samples=4)
        before, after = Checkpoint(model), dequantized(Checkpoint(output), torch.float32)
        assert after.names() == before.names()
        for name in after.names():
            original = before.tensor(name).float()
            assert (after.tensor(name).float() - original).norm() <= 0.25 * original.norm(), name


def test_two_processes_and_a_resumed_run_write_the_same_bytes(model, verses, quantized, tmp_path):
    made(model, tmp_path / "two", verses, processes=2)
    assert weights(tmp_path / "two") == weights(quantized)

    class StoppedError(Exception):
        pass

    def stop(done, total, result) -> None:
        if result.layer == 1:
            raise StoppedError

    with pytest.raises(StoppedError):
        made(model, tmp_path / "again", verses, progress=Progress(matrix=stop))
    assert any((tmp_path / "again.quantization").iterdir())
    made(model, tmp_path / "again", verses)
    assert weights(tmp_path / "again") == weights(quantized)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "rtn"}, "rtn cannot quantize to w3a16-trellis: choose from gptq"),
        ({"algorithm": "awq"}, "awq cannot quantize to w3a16-trellis: choose from gptq"),
        ({"format": "compressed-tensors"}, "w3a16-trellis has a format of its own: use --format warpbus"),
        ({"scheme": "w3a16-g128"}, "holds w3a16-trellis and w2a16-trellis only, not w3a16"),
        ({"format": "gptq"}, "GPTQ format has no w3a16-trellis"),
        ({"head": "w8a16"}, "format warpbus holds no quantized head"),
    ],
)
def test_what_does_not_go_together_is_refused(model, verses, tmp_path, arguments, message):
    with pytest.raises(WarpbusError, match=message):
        made(model, tmp_path / "q", verses, **arguments)
    assert not list(tmp_path.iterdir())


def test_rows_that_are_no_tiles_are_refused_before_the_work(make_model, verses, tmp_path):
    model = make_model(tmp_path / "odd", intermediate_size=72)
    with pytest.raises(SchemeError, match=r"cannot be cut into tiles .*: use w3a16 or w2a16"):
        made(model, tmp_path / "q", verses)
    with pytest.raises(SchemeError, match="not found by rounding"):
        rtn(torch.ones(16, 32), Scheme.parse("w3a16-trellis"), scale_dtype=torch.bfloat16)


def test_the_command(model, verses, tmp_path):
    arguments = ["--scheme", "w2a16-trellis", "--format", "warpbus", "--calibration", str(verses), "--device", "cpu"]
    run = CliRunner().invoke(app, ["quantize", str(model), str(tmp_path / "q"), *arguments])
    assert run.exit_code == 0, run.output
    assert "w2a16-trellis" in run.output


def test_it_is_not_among_what_is_recommended(model, verses):
    arguments = ["--scheme", "w3a16-trellis", "--format", "warpbus", "--calibration", str(verses), "--device", "cpu"]
    run = CliRunner().invoke(app, ["quantize", str(model), *arguments, "--recommend"])
    assert isinstance(run.exception, UsageError)
    assert "nothing to compare: use --algorithm gptq" in str(run.exception)


def test_damaged_files_are_refused(quantized, tmp_path):
    checkpoint = Checkpoint(quantized)

    def changed(**section: object) -> Checkpoint:
        own = checkpoint.config["quantization_config"] | section
        tensors = {name: checkpoint.stored(name) for name in checkpoint.names()}
        return Checkpoint.of_tensors(quantized, tensors, checkpoint.config | {"quantization_config": own})

    for section, message in (
        ({"version": 1}, "version is 1, expected 2: the numbers of a trellis have changed; quantize the original"),
        ({"version": 3}, "version is 3, expected 2"),
        ({"schemes": None}, "expected an object with default and exceptions"),
        ({"schemes": {"default": "w4a16", "exceptions": {}}}, "expected w3a16-trellis or w2a16-trellis"),
        ({"schemes": {"default": None, "exceptions": {}}}, "none for"),
    ):
        with pytest.raises(CheckpointError, match=message):
            dequantized(changed(**section))
    other = changed(schemes={"default": "w2a16-trellis", "exceptions": {}})
    with pytest.raises(TensorError, match="words a row are not those of w2a16-trellis"):
        load_model(other, device="cpu", dtype=torch.float32)
