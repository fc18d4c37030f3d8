"""A quantized head: written, loaded by our loader and by transformers, resumed, reported, converted, refused."""

import json
from pathlib import Path

import pytest
import torch
from quantization_models import logits
from typer.testing import CliRunner

import warpbus
from warpbus.cli import app
from warpbus.errors import NumericError, SchemeError, UsageError
from warpbus.formats import Checkpoint, CheckpointWriter, read_schemes
from warpbus.formats.gguf.view import directory_of
from warpbus.models import load_model
from warpbus.models.convert import convert
from warpbus.models.layers import QuantizedLinear
from warpbus.qtensor import Scheme
from warpbus.quantization.report import Report


@pytest.fixture(scope="module")
def model(make_model, tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("head") / "model", tie_word_embeddings=False, num_attention_heads=4)


@pytest.fixture(scope="module")
def tied(make_model, tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("head") / "tied", tie_word_embeddings=True)


def quantized(model: Path, output: Path, head: str | None, scheme: str = "w4a16-g32", **options) -> Report:
    return warpbus.quantize(model, output, scheme=scheme, algorithm="rtn", device="cpu", head=head, **options)


def head_group(directory: Path) -> dict:
    groups = Checkpoint(directory).config["quantization_config"]["config_groups"].values()
    (group,) = [group for group in groups if "lm_head" in group["targets"]]
    return group


@pytest.mark.parametrize("source", ["model", "tied"])
@pytest.mark.parametrize("head", ["w8a16-g32", "w4a16-g32-asym", "w8a16"])
def test_a_head_in_the_file_is_the_one_that_is_rounded_at_load(source, head, tmp_path, request):
    original = request.getfixturevalue(source)
    quantized(original, tmp_path / "plain", None)
    report = quantized(original, tmp_path / "head", head)
    assert report.head is not None
    assert report.head.untied == (source == "tied")
    assert torch.equal(logits(tmp_path / "head"), logits(tmp_path / "plain", head=Scheme.parse(head)))
    assert not torch.equal(logits(tmp_path / "head"), logits(tmp_path / "plain"))


@pytest.mark.parametrize("head", ["w8a16-g32", "w4a16-g32", "w8a16"])
def test_transformers_has_the_same_head_and_the_same_logits(tied, head, tmp_path):
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    quantized(tied, tmp_path / "out", head)
    loaded, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(40)[None]
    with torch.no_grad():
        theirs = loaded(ids).logits
    ours = load_model(Checkpoint(tmp_path / "out"), device="cpu", dtype=torch.float32)
    assert isinstance(ours.head, QuantizedLinear)
    torch.testing.assert_close(
        ours.head.weight.dequantize(torch.float32), loaded.lm_head.weight.detach(), rtol=0, atol=0
    )
    assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)
    torch.testing.assert_close(logits(tmp_path / "out"), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("scheme", "head"), [("w4a16-g32", "w8a16-g32"), ("w4a16-g32", "w4a16-g32"), ("w8a8-int8", "w8a16-g32")]
)
def test_the_head_is_named_in_config_json_and_the_layers_are_not(model, scheme, head, tmp_path):
    quantized(model, tmp_path / "out", head, scheme)
    config = Checkpoint(tmp_path / "out").config
    assert config["quantization_config"]["ignore"] == []
    assert head_group(tmp_path / "out")["weights"]["num_bits"] == Scheme.parse(head).bits
    targets = [name for group in config["quantization_config"]["config_groups"].values() for name in group["targets"]]
    assert sorted(targets) == ["Linear", "lm_head"]
    found = read_schemes(config)
    assert found.of("lm_head") == Scheme.parse(head)
    assert found.of("model.layers.0.mlp.down_proj") == Scheme.parse(scheme)
    assert logits(tmp_path / "out").isfinite().all()


def test_a_tied_model_gets_a_head_besides_its_embedding(tied, tmp_path):
    quantized(tied, tmp_path / "out", "w8a16-g32")
    checkpoint, original = Checkpoint(tmp_path / "out"), Checkpoint(tied)
    assert checkpoint.config["tie_word_embeddings"] is False
    assert torch.equal(checkpoint.tensor("model.embed_tokens.weight"), original.tensor("model.embed_tokens.weight"))
    assert checkpoint.shape("lm_head.weight_shape") == (2,)


