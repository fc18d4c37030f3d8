"""A whole model: what is written, that it computes what was meant, and what is refused before it begins."""

import json
import shutil
from collections import namedtuple

import pytest
import torch
from quantization_models import VERSE, write_model, write_texts

from warpbus.errors import (
    CheckpointError,
    DataError,
    DeviceError,
    NumericError,
    SchemeError,
    StorageError,
    TensorError,
    UsageError,
    WarpbusError,
)
from warpbus.formats import Checkpoint, CheckpointWriter, from_tensors, read_schemes
from warpbus.models import LINEARS, load_model, read_config, tensor_map
from warpbus.models.layers import QuantizedLinear
from warpbus.models.tokenizers import load_tokenizer
from warpbus.quantization import driver, quantize, rtn

TOKENS = torch.arange(2, 42).view(2, 20)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl")


def load(directory, dtype=torch.float32):
    return load_model(Checkpoint(directory), device="cpu", dtype=dtype)


def logits(directory, tokens=TOKENS):
    with torch.no_grad():
        return load(directory)(tokens)


def rewrite(source, target, change):
    """A copy of a model with `change` applied to its dictionary of tensors."""
    checkpoint = Checkpoint(source)
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}
    change(tensors)
    shutil.copytree(source, target)
    with CheckpointWriter(target, overwrite=True) as writer:
        for file in source.iterdir():
            if not file.name.startswith("model"):
                writer.copy_file(file)
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish()
    return target


@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_not_quantized_is_copied(tmp_path, texts, algorithm, dtype):
    source = write_model(tmp_path / "model", dtype=dtype)
    report = quantize(source, tmp_path / "out", algorithm=algorithm, calibration=texts, scheme="w4a16-g64")
    before, after = Checkpoint(source), Checkpoint(tmp_path / "out")
    quantized = {
        name.removesuffix(".weight")
        for parameter, names in tensor_map(read_config(before)).items()
        if parameter.endswith(tuple(f"{linear}.weight" for linear in LINEARS))
        for name in names
    }
    assert "model.layers.1.self_attn.k_proj" in quantized
    kept = [name for name in before.names() if name.removesuffix(".weight") not in quantized]
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.v_proj.bias"} <= set(kept)
    assert all(torch.equal(before.tensor(name), after.tensor(name)) for name in kept)
    assert all(after.dtype(name) == dtype for name in kept)
    assert all(after.dtype(f"{prefix}.weight_scale") == dtype for prefix in quantized)
    assert len(after.names()) == len(kept) + 3 * len(quantized)
    assert str(read_schemes(after.config)) == "w4a16-g64"
    assert after.config["quantization_config"]["ignore"] == ["lm_head"]
    assert before.config == {key: value for key, value in after.config.items() if key != "quantization_config"}
    for name in ("tokenizer.model", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert report.bytes_after == after.total_bytes
    assert report.bytes_before == before.total_bytes
    assert json.loads((tmp_path / "out" / "warpbus-report.json").read_text()) == json.loads(
        json.dumps(report.to_json())
    )


@pytest.mark.parametrize("text", ["w4a16-g64", "w3a16-g32-asym", "w8a16", "w2a16-g128"])
def test_rtn_computes_what_the_model_in_memory_does(tmp_path, model, text):
    report = quantize(model, tmp_path / "out", algorithm="rtn", scheme=text)
    expected = load(model)
    scheme = driver.Scheme.parse(text)
    for layer in expected.layers:
        for linear in LINEARS:
            module = layer.get_submodule(linear)
            weight = rtn(module.weight.data, scheme, scale_dtype=torch.float32)
            owner, _, leaf = linear.partition(".")
            setattr(layer.get_submodule(owner), leaf, QuantizedLinear(weight, module.bias))
    with torch.no_grad():
        assert torch.equal(logits(tmp_path / "out"), expected(TOKENS))
    assert [(row.layer, row.linear) for row in report.layers] == [(i, linear) for i in range(2) for linear in LINEARS]
    first = load(model).layers[0].attention.qkv.weight.data
    change = rtn(first, scheme, scale_dtype=torch.float32).dequantize() - first
    assert report.layers[0].error == pytest.approx(float(change.norm() / first.norm()), rel=1e-4)


@pytest.mark.parametrize("text", ["w4a16-g64", "w3a16-g32-asym"])
def test_gptq_computes_what_calibration_saw(tmp_path, model, texts, text, monkeypatch):
    """The last states of the calibration are, to the bit, those of the model that was written."""
    seen = {}
    original = driver.quantize_layer

    def spy(layer, index, states, solve, name):
        original(layer, index, states, solve, name)
        seen["states"] = [(state.x.clone(), state.real) for state in states]

    monkeypatch.setattr(driver, "quantize_layer", spy)
    batches = []
    embed = driver.embed
    monkeypatch.setattr(driver, "embed", lambda found, *rest: batches.extend(found) or embed(found, *rest))
    quantize(model, tmp_path / "out", calibration=texts, scheme=text)
    written = load(tmp_path / "out")
    with torch.no_grad():
        for batch, (x, real) in zip(batches, seen["states"], strict=True):
            assert torch.equal(written.final_norm(x)[real], written.hidden(batch.ids)[real])


def test_saved_and_loaded_again_nothing_changes(tmp_path, model, texts):
    quantize(model, tmp_path / "out", calibration=texts, scheme="w4a16-g64")
    loaded = load(tmp_path / "out")
    checkpoint = Checkpoint(tmp_path / "out")
    scheme = read_schemes(checkpoint.config).of("model.layers.1.mlp.down_proj")
    assert scheme is not None
    stored = from_tensors(checkpoint, "model.layers.1.mlp.down_proj", scheme)
    assert torch.equal(loaded.layers[1].mlp.down.weight.qweight, stored.qweight)
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "out"))


