"""A whole model: what is written, and that it computes what was meant."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantization_models import VERSE, rewrite, stop_after_layer, write_model
from torch import Tensor

from warpbus.errors import NumericError
from warpbus.formats import Checkpoint, FinishedParts, format_named, from_tensors, read_schemes
from warpbus.models import load_model, read_config, tensor_map
from warpbus.models.layers import QuantizedLinear
from warpbus.models.tokenizers import load_tokenizer
from warpbus.qtensor import QTensor, Scheme, Schemes
from warpbus.quantization import Calibration, Progress, QuantizationEstimate, job, quantize
from warpbus.quantization.algorithms import rtn
from warpbus.quantization.saved_states import saved_layer
from warpbus.quantization.states import States

LINEARS = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")

TOKENS = torch.arange(2, 42).view(2, 20)
SEQUENCES = Calibration(tuple(tuple((7 * i + 3 * j) % 400 for j in range(5 + i % 9)) for i in range(30)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With one layer: awq tries many scales."""
    return write_model(tmp_path_factory.mktemp("source") / "single", num_hidden_layers=1)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(Checkpoint(directory), device="cpu", dtype=dtype)


def logits(directory: Path, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        found: Tensor = load(directory)(tokens)
    return found


def matrices(directory: Path) -> dict[str, QTensor]:
    """The quantized matrices as they are loaded, whatever the format."""
    loaded = load(directory)
    return {
        f"{index}.{linear}": layer.get_submodule(linear).weight
        for index, layer in enumerate(loaded.layers)
        for linear in LINEARS
    }


@pytest.mark.parametrize(
    ("algorithm", "scheme"), [("rtn", "w4a16-g64"), ("gptq", "w4a16-g64"), ("awq", "w4a16-g64"), ("rtn", "w8a8-int8")]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_not_quantized_is_copied(tmp_path: Path, algorithm: str, scheme: str, dtype: torch.dtype) -> None:
    source = write_model(tmp_path / "model", dtype=dtype, num_hidden_layers=1)
    report = quantize(source, tmp_path / "out", algorithm=algorithm, calibration=SEQUENCES, scheme=scheme)
    before, after = Checkpoint(source), Checkpoint(tmp_path / "out")
    quantized = {
        name.removesuffix(".weight")
        for parameter, names in tensor_map(read_config(before)).items()
        if parameter.endswith(tuple(f"{linear}.weight" for linear in LINEARS))
        for name in names
    }
    assert "model.layers.0.self_attn.k_proj" in quantized
    kept = [name for name in before.names() if name.removesuffix(".weight") not in quantized]
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.v_proj.bias"} <= set(kept)
    changed = [name for name in kept if not torch.equal(before.tensor(name), after.tensor(name))]
    folded = ("layernorm.weight", "v_proj.bias")
    assert all(name.endswith(folded) and "layers." in name for name in changed)
    assert bool(changed) == (algorithm == "awq")
    assert all(after.dtype(name) == dtype for name in kept)
    assert all(after.dtype(f"{prefix}.weight_scale") == dtype for prefix in quantized)
    parts = 2 if scheme.startswith("w8a8") else 3  # packed codes come with their shape
    assert len(after.names()) == len(kept) + parts * len(quantized)
    assert str(read_schemes(after.config)) == scheme
    assert after.config["quantization_config"]["ignore"] == ["lm_head"]
    assert before.config == {key: value for key, value in after.config.items() if key != "quantization_config"}
    for name in ("tokenizer.model", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert report.bytes_after == after.total_bytes
    assert report.bytes_before == before.total_bytes
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["model", "out"]


def test_the_report_is_beside_the_model(tmp_path: Path, model: Path, texts: Path) -> None:
    report = quantize(model, tmp_path / "out", calibration=texts, scheme="w4a16-g64", samples=5, seed=3, damping=0.02)
    written = json.loads((tmp_path / "out" / "warpbus-report.json").read_text())
    assert written == json.loads(json.dumps(report.to_json()))
    assert written["settings"] == {
        "calibration": str(texts),
        "samples": 5,
        "seqlen": 2048,
        "seed": 3,
        "damping": 0.02,
    }
    assert (report.scheme, report.algorithm, report.resumed_layers) == ("w4a16-g64", "gptq", 0)
    assert (report.devices, report.device) == (("cpu",), "cpu")
    assert report.calibration_tokens > 0
    assert [(row.layer, row.linear) for row in report.layers] == [(i, linear) for i in range(2) for linear in LINEARS]
    assert all(0 < row.error < 1 and row.scheme == "w4a16-g64" and row.seconds >= 0 for row in report.layers)
    stages = {"reading", "forward", "statistics", "factorization", "solve", "communication", "writing"}
    assert set(report.stages) == stages
    assert 0 < sum(report.stages.values()) <= report.seconds
    assert set(report.estimate) == {"seconds", "most_seconds", "memory", "disk"}
    assert report.gpu_seconds is report.energy_joules is report.peak_gpu_memory is None


def test_the_report_of_sequences_and_of_rtn(tmp_path: Path, model: Path) -> None:
    report = quantize(model, tmp_path / "a", calibration=SEQUENCES, scheme="w8a16", samples=1)
    assert report.settings["calibration"] == "30 sequences"
    assert report.calibration_tokens == SEQUENCES.tokens
    report = quantize(model, tmp_path / "b", algorithm="rtn", scheme="w8a16", calibration=tmp_path / "none.txt")
    assert (report.settings, report.calibration_tokens) == ({}, 0)


@pytest.mark.parametrize("text", ["w4a16-g64", "w3a16-g32-asym", "w8a16", "w2a16-g128", "w8a8-int8", "w8a8-fp8"])
def test_rtn_computes_what_the_model_in_memory_does(tmp_path: Path, model: Path, text: str) -> None:
    report = quantize(model, tmp_path / "out", algorithm="rtn", scheme=text)
    expected = load(model)
    scheme = Scheme.parse(text)
    for layer in expected.layers:
        for linear in LINEARS:
            module = layer.get_submodule(linear)
            weight = rtn(module.weight.data, scheme, scale_dtype=torch.float32, name=linear)
            owner, _, leaf = linear.partition(".")
            setattr(layer.get_submodule(owner), leaf, QuantizedLinear(weight, module.bias))
    with torch.no_grad():
        assert torch.equal(logits(tmp_path / "out"), expected(TOKENS))
    assert [(row.layer, row.linear) for row in report.layers] == [(i, linear) for i in range(2) for linear in LINEARS]
    first = load(model).layers[0].attention.qkv.weight.data
    rounded = rtn(first, scheme, scale_dtype=torch.float32, name="qkv").dequantize(torch.float32)
    assert report.layers[0].error == pytest.approx(float((rounded - first).norm() / first.norm()), rel=1e-4)


@pytest.mark.parametrize(
    ("algorithm", "text", "format", "dtype"),
    [
        ("gptq", "w4a16-g64", "compressed-tensors", torch.float32),
        ("gptq", "w3a16-g32-asym", "compressed-tensors", torch.float32),
        ("gptq", "w4a16-g32-asym", "gptq-v2", torch.bfloat16),
        ("awq", "w4a16-g64", "compressed-tensors", torch.float32),
        ("awq", "w3a16-g32-asym", "compressed-tensors", torch.bfloat16),
        ("awq", "w4a16-g64-asym", "awq", torch.bfloat16),
        ("awq", "w4a16-g64-asym", "awq", torch.float16),
    ],
)
def test_the_model_computes_what_calibration_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, text: str, format: str, dtype: torch.dtype
) -> None:
    """The last states of the calibration are, to the bit, those of the model that was written."""
    states: list[States] = []
    embed = job.embed

    def spy(*arguments: Any, **options: Any) -> list[States]:
        states.extend(embed(*arguments, **options))
        return states

    monkeypatch.setattr(job, "embed", spy)
    monkeypatch.setitem(job.BATCH_TOKENS, "cpu", 64)
    source = write_model(tmp_path / "model", dtype=dtype, num_hidden_layers=2 if algorithm == "gptq" else 1)
    quantize(
        source, tmp_path / "out", calibration=SEQUENCES, scheme=text, algorithm=algorithm, format=format, device="cpu"
    )
    written = load(tmp_path / "out")
    with torch.no_grad():
        for batch, state in zip(SEQUENCES.batches(64), states, strict=True):
            assert torch.equal(written.final_norm(state.x)[batch.real], written.hidden(batch.ids)[batch.real])


def test_smoothquant_is_nearer_to_the_original_than_rtn(tmp_path: Path) -> None:
    """Where some channels of the inputs are much larger than others."""

    def spread(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("layernorm.weight"):
                tensor[::16] *= 60

    source = rewrite(write_model(tmp_path / "model", num_hidden_layers=1), tmp_path / "spread", spread)
    original = logits(source)
    errors = {}
    for algorithm in ("rtn", "smoothquant"):
        output = tmp_path / algorithm
        quantize(source, output, algorithm=algorithm, calibration=SEQUENCES, scheme="w8a8-int8")
        assert str(read_schemes(Checkpoint(output).config)) == "w8a8-int8"
        errors[algorithm] = float((logits(output) - original).norm() / original.norm())
    assert errors["smoothquant"] < 0.7 * errors["rtn"]


def test_saved_and_loaded_again_nothing_changes(tmp_path: Path, model: Path, texts: Path) -> None:
    quantize(model, tmp_path / "out", calibration=texts, scheme="w4a16-g64")
    loaded = load(tmp_path / "out")
    checkpoint = Checkpoint(tmp_path / "out")
    scheme = read_schemes(checkpoint.config).of("model.layers.1.mlp.down_proj")
    assert scheme is not None
    stored = from_tensors(checkpoint, "model.layers.1.mlp.down_proj", scheme)
    assert torch.equal(loaded.layers[1].mlp.down.weight.qweight, stored.qweight)
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "out"))


@pytest.mark.parametrize(
    ("algorithm", "scheme", "formats"),
    [
        ("gptq", "w4a16-g64", ("gptq", "gptq-v2", "awq")),
        ("gptq", "w3a16-g32-asym", ("gptq-v2",)),
        ("awq", "w4a16-g64-asym", ("gptq-v2", "awq")),
        ("rtn", "w8a16", ("gptq", "gptq-v2")),
    ],
)
def test_every_format_holds_the_same(tmp_path: Path, algorithm: str, scheme: str, formats: tuple[str, ...]) -> None:
    """With scales of one dtype, what is read back is the same in all of them."""
    source = write_model(tmp_path / "model", dtype=torch.float16, num_hidden_layers=1)
    found = {}
    for format in ("compressed-tensors", *formats):
        output = tmp_path / format
        quantize(source, output, algorithm=algorithm, calibration=SEQUENCES, scheme=scheme, format=format)
        assert format_named(format).detect(Checkpoint(output).config)
        assert str(read_schemes(Checkpoint(output).config)) == scheme
        found[format] = matrices(output), logits(output)
    expected, computed = found["compressed-tensors"]
    for weights, same in (found[format] for format in formats):
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            assert torch.equal(weight.dequantize(torch.float32), expected[name].dequantize(torch.float32))
        assert torch.equal(same, computed)


@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_matrices_of_different_schemes(tmp_path: Path, model: Path, algorithm: str) -> None:
    """Named one by one, and by a pattern."""
    schemes = Schemes(
        Scheme.parse("w3a16-g64"),
        {
            "model.layers.0.self_attn.o_proj": Scheme.parse("w4a16-g32-asym"),
            r"re:model\.layers\.\d+\.mlp\.down_proj$": Scheme.parse("w8a16"),
        },
    )
    report = quantize(model, tmp_path / "out", scheme=schemes, algorithm=algorithm, calibration=SEQUENCES)
    expected = ["w3a16-g64", "w4a16-g32-asym", "w3a16-g64", "w8a16", "w3a16-g64", "w3a16-g64", "w3a16-g64", "w8a16"]
    assert [row.scheme for row in report.layers] == expected
    assert [str(weight.scheme) for weight in matrices(tmp_path / "out").values()] == expected
    assert report.scheme == "w3a16-g64 + w4a16-g32-asym + w8a16"
    errors = {row.name: row.error for row in report.layers}
    assert errors["layers.0.mlp.down"] < 0.1 * errors["layers.0.mlp.gate_up"]
    stored = read_schemes(Checkpoint(tmp_path / "out").config)
    assert str(stored.of("model.layers.1.mlp.down_proj")) == "w8a16"
    assert str(stored.of("model.layers.1.self_attn.o_proj")) == "w3a16-g64"
    assert torch.isfinite(logits(tmp_path / "out")).all()


def test_the_same_arguments_give_the_same_files(tmp_path: Path, model: Path, texts: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        quantize(model, tmp_path / name, calibration=texts, scheme="w4a16-g64", samples=8, seed=seed)
    files = [
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir() if file.suffix != ".json"}
        for name in "abc"
    ]
    assert any(name.endswith(".safetensors") for name in files[0])
    assert files[0] == files[1]
    assert files[0] != files[2]


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
def test_calibration_brings_it_nearer_to_the_original(
    tmp_path: Path, single: Path, texts: Path, algorithm: str
) -> None:
    """On text like that it was calibrated on."""
    tokens = torch.tensor([load_tokenizer(single).encode(VERSE)])
    original = logits(single, tokens)
    errors = {}
    for name in ("rtn", algorithm):
        quantize(single, tmp_path / name, algorithm=name, calibration=texts, scheme="w3a16-g64")
        errors[name] = float((logits(tmp_path / name, tokens) - original).norm())
    assert errors[algorithm] < 0.8 * errors["rtn"]


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_calibration_from_either_kind_of_file(tmp_path: Path, model: Path, suffix: str) -> None:
    path = tmp_path / f"data.{suffix}"
    path.write_text(VERSE * 20 if suffix == "txt" else json.dumps({"text": VERSE * 20}), encoding="utf-8")
    report = quantize(model, tmp_path / "out", calibration=path, scheme="w4a16-g64", samples=3, seqlen=4096)
    assert report.calibration_tokens == (3 * 64 if suffix == "txt" else 64)  # the model's context is 64 tokens


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
def test_a_model_of_another_family_with_fused_tensors(tmp_path: Path, texts: Path, algorithm: str) -> None:
    """Llama's gate and up are tensors of their own; each gets its rows of what was quantized together."""
    traits = {"model_type": "llama", "attention_bias": False, "partial_rotary_factor": 1.0}
    source = write_model(tmp_path / "model", num_hidden_layers=1, **traits)
    quantize(source, tmp_path / "out", calibration=texts, scheme="w4a16-g64", algorithm=algorithm)
    after = Checkpoint(tmp_path / "out")
    assert after.shape("model.layers.0.mlp.gate_proj.weight_packed") == (256, 16)
    assert after.shape("model.layers.0.mlp.up_proj.weight_packed") == (256, 16)
    assert (logits(tmp_path / "out") - logits(source)).norm() < 0.5 * logits(source).norm()


@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_progress(tmp_path: Path, model: Path, algorithm: str) -> None:
    """The estimate, then what is there already, then every matrix."""
    calls: list[tuple[Any, ...]] = []
    progress = Progress(
        estimated=lambda needs: calls.append(("estimated", needs)),
        begun=lambda begun: calls.append(("begun", begun.found, begun.layers)),
        matrix=lambda *arguments: calls.append(("matrix", *arguments)),
    )
    quantize(model, tmp_path / "out", algorithm=algorithm, scheme="w8a16", calibration=SEQUENCES, progress=progress)
    assert [call[0] for call in calls] == ["estimated", "begun"] + ["matrix"] * 8
    assert calls[0][1].tokens == (SEQUENCES.tokens if algorithm == "gptq" else 0)
    assert calls[1][1:] == ("nothing", 0)
    assert [call[1:3] for call in calls[2:]] == [(done, 8) for done in range(1, 9)]
    assert calls[-1][3].name == "layers.1.mlp.down"


def test_the_estimate_leaves_out_what_an_earlier_run_has_finished(tmp_path: Path, model: Path) -> None:
    estimates: list[QuantizationEstimate] = []
    arguments: dict[str, Any] = {"algorithm": "gptq", "scheme": "w8a16", "calibration": SEQUENCES}
    stopping = Progress(estimated=estimates.append, matrix=stop_after_layer(tmp_path / "out", 0))
    with pytest.raises(KeyboardInterrupt):
        quantize(model, tmp_path / "out", progress=stopping, **arguments)
    begins_with_states = saved_layer(FinishedParts(tmp_path / "out"), 1) == 1  # they are saved if there is time for it
    for more in ({}, {"restart": True}):
        with pytest.raises(KeyboardInterrupt):
            quantize(model, tmp_path / "out", progress=stopping, **arguments, **more)
    first, resumed, _ = estimates
    assert "there already" not in first.disk.parts
    assert resumed.disk.total < first.disk.total
    work = [sum(value for name, value in each.seconds.items() if name != "forward") for each in estimates]
    share = [value / each.seconds["forward"] for value, each in zip(work, estimates, strict=True)]
    assert share == pytest.approx([share[0], share[0] if begins_with_states else share[0] / 2, share[0]])


@pytest.mark.parametrize("algorithm", ["rtn", "gptq", "awq"])
def test_a_tied_head_stays_tied(tmp_path: Path, algorithm: str) -> None:
    source = write_model(tmp_path / "model", tie_word_embeddings=True, num_hidden_layers=1)
    quantize(source, tmp_path / "out", algorithm=algorithm, scheme="w8a16-g64", calibration=SEQUENCES)
    assert "lm_head.weight" not in Checkpoint(tmp_path / "out")
    assert torch.allclose(logits(tmp_path / "out"), logits(source), atol=0.2)


def test_one_token_is_enough(tmp_path: Path, single: Path) -> None:
    """Fewer tokens than shares, and moments of rank 1."""
    for algorithm in ("gptq", "awq"):
        data = Calibration(((5,),))
        report = quantize(single, tmp_path / algorithm, algorithm=algorithm, scheme="w4a16-g64", calibration=data)
        assert report.calibration_tokens == 1
        assert torch.isfinite(logits(tmp_path / algorithm)).all()


def test_overwriting(tmp_path: Path, model: Path) -> None:
    quantize(model, tmp_path / "out", algorithm="rtn", scheme="w8a16")
    report = quantize(model, tmp_path / "out", algorithm="rtn", scheme="w4a16", overwrite=True)
    assert str(read_schemes(Checkpoint(tmp_path / "out").config)) == report.scheme == "w4a16"


@pytest.mark.parametrize("algorithm", ["rtn", "gptq", "awq", "smoothquant"])
def test_a_weight_that_is_no_number_is_named(tmp_path: Path, model: Path, algorithm: str) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")

    broken = rewrite(model, tmp_path / "broken", spoil)
    scheme = "w8a8-int8" if algorithm == "smoothquant" else "w8a16"
    with pytest.raises(NumericError, match=r"layers\.1\.mlp\.down") as raised:
        quantize(broken, tmp_path / "out", algorithm=algorithm, calibration=SEQUENCES, scheme=scheme)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()
    assert [part for part in FinishedParts(tmp_path / "out").parts() if part.startswith("layer")] == ["layer-00000"]


def test_inputs_that_are_no_numbers_are_named(tmp_path: Path, model: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.input_layernorm.weight"][:] = 3e38  # a number, but its products are none

    broken = rewrite(model, tmp_path / "broken", spoil)
    for algorithm, scheme in (("gptq", "w8a16"), ("awq", "w8a16"), ("smoothquant", "w8a8-fp8")):
        with pytest.raises(NumericError, match=r"^layers\.1\.attention\.qkv: NaN or infinity"):
            quantize(broken, tmp_path / algorithm, algorithm=algorithm, calibration=SEQUENCES, scheme=scheme)
        assert not (tmp_path / algorithm).exists()


@pytest.mark.filterwarnings("ignore")
def test_transformers_writes_the_same_text(tmp_path: Path, texts: Path) -> None:
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
