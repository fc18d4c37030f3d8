"""A quantized embedding: written, loaded by our loader and by compressed-tensors, resumed, reported, converted."""

import json
from pathlib import Path

import pytest
import torch
from quantization_models import logits
from typer.testing import CliRunner

import warpbus
from warpbus.cli import app
from warpbus.errors import CheckpointError, SchemeError, UsageError
from warpbus.evaluation.model_card import model_card
from warpbus.formats import Checkpoint, CheckpointWriter, read_schemes
from warpbus.formats.gguf.view import directory_of
from warpbus.formats.hub import ModelName
from warpbus.models import load_model
from warpbus.models.convert import convert
from warpbus.models.layers import QuantizedEmbedding, QuantizedLinear
from warpbus.qtensor import Scheme
from warpbus.quantization.report import Report

W8 = "w8a16-g32"


@pytest.fixture(scope="module")
def model(make_model, tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("embedding") / "model", tie_word_embeddings=False, num_attention_heads=4)


@pytest.fixture(scope="module")
def tied(make_model, tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("embedding") / "tied", tie_word_embeddings=True, num_attention_heads=4)


def quantized(model: Path, output: Path, embedding: str | None, scheme: str = "w4a16-g32", **options) -> Report:
    return warpbus.quantize(model, output, scheme=scheme, algorithm="rtn", device="cpu", embedding=embedding, **options)


def loaded(directory: Path, **options):
    return load_model(Checkpoint(directory), device="cpu", dtype=torch.float32, **options)


def with_tensors(source: Path, output: Path, changed: dict[str, torch.Tensor], config: dict | None = None) -> Path:
    """A copy of a checkpoint with other tensors and another config.json."""
    checkpoint = Checkpoint(source)
    with CheckpointWriter(output) as writer:
        for file in source.iterdir():
            if file.suffix != ".safetensors" and file.name != "config.json":
                writer.copy_file(file)
        writer.write_json("config.json", config or checkpoint.config)
        for name, tensor in ({name: checkpoint.tensor(name) for name in checkpoint.names()} | changed).items():
            writer.add(name, tensor)
        writer.finish()
    return output


@pytest.mark.parametrize("embedding", [W8, "w8a16", "w8a16-g32-asym"])
@pytest.mark.parametrize("head", [None, "w8a16-g32"])
def test_an_embedding_in_the_file_is_the_one_that_is_rounded_at_load(model, embedding, head, tmp_path):
    quantized(model, tmp_path / "plain", None, head=head)
    report = quantized(model, tmp_path / "out", embedding, head=head)
    assert report.embedding is not None
    assert (report.embedding.scheme, report.embedding.tied, report.head is None) == (embedding, False, head is None)
    assert isinstance(loaded(tmp_path / "out").embedding, QuantizedEmbedding)
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "plain", embedding=Scheme.parse(embedding)))
    assert not torch.equal(logits(tmp_path / "out"), logits(tmp_path / "plain"))


def test_a_tied_head_is_the_same_matrix(tied, tmp_path):
    quantized(tied, tmp_path / "plain", None)
    report = quantized(tied, tmp_path / "out", W8)
    assert report.embedding.tied
    checkpoint = Checkpoint(tmp_path / "out")
    assert not any("lm_head" in name for name in checkpoint.names())
    assert checkpoint.config.get("tie_word_embeddings", True)
    for ours in (loaded(tmp_path / "out"), loaded(tmp_path / "plain", embedding=Scheme.parse(W8))):
        assert isinstance(ours.head, QuantizedLinear)
        assert torch.equal(ours.head.weight.qweight, ours.embedding.weight.qweight)
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "plain", embedding=Scheme.parse(W8)))
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "out", head=Scheme.parse("w8a16")))
    assert report.bytes_after < quantized(tied, tmp_path / "head", None, head=W8).bytes_after


def test_a_tied_model_with_both_gets_two_matrices(tied, tmp_path):
    report = quantized(tied, tmp_path / "out", W8, head=W8)
    assert report.head.untied
    assert not report.embedding.tied
    checkpoint = Checkpoint(tmp_path / "out")
    assert checkpoint.config["tie_word_embeddings"] is False
    packed = checkpoint.tensor("model.embed_tokens.weight_packed")
    assert torch.equal(packed, checkpoint.tensor("lm_head.weight_packed"))
    assert "model.embed_tokens.weight" not in checkpoint
    quantized(tied, tmp_path / "shared", W8)
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "shared"))


