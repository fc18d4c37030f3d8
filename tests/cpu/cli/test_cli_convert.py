"""`warpbus convert` as a person uses it."""

import json
import subprocess
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

from warpbus.cli.convert import convert
from warpbus.engine import LLM, SamplingParams
from warpbus.errors import CheckpointError
from warpbus.formats import Checkpoint, CheckpointWriter, format_named, read_schemes
from warpbus.formats.companions import find_companions
from warpbus.models import read_config, tensor_map
from warpbus.qtensor import QTensor, Scheme

LINEARS = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")

app = typer.Typer()
app.command()(convert)
RUN = "from warpbus.cli import main; main()"
SCHEME = Scheme(4, 32)


@pytest.fixture(scope="module")
def model(make_model, tmp_path_factory):
    """A quantized model in compressed-tensors, with its tokenizer."""
    plain = Checkpoint(make_model(tmp_path_factory.mktemp("convert") / "plain", intermediate_size=160))
    names = tensor_map(read_config(plain))
    linears = {
        name for key in names for name in names[key] if key.endswith(tuple(f"{each}.weight" for each in LINEARS))
    }
    format = format_named("compressed-tensors")
    with CheckpointWriter(plain.directory.with_name("quantized")) as writer:
        for name in plain.names():
            tensor = plain.tensor(name)
            if name not in linears:
                writer.add(name, tensor)
                continue
            grouped = tensor.unflatten(1, (-1, 32))
            scales = (grouped.abs().amax(-1) / 7).half()
            codes = ((grouped / scales[..., None]).round() + 8).clamp(0, 15).flatten(1).to(torch.uint8)
            matrix = QTensor.from_codes(SCHEME, codes, scales)
            for part, stored in format.to_tensors(name.removesuffix(".weight"), matrix).items():
                writer.add(part, stored)
        described = format.quantization_config(SCHEME, ["lm_head"])
        writer.write_json("config.json", plain.config | {"quantization_config": described})
        for name, file in find_companions(plain.directory).items():
            writer.copy_file(file, name)
        return writer.finish()


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_converts_and_says_what_was_done(model, tmp_path):
    found = invoke(model, tmp_path / "out", "--to", "gptq")
    assert found.exit_code == 0
    assert "w4a16-g32 from compressed-tensors to gptq" in found.stdout
    assert "read back bit for bit" in found.stdout
    assert "FFN" not in found.stdout
    assert "converting" in found.stderr
    assert "reading back" in found.stderr
    assert read_schemes(Checkpoint(tmp_path / "out").config).of("model.layers.0.mlp.down_proj") == SCHEME


@pytest.mark.parametrize("to", ["gptq", "gptq-v2", "awq"])
def test_the_result_says_the_same(model, tmp_path, to):
    assert invoke(model, tmp_path / "out", "--to", to).exit_code == 0
    answers = [
        LLM(path, device="cpu").generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=12))[0].token_ids
        for path in (model, tmp_path / "out")
    ]
    assert len(answers[0]) > 3
    assert answers[0] == answers[1]


def test_json(model, tmp_path):
    found = invoke(model, tmp_path / "out", "--to", "awq", "--pad-ffn", "auto", "--json")
    report = json.loads(found.stdout)
    assert (report["source"], report["target"], report["ffn"]) == ("compressed-tensors", "awq", [160, 256])
    assert report["schemes"] == "w4a16-g32"
    assert report["scales_rounded"] == 0
    assert Checkpoint(tmp_path / "out").config["intermediate_size"] == 256


def test_mistakes_are_one_line_and_an_exit_code(model, tmp_path):
    command = [sys.executable, "-c", RUN, "convert", str(model), str(tmp_path / "out"), "--to", "ggml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: --to ggml: expected one of compressed-tensors, gptq" in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(CheckpointError, match="there is no such directory"):
        invoke(tmp_path / "none", tmp_path / "out", "--to", "awq")
    assert not (tmp_path / "out").exists()


def test_an_output_is_replaced_only_when_asked(model, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(OSError, match="exists and is not empty"):
        invoke(model, tmp_path / "out", "--to", "awq")
    assert invoke(model, tmp_path / "out", "--to", "awq", "--overwrite").exit_code == 0
    assert Checkpoint(tmp_path / "out").config["quantization_config"]["quant_method"] == "awq"