def test_the_same_arguments_give_the_same_files(tmp_path, model, texts):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        quantize(model, tmp_path / name, calibration=texts, scheme="w4a16-g64", samples=8, seed=seed)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert files[0] == files[1]
    assert files[0] != files[2]


def test_gptq_is_nearer_to_the_original_than_rtn(tmp_path, model, texts):
    """On text like that it was calibrated on."""
    tokens = torch.tensor([load_tokenizer(model).encode(VERSE)])
    original = logits(model, tokens)
    errors = {}
    for algorithm in ("rtn", "gptq"):
        quantize(model, tmp_path / algorithm, algorithm=algorithm, calibration=texts, scheme="w3a16-g64")
        errors[algorithm] = float((logits(tmp_path / algorithm, tokens) - original).norm())
    assert errors["gptq"] < 0.8 * errors["rtn"]


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_calibration_from_either_kind_of_file(tmp_path, model, suffix):
    path = tmp_path / f"data.{suffix}"
    path.write_text(VERSE * 20 if suffix == "txt" else json.dumps({"text": VERSE * 20}), encoding="utf-8")
    report = quantize(model, tmp_path / "out", calibration=path, scheme="w4a16-g64", samples=3, seqlen=4096)
    assert report.calibration_tokens == (3 * 64 if suffix == "txt" else 64)  # the model's context is 64 tokens


def test_a_model_of_another_family_with_fused_tensors(tmp_path, texts):
    """Llama's gate and up are tensors of their own; each gets its rows of what was quantized together."""
    source = write_model(tmp_path / "model", model_type="llama", attention_bias=False, partial_rotary_factor=1.0)
    quantize(source, tmp_path / "out", calibration=texts, scheme="w4a16-g64")
    after = Checkpoint(tmp_path / "out")
    assert after.shape("model.layers.0.mlp.gate_proj.weight_packed") == (256, 16)
    assert after.shape("model.layers.0.mlp.up_proj.weight_packed") == (256, 16)
    assert (logits(tmp_path / "out") - logits(source)).norm() < 0.5 * logits(source).norm()


def test_progress_counts_every_matrix(tmp_path, model):
    calls = []
    quantize(
        model, tmp_path / "out", algorithm="rtn", scheme="w8a16", progress=lambda *arguments: calls.append(arguments)
    )
    assert [call[0] for call in calls] == list(range(1, 9))
    assert {call[1] for call in calls} == {8}
    assert calls[-1][2] == "layers.1.mlp.down"


def test_a_tied_head_stays_tied(tmp_path):
    source = write_model(tmp_path / "model", tie_word_embeddings=True)
    quantize(source, tmp_path / "out", algorithm="rtn", scheme="w8a16-g64")
    assert "lm_head.weight" not in Checkpoint(tmp_path / "out")
    assert torch.allclose(logits(tmp_path / "out"), logits(source), atol=0.2)