def test_a_head_that_is_stored_beside_its_tied_embedding_is_left_out(tied, tmp_path):
    embedding = Checkpoint(tied).tensor("model.embed_tokens.weight")
    both = with_tensors(tied, tmp_path / "both", {"lm_head.weight": embedding.clone()})
    assert torch.equal(logits(both, embedding=Scheme.parse(W8)), logits(tied, embedding=Scheme.parse(W8)))
    quantized(both, tmp_path / "out", W8)
    assert "lm_head.weight" not in Checkpoint(tmp_path / "out")
    quantized(tied, tmp_path / "tied", W8)
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "tied"))
    differing = with_tensors(tmp_path / "out", tmp_path / "differing", {"lm_head.weight": embedding * 2})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: differs from the embedding"):
        loaded(differing)


@pytest.mark.parametrize(("scheme", "groups"), [("w4a16-g32", 2), (W8, 1)])
def test_config_json_names_the_embedding_by_its_class(model, scheme, groups, tmp_path):
    """As vLLM looks for it, which does not know the name of every family's embedding."""
    quantized(model, tmp_path / "out", W8, scheme)
    config = Checkpoint(tmp_path / "out").config
    found = config["quantization_config"]["config_groups"].values()
    assert sorted(target for group in found for target in group["targets"]) == ["Embedding", "Linear"]
    assert len(found) == groups
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    schemes = read_schemes(config)
    assert schemes.of("model.embed_tokens") == schemes.of("transformer.word_embeddings") == Scheme.parse(W8)
    assert schemes.of("model.layers.0.mlp.down_proj") == Scheme.parse(scheme)


@pytest.mark.parametrize("target", ["model.embed_tokens", "re:.*embed_tokens"])
def test_an_embedding_may_be_named_otherwise(model, target, tmp_path):
    quantized(model, tmp_path / "out", W8)
    config = Checkpoint(tmp_path / "out").config
    for group in config["quantization_config"]["config_groups"].values():
        group["targets"] = [target if name == "Embedding" else name for name in group["targets"]]
    other = with_tensors(tmp_path / "out", tmp_path / "other", {}, config)
    assert torch.equal(logits(other), logits(tmp_path / "out"))