def test_report_and_command_name_the_head(tied, tmp_path):
    ran = CliRunner().invoke(
        app,
        ["quantize", str(tied), str(tmp_path / "out"), "--algorithm", "rtn", "--head", "w8a16-g32", "--device", "cpu"],
    )
    assert ran.exit_code == 0, ran.output
    assert "head w8a16-g32: relative error of the weights 0." in ran.output
    assert "the embedding was the head before" in ran.output
    report = json.loads((tmp_path / "out" / "warpbus-report.json").read_text())
    assert Report.from_json(report).head.scheme == "w8a16-g32"
    assert 0 < report["head"]["error"] < 0.02
    written = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert abs(report["estimate"]["disk"] - 16 * 10**6 - written) < 100_000


def test_a_finished_head_is_resumed_and_another_scheme_is_noticed(model, tmp_path, monkeypatch):
    quantized(model, tmp_path / "whole", "w8a16-g32")
    commits = []

    def stop(self, *arguments) -> None:
        commits.append(arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("warpbus.formats.resumable_checkpoint.ResumableCheckpoint.finish", stop)
        with pytest.raises(KeyboardInterrupt):
            quantized(model, tmp_path / "out", "w8a16-g32")
    kept = tmp_path / "out.quantization" / "head.safetensors"
    written = kept.stat().st_mtime_ns
    with pytest.raises(UsageError, match="head"):
        quantized(model, tmp_path / "out", "w4a16-g32")
    assert kept.stat().st_mtime_ns == written
    quantized(model, tmp_path / "out", "w8a16-g32")
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()


def test_conversion_keeps_or_dequantizes_the_head(model, tmp_path):
    quantized(model, tmp_path / "out", "w8a16-g32")
    head = load_model(Checkpoint(tmp_path / "out"), device="cpu", dtype=torch.float32).head.weight
    convert(tmp_path / "out", tmp_path / "float", to="float16")
    written = Checkpoint(tmp_path / "float").tensor("lm_head.weight")
    torch.testing.assert_close(written, head.dequantize(torch.float16), rtol=2e-3, atol=1e-4)
    convert(tmp_path / "out", tmp_path / "file.gguf", to="gguf")
    from_gguf = load_model(Checkpoint(directory_of(tmp_path / "file.gguf")), device="cpu", dtype=torch.float32)
    assert torch.equal(from_gguf.head.weight.codes(), head.codes())


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"head": "w8a8-int8"}, SchemeError, "head w8a8-int8: expected codes and activations in 16 bits"),
        ({"head": "w4a16-nvfp4"}, SchemeError, "head w4a16-nvfp4"),
        ({"head": "w8a16-g32", "format": "gptq"}, UsageError, "format gptq holds no quantized head"),
        ({"head": "w8a16-g32", "scheme": "w4a16-mxfp4"}, UsageError, "layers in FP4 or trellis codes exclude it"),
        ({"head": "w9"}, SchemeError, "w9"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(model, options, error, says, tmp_path):
    with pytest.raises(error, match=says):
        quantized(model, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_recommendation_takes_no_head(model):
    ran = CliRunner().invoke(app, ["quantize", str(model), "--recommend", "--head", "w8a16"])
    assert isinstance(ran.exception, UsageError)
    assert "--head has no part in --recommend" in str(ran.exception)


def test_a_head_with_nan_is_refused_before_the_layers(model, tmp_path):
    damaged = tmp_path / "damaged"
    with CheckpointWriter(damaged) as writer:
        for file in model.iterdir():
            if file.suffix != ".safetensors":
                writer.copy_file(file)
        checkpoint = Checkpoint(model)
        for name in checkpoint.names():
            tensor = checkpoint.tensor(name).clone()
            if name == "lm_head.weight":
                tensor[3, 5] = torch.nan
            writer.add(name, tensor)
        writer.finish()
    with pytest.raises(NumericError, match=r"lm_head.weight: NaN or infinity"):
        quantized(damaged, tmp_path / "out", "w8a16-g32")
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name and path.is_dir()] == []