def refused(kind, tmp_path, *arguments, match=None, **options):
    """The call fails with one line, and leaves nothing behind."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(kind, match=match) as caught:
        quantize(*arguments, **options)
    assert isinstance(caught.value, WarpbusError)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before
    return str(caught.value)


def test_arguments_that_are_wrong(tmp_path, model, texts):
    out = tmp_path / "out"
    refused(UsageError, tmp_path, model, out, match="--calibration")
    refused(UsageError, tmp_path, model, out, algorithm="awq", match="choose from gptq, rtn")
    refused(SchemeError, tmp_path, model, out, scheme="w5a16", match="5 bits", calibration=texts)
    refused(UsageError, tmp_path, model, out, calibration=texts, samples=0, match="samples is 0")
    refused(UsageError, tmp_path, model, out, calibration=texts, seqlen=0, match="seqlen is 0")
    refused(UsageError, tmp_path, model, out, calibration=texts, damping=-1.0, match="damping is -1")
    refused(UsageError, tmp_path, model, out, calibration=texts, damping=float("nan"), match="damping is nan")
    refused(UsageError, tmp_path, model, out, algorithm="rtn", device="tpu", match="device is 'tpu'")
    refused(UsageError, tmp_path, model, model, algorithm="rtn", match="is the model itself", scheme="w4a16-g64")
    refused(DataError, tmp_path, model, out, calibration=tmp_path / "none.txt", scheme="w4a16-g64", match=r"none\.txt")
    if not torch.cuda.is_available():
        refused(DeviceError, tmp_path, model, out, algorithm="rtn", device="cuda", match="no GPU")


def test_models_that_cannot_be_quantized(tmp_path, model):
    out = tmp_path / "out"
    refused(CheckpointError, tmp_path, tmp_path / "none", out, algorithm="rtn", match="none")
    odd = write_model(tmp_path / "odd", intermediate_size=160)
    found = refused(SchemeError, tmp_path, odd, out, algorithm="rtn", scheme="w4a16-g64")
    assert "model.layers.0.mlp.down_proj.weight: 160 columns" in found
    quantize(model, tmp_path / "done", algorithm="rtn", scheme="w8a16")
    refused(CheckpointError, tmp_path, tmp_path / "done", out, algorithm="rtn", match="quantized already")


def test_weights_that_do_not_fit_the_config(tmp_path, model):
    def lose(tensors):
        del tensors["model.layers.1.mlp.down_proj.weight"]

    def cut(tensors):
        name = "model.layers.1.self_attn.k_proj.weight"
        tensors[name] = tensors[name][:-1].contiguous()

    def round_off(tensors):
        name = "model.layers.0.self_attn.o_proj.weight"
        tensors[name] = tensors[name].to(torch.int8)

    for number, (change, message) in enumerate(
        ((lose, "down_proj.weight is missing"), (cut, "k_proj.weight"), (round_off, "expected floating point"))
    ):
        broken = rewrite(model, tmp_path / f"broken{number}", change)
        refused(TensorError, tmp_path, broken, tmp_path / "out", algorithm="rtn", scheme="w8a16", match=message)


@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_a_weight_that_is_no_number_is_named(tmp_path, model, texts, algorithm):
    def spoil(tensors):
        tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")

    broken = rewrite(model, tmp_path / "broken", spoil)
    name = r"layers\.1\.mlp\.down"
    refused(
        NumericError,
        tmp_path,
        broken,
        tmp_path / "out",
        algorithm=algorithm,
        calibration=texts,
        scheme="w8a16",
        match=name,
    )


def test_inputs_that_are_no_numbers_are_named(tmp_path, model, texts):
    def spoil(tensors):
        tensors["model.layers.1.input_layernorm.weight"][:] = float("inf")

    broken = rewrite(model, tmp_path / "broken", spoil)
    match = r"layers\.1\.attention\.qkv: NaN or infinity"
    refused(NumericError, tmp_path, broken, tmp_path / "out", calibration=texts, scheme="w8a16", match=match)


def test_an_output_that_is_there(tmp_path, model):
    quantize(model, tmp_path / "out", algorithm="rtn", scheme="w8a16")
    refused(StorageError, tmp_path, model, tmp_path / "out", algorithm="rtn", scheme="w4a16", match="not empty")
    report = quantize(model, tmp_path / "out", algorithm="rtn", scheme="w4a16", overwrite=True)
    assert str(read_schemes(Checkpoint(tmp_path / "out").config)) == report.scheme == "w4a16"


def test_a_disk_that_is_too_small(tmp_path, model, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 1000))
    refused(StorageError, tmp_path, model, tmp_path / "out", algorithm="rtn", scheme="w4a16", match="disk full")


def test_an_interrupted_run_leaves_nothing(tmp_path, model):
    def interrupt(done, total, what):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(model, tmp_path / "out", algorithm="rtn", scheme="w4a16", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_of_another_model(tmp_path, texts):
    source = write_model(tmp_path / "model", vocab_size=20)
    refused(
        CheckpointError, tmp_path, source, tmp_path / "out", calibration=texts, scheme="w8a16", match="tokenizer gives"
    )


@pytest.mark.filterwarnings("ignore")
def test_transformers_writes_the_same_text(tmp_path, texts):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    source = write_model(tmp_path / "model", pad_token_id=0, bos_token_id=None)
    quantize(source, tmp_path / "out", calibration=texts, scheme="w4a16-g128")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours = load(tmp_path / "out")
    prompt = torch.tensor([[5, 90, 33, 120, 7]])
    with torch.no_grad():
        expected = theirs.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        ids = prompt
        for _ in range(24):
            ids = torch.cat([ids, ours(ids)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(ids, expected)
    assert len(set(ids[0].tolist())) > 4