@pytest.mark.parametrize("embedding", [W8, "w8a16"])
def test_compressed_tensors_decompresses_the_same_numbers(model, embedding, tmp_path):
    compressed_tensors = pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    quantized(model, tmp_path / "out", embedding, head=W8)
    checkpoint = Checkpoint(tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    described = config.quantization_config
    del config.quantization_config
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    described = compressed_tensors.quantization.QuantizationConfig.model_validate(described)
    compressor = compressed_tensors.ModelCompressor(quantization_config=described)
    compressed_tensors.quantization.apply_quantization_config(theirs, described)
    compressor.compress_model(theirs)
    missing, unexpected = theirs.load_state_dict(
        {name: checkpoint.tensor(name) for name in checkpoint.names()}, strict=False
    )
    assert not unexpected
    assert not missing
    compressor.decompress_model(theirs)
    ours = loaded(tmp_path / "out").embedding.weight.dequantize(torch.float32)
    torch.testing.assert_close(ours, theirs.get_input_embeddings().weight.detach().float(), rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(
            logits(tmp_path / "out"), theirs(torch.arange(40)[None]).logits, rtol=1e-4, atol=1e-4
        )


def test_transformers_loads_one_scheme_for_all_dequantized(model, tmp_path):
    """It dequantizes all matrices by the first group, and cannot hold a compressed embedding (transformers 5.24)."""
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    quantized(model, tmp_path / "out", W8, W8, head=W8)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        dtype=torch.float32,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    )
    with torch.no_grad():
        torch.testing.assert_close(
            logits(tmp_path / "out"), theirs(torch.arange(40)[None]).logits, rtol=1e-4, atol=1e-4
        )


def test_report_card_and_command_name_the_embedding(tied, tmp_path):
    arguments = ["--algorithm", "rtn", "--embedding", W8, "--device", "cpu"]
    ran = CliRunner().invoke(app, ["quantize", str(tied), str(tmp_path / "out"), *arguments])
    assert ran.exit_code == 0, ran.output
    assert f"embedding {W8}: relative error of the weights 0." in ran.output
    assert "the head is the same matrix" in ran.output
    report = json.loads((tmp_path / "out" / "warpbus-report.json").read_text())
    assert Report.from_json(report).embedding.scheme == W8
    assert 0 < report["embedding"]["error"] < 0.02
    written = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert abs(report["estimate"]["disk"] - 16 * 10**6 - written) < 100_000
    card = model_card(tmp_path / "out", ModelName("huggingface", "someone/tied", None))
    assert f"| embedding | {W8} |" in card
    assert "cannot load it, because the embedding is quantized, and the head is the same matrix" in card
    assert "vllm serve" not in card
    assert "from_pretrained" not in card


def test_a_card_says_who_loads_an_embedding_of_its_own(model, tmp_path):
    quantized(model, tmp_path / "out", W8, head=W8)
    card = model_card(tmp_path / "out", ModelName("huggingface", "someone/model", None))
    assert "The embedding is quantized: vLLM before 0.26 cannot load it." in card
    assert "from_pretrained" not in card
    quantized(model, tmp_path / "same", W8, W8, head=W8)
    assert "CompressedTensorsConfig(dequantize=True)" in model_card(
        tmp_path / "same", ModelName("huggingface", "someone/model", None)
    )


def test_a_card_names_transformers_only_if_all_matrices_are_dequantized_alike(model, tmp_path):
    name = ModelName("huggingface", "someone/model", None)
    quantized(model, tmp_path / "alike", None, "w4a16-g32-asym")
    assert "CompressedTensorsConfig(dequantize=True)" in model_card(tmp_path / "alike", name)
    quantized(model, tmp_path / "mixed", None, "w4a16-g32-asym", head=W8)
    assert "from_pretrained" not in model_card(tmp_path / "mixed", name)


def test_a_finished_embedding_is_resumed_and_another_scheme_is_noticed(model, tmp_path, monkeypatch):
    quantized(model, tmp_path / "whole", W8)

    def stop(self, *arguments) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("warpbus.formats.resumable_checkpoint.ResumableCheckpoint.finish", stop)
        with pytest.raises(KeyboardInterrupt):
            quantized(model, tmp_path / "out", W8)
    kept = tmp_path / "out.quantization" / "embedding.safetensors"
    written = kept.stat().st_mtime_ns
    for other in ("w8a16", None):
        with pytest.raises(UsageError, match="embedding"):
            quantized(model, tmp_path / "out", other)
    assert kept.stat().st_mtime_ns == written
    quantized(model, tmp_path / "out", W8)
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()


@pytest.mark.parametrize("source", ["model", "tied"])
def test_conversion_keeps_or_dequantizes_the_embedding(source, tmp_path, request):
    quantized(request.getfixturevalue(source), tmp_path / "out", W8)
    embedding = loaded(tmp_path / "out").embedding.weight
    convert(tmp_path / "out", tmp_path / "float", to="float16")
    written = Checkpoint(tmp_path / "float").tensor("model.embed_tokens.weight")
    torch.testing.assert_close(written, embedding.dequantize(torch.float16), rtol=2e-3, atol=1e-4)
    assert loaded(tmp_path / "float").embedding.weight.dtype == torch.float32
    convert(tmp_path / "out", tmp_path / "file.gguf", to="gguf")
    from_gguf = loaded(directory_of(tmp_path / "file.gguf"))
    assert torch.equal(from_gguf.embedding.weight.codes(), embedding.codes())
    torch.testing.assert_close(  # scales of the layers were rounded to float16
        logits(directory_of(tmp_path / "file.gguf")), logits(tmp_path / "out"), rtol=5e-2, atol=5e-2
    )
    with pytest.raises(UsageError, match="its embedding is quantized, which --to gptq has no place for"):
        convert(tmp_path / "out", tmp_path / "gptq", to="gptq")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"embedding": "w8a8-int8"}, SchemeError, "embedding w8a8-int8: expected codes and activations in 16 bits"),
        ({"embedding": "w4a16-g32"}, SchemeError, "embedding w4a16-g32: expected 8 bits"),
        ({"embedding": W8, "format": "gptq"}, UsageError, "format gptq holds no quantized embedding"),
        ({"embedding": W8, "format": "awq"}, UsageError, "format awq holds no quantized embedding"),
        ({"embedding": W8, "scheme": "w4a16-mxfp4"}, UsageError, "--embedding w8a16-g32: layers in FP4 or trellis"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(model, options, error, says, tmp_path):
    with pytest.raises(error, match=says):
        quantized(model, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_recommendation_takes_no_embedding(model):
    ran = CliRunner().invoke(app, ["quantize", str(model), "--recommend", "--embedding", "w8a16"])
    assert isinstance(ran.exception, UsageError)
    assert "--embedding has no part in --recommend" in str(ran.exception)
