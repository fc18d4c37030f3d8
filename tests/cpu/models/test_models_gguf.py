"""Models as GGUF files: what is written comes back as the same model, and llama.cpp computes the same logits."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizer_files
import torch
from quantized_files import CHATGLM, HF, SIZES, all_tensors, plain_tensors, write_files, write_quantized
from tokenizers import Tokenizer as Library
from tokenizers import processors
from torch import Tensor
from typer.testing import CliRunner

from warpbus.cli import app
from warpbus.errors import CheckpointError, StorageError, TensorError, UsageError
from warpbus.formats import Checkpoint
from warpbus.formats.gguf.architectures import Keys
from warpbus.formats.gguf.blocks import TYPES
from warpbus.formats.gguf.file import PlannedTensor, read_header, write_file
from warpbus.formats.gguf.view import directory_of
from warpbus.formats.gguf.vocabulary import vocabulary_files
from warpbus.formats.hub import find_model
from warpbus.models import load_model, read_config
from warpbus.models.convert import convert
from warpbus.models.gguf.export import block_type
from warpbus.models.gguf.vocabulary import vocabulary_metadata
from warpbus.models.tokenizers import encode_prompt, load_tokenizer
from warpbus.qtensor import Scheme

TOKENS = torch.arange(40).view(2, 20)
TEXTS = ("床前明月光\n  moon 12345 it's", "mooo m 你好 <s> <|user|>", "")

ENDS: dict[str, Any] = {"vocab_size": 640, "intermediate_size": 160, "hidden_act": "silu", "rms_norm_eps": 1e-5}
ENDS |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}

CONFIGS: dict[str, dict[str, Any]] = {
    "glm": HF | {"vocab_size": 640, "head_dim": 16},
    "glm, wide heads": HF | {"vocab_size": 640, "tie_word_embeddings": True},
    "glm4": HF | {"vocab_size": 640, "model_type": "glm4"},
    "chatglm2": CHATGLM | {"padded_vocab_size": 640, "kv_channels": 16},
    "llama": SIZES | ENDS | {"model_type": "llama", "rope_theta": 500000.0},
    "llama 3": SIZES | ENDS | {"model_type": "llama", "rope_scaling": LLAMA3, "head_dim": 32},
    "qwen2": SIZES | ENDS | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": SIZES | ENDS | {"model_type": "qwen3", "head_dim": 32},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "warpbus" / "gguf"


def write_plain(directory: Path, values: dict[str, Any], dtype: torch.dtype = torch.float16) -> Path:
    write_files(directory, values, plain_tensors(values, dtype))
    return write_vocabulary(directory, values)


def write_vocabulary(directory: Path, values: dict[str, Any]) -> Path:
    if values["model_type"] != "chatglm":
        return tokenizer_files.write_poet(directory)
    config = (directory / "config.json").read_bytes()
    tokenizer_files.write_chatglm(directory, version=2)
    (directory / "config.json").write_bytes(config)
    return directory


def logits(directory: Path) -> Tensor:
    model = load_model(Checkpoint(directory), device="cpu", dtype=torch.float32)
    with torch.no_grad():
        return model(TOKENS).float()


@pytest.mark.parametrize("name", CONFIGS)
def test_an_unquantized_model_comes_back(tmp_path, name):
    source = write_plain(tmp_path / "model", CONFIGS[name])
    done = convert(source, tmp_path / "m.gguf", to="gguf")
    assert set(done.to_json()["kinds"]) == {"F16"}
    found = find_model(tmp_path / "m.gguf")
    expected = logits(source)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits(found), expected, rtol=1e-4, atol=1e-4)
    before, after = read_config(Checkpoint(source)), read_config(Checkpoint(found))
    assert (after.max_context, after.tie_embeddings) == (before.max_context, before.tie_embeddings)
    assert (after.rope.theta, after.rope.scaling, after.rope.rotary_dim) == (
        before.rope.theta,
        before.rope.scaling,
        before.rope.rotary_dim,
    )


@pytest.mark.parametrize("name", ["glm", "glm, wide heads", "chatglm2", "llama", "qwen2"])
@pytest.mark.parametrize(
    "scheme", ["w4a16-g32", "w3a16-g32", "w2a16-g32", "w5a16-g32", "w6a16-g32", "w8a16-g32", "w4a16"]
)
def test_codes_and_scales_of_symmetric_schemes_stay(tmp_path, name, scheme):
    source, _ = write_quantized(tmp_path / "model", CONFIGS[name], "compressed-tensors", scheme)
    write_vocabulary(source, CONFIGS[name])
    done = convert(source, tmp_path / "m.gguf", to="gguf").to_json()
    assert (done["exact"], done["rounded_again"], done["scales_rounded"]) == (
        done["kinds"][{"5": "Q5_0", "6": "Q8_0", "8": "Q8_0"}.get(scheme[1], "Q4_0")],
        0,
        0,
    )
    reference = tmp_path / "plain"
    convert(source, reference, to="float16")
    found = tmp_path / "found"
    convert(tmp_path / "m.gguf", found, to="float16")
    # Scaled norms are rounded to float16.
    tolerance = 0.01 if name == "glm, wide heads" else 1e-4
    torch.testing.assert_close(logits(found), logits(reference), rtol=tolerance, atol=tolerance)


def test_a_quantized_file_is_loaded_quantized_and_returns_to_the_same_codes(tmp_path):
    source, _ = write_quantized(tmp_path / "model", CONFIGS["llama"], "compressed-tensors", "w4a16-g32")
    tokenizer_files.write_poet(source)
    convert(source, tmp_path / "m.gguf", to="gguf")
    convert(tmp_path / "m.gguf", tmp_path / "back", to="compressed-tensors")
    before, after = all_tensors(source), all_tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, expected in before.items():
        assert torch.equal(after[name], expected.to(after[name].dtype)), name


@pytest.mark.parametrize("scheme", ["w4a16-g32-asym", "w3a16-g32-asym", "w2a16-g32-asym", "w5a16-g32-asym"])
def test_minima_of_asymmetric_schemes_are_rounded_once(tmp_path, scheme):
    source, plain = write_quantized(tmp_path / "model", CONFIGS["glm"], "compressed-tensors", scheme)
    tokenizer_files.write_poet(source)
    done = convert(source, tmp_path / "m.gguf", to="gguf").to_json()
    assert (done["exact"], done["minima_rounded"]) == (0, done["kinds"]["Q5_1" if scheme[1] == "5" else "Q4_1"])
    checkpoint = Checkpoint(find_model(tmp_path / "m.gguf"))
    for name, expected in plain.items():
        if name.endswith("proj.weight"):
            torch.testing.assert_close(checkpoint.tensor(name).float(), expected, rtol=2e-3, atol=2e-4)


def test_schemes_without_a_block_type_are_rounded_again_and_it_is_said(tmp_path):
    source, plain = write_quantized(tmp_path / "model", CONFIGS["qwen2"], "compressed-tensors", "w8a8-fp8")
    tokenizer_files.write_poet(source)
    done = convert(source, tmp_path / "m.gguf", to="gguf")
    assert done.to_json()["rounded_again"] == done.to_json()["kinds"]["Q8_0"] == 14
    assert "matrices rounded to the file's types, see `warpbus eval` for the effect: 14" in done.summary()
    checkpoint = Checkpoint(find_model(tmp_path / "m.gguf"))
    expected = plain["model.layers.0.mlp.down_proj.weight"]
    converted = convert(tmp_path / "m.gguf", tmp_path / "plain", to="float16")
    assert converted.matrices == 14
    assert "model.layers.0.mlp.down_proj.weight_packed" in checkpoint
    found = Checkpoint(tmp_path / "plain").tensor("model.layers.0.mlp.down_proj.weight").float()
    torch.testing.assert_close(found, expected, rtol=0, atol=float(expected.abs().max()) / 127)


def test_block_types_of_schemes():
    def found(name: str, columns: int = 64) -> tuple[str, bool]:
        return block_type(Scheme.parse(name), columns)

    assert [found(f"w{bits}a16") for bits in (2, 3, 4, 8)] == [("Q4_0", True)] * 3 + [("Q8_0", True)]
    assert [found(f"w{bits}a16") for bits in (5, 6)] == [("Q5_0", True), ("Q8_0", True)]
    assert [found(f"w{bits}a16-asym") for bits in (4, 5, 6)] == [("Q4_1", True), ("Q5_1", True), ("Q8_0", False)]
    assert found("w8a16-asym") == ("Q8_0", False)
    assert found("w8a8-int8") == ("Q8_0", True)
    assert found("w8a8-fp8") == ("Q8_0", False)
    assert found("w4a16", 40) == ("F16", False)


@pytest.mark.parametrize("target", ["gguf-q4_k", "gguf-q5_k", "gguf-q6_k", "gguf-q4_0", "gguf-q5_1", "gguf-bf16"])
def test_every_matrix_gets_the_type_that_is_asked_for(tmp_path, target):
    values = CONFIGS["qwen3"] | {"hidden_size": 256, "intermediate_size": 320}
    source = write_plain(tmp_path / "model", values)
    done = convert(source, tmp_path / "m.gguf", to=target).to_json()
    kind = target.removeprefix("gguf-").upper()
    # q, k, v, gate and up have rows of 256; o of 128 and down of 320.
    fallback = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}.get(kind)
    ends = "Q6_K" if kind[:2] in ("Q4", "Q5") else kind
    expected = {kind: 10 if fallback else 14}
    if fallback:
        expected[fallback] = 4
    expected[ends] = expected.get(ends, 0) + 2
    assert done["kinds"] == expected
    convert(tmp_path / "m.gguf", tmp_path / "plain", to="bfloat16")
    found, before = all_tensors(tmp_path / "plain"), all_tensors(source)
    assert found.keys() == before.keys()
    for name, expected in before.items():
        assert (found[name].float() - expected.float()).norm() < 0.1 * expected.float().norm(), name


def test_matrices_that_are_fused_and_differ_are_dequantized(tmp_path):
    source, plain = write_quantized(tmp_path / "model", CONFIGS["llama"], "compressed-tensors", "w4a16-g32")
    tokenizer_files.write_poet(source)
    convert(source, tmp_path / "m.gguf", to="gguf")
    header = read_header(tmp_path / "m.gguf")
    planned = {
        name: PlannedTensor(each.shape, each.kind, partial(each.read_rows, 0, each.rows))
        for name, each in header.tensors.items()
    }
    values = plain["model.layers.0.self_attn.v_proj.weight"]
    planned["blk.0.attn_v.weight"] = PlannedTensor(tuple(values.shape), TYPES["F32"], lambda: values)
    write_file(tmp_path / "mixed.gguf", header.metadata, planned, lambda name, data: None)
    found = Checkpoint(find_model(tmp_path / "mixed.gguf"))
    layers = [f"model.layers.{index}.self_attn." for index in range(2)]
    assert f"{layers[0]}o_proj.weight_packed" in found
    assert f"{layers[1]}q_proj.weight_packed" in found
    for part in ("q_proj", "k_proj", "v_proj"):
        expected = plain[f"{layers[0]}{part}.weight"]
        torch.testing.assert_close(found.tensor(f"{layers[0]}{part}.weight").float(), expected, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(logits(found.directory), logits(source), rtol=0, atol=0.01)


def tokenizers(directory: Path, kind: str) -> Path:
    directory.mkdir()
    if kind == "poet":
        return tokenizer_files.write_poet(directory)
    if kind.startswith("chatglm"):
        return tokenizer_files.write_chatglm(directory, version=int(kind[-1]))
    return getattr(tokenizer_files, f"write_{kind}")(directory)


@pytest.mark.parametrize("kind", ["poet", "chatglm2", "chatglm3", "byte_level", "llama", "glm4"])
def test_tokenizers_come_back(tmp_path, kind):
    files = tokenizers(tmp_path / "tokenizer", kind)
    before = load_tokenizer(files)
    values = CONFIGS["glm"] | {"vocab_size": before.vocab_size + 3, "num_hidden_layers": 1}
    source = tmp_path / "model"
    config = json.loads((files / "config.json").read_text()) if (files / "config.json").exists() else {}
    if config.get("model_type") == "chatglm":
        values = CONFIGS["chatglm2"] | {"padded_vocab_size": before.vocab_size + 3, "num_layers": 1} | config
    write_files(source, values, plain_tensors(values))
    for file in files.iterdir():
        if file.name != "config.json":
            (source / file.name).write_bytes(file.read_bytes())
    convert(source, tmp_path / "m.gguf", to="gguf")
    after = load_tokenizer(find_model(tmp_path / "m.gguf"))
    assert after.special_ids.items() >= {(text, i) for text, i in before.special_ids.items() if text != "<unk>"}
    for text in TEXTS:
        assert after.encode(text) == before.encode(text), text
        assert after.decode(before.encode(text)) == before.decode(before.encode(text))


def test_template_and_stop_tokens_come_along(tmp_path):
    source = write_plain(tmp_path / "model", CONFIGS["llama"] | {"eos_token_id": [1, 5, 7]})
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}"}))
    convert(source, tmp_path / "m.gguf", to="gguf")
    found = find_model(tmp_path / "m.gguf")
    assert json.loads((found / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages[0]['content'] }}"
    assert read_config(Checkpoint(found)).stop_ids[:3] == (1, 5, 7)


def test_special_tokens_that_only_the_configuration_lists_come_along(tmp_path):
    listed = {"270": {"content": "<|new|>", "special": True}}
    tokenizer_files.write_byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    metadata = vocabulary_metadata(tmp_path, "llama", 600, (2,))
    assert metadata["tokenizer.ggml.tokens"][270] == "<|new|>"
    assert metadata["tokenizer.ggml.token_type"][270] == 3


@pytest.mark.parametrize("kind", ["tokenizer.json", "tokenizer.model"])
def test_the_token_before_texts_comes_along(tmp_path, kind):
    if kind == "tokenizer.json":
        tokenizer_files.write_byte_level(tmp_path)
        first = load_tokenizer(tmp_path).special_ids["<s>"]
        library = Library.from_file(str(tmp_path / kind))
        library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
        library.save(str(tmp_path / kind))
    else:
        tokenizer_files.train_llama_sentencepiece(tmp_path)
        first, named = 1, {"add_bos_token": True, "bos_token": {"content": "<s>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    source, values = tmp_path / "model", CONFIGS["llama"]
    write_files(source, values, plain_tensors(values))
    for file in tmp_path.glob("tokenizer*"):
        (source / file.name).write_bytes(file.read_bytes())
    convert(source, tmp_path / "m.gguf", to="gguf")
    metadata = read_header(tmp_path / "m.gguf").metadata
    assert (metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.add_bos_token"]) == (first, True)
    before, after = load_tokenizer(source), load_tokenizer(find_model(tmp_path / "m.gguf"))
    for text in TEXTS:
        assert encode_prompt(after, text) == encode_prompt(before, text) == [first, *before.encode(text)]


@pytest.mark.parametrize(
    ("tokenizer", "keys", "prefix"),
    [
        ("byte level", {"add_bos_token": True, "bos_token_id": 3}, (3,)),
        ("byte level", {"add_bos_token": True}, ()),
        ("byte level", {"add_bos_token": False, "bos_token_id": 3}, ()),
        ("byte level", {"bos_token_id": 3}, ()),
        ("byte level", {"bos_token_id": 3, "pre": "llama-bpe"}, (3,)),
        ("pieces", {}, (1,)),
        ("pieces", {"bos_token_id": 2}, (2,)),
        ("pieces", {"add_bos_token": False}, ()),
    ],
)
def test_texts_begin_as_in_llama_cpp(tmp_path, tokenizer, keys, prefix):
    """Files without `add_bos_token`, and those that other programs wrote."""
    if tokenizer == "pieces":
        metadata = vocabulary_metadata(tokenizer_files.train_llama_sentencepiece(tmp_path), "llama", 600, (2,))
    else:
        tokenizer_files.write_byte_level(tmp_path)
        metadata = vocabulary_metadata(tmp_path, "llama", 600, (2,))
    metadata = {key: value for key, value in metadata.items() if "bos_token" not in key}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    header = SimpleNamespace(file=tmp_path, metadata=metadata | {"general.architecture": "llama"})
    for name, content in vocabulary_files(Keys(header)).items():
        (tmp_path / name).write_bytes(content)
    found = load_tokenizer(tmp_path)
    assert found.prompt_prefix == prefix
    assert encode_prompt(found, "moon") == [*prefix, *found.encode("moon")]


@pytest.mark.parametrize("in_files", [False, True])
def test_the_template_for_tools_comes_along(tmp_path, in_files):
    source = write_plain(tmp_path / "model", CONFIGS["llama"])
    named = [{"name": "tool_use", "template": "{{ tools }}"}, {"name": "default", "template": "plain"}]
    if in_files:
        (source / "additional_chat_templates").mkdir()
        (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
        (source / "chat_template.jinja").write_text("plain")
    else:
        (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    convert(source, tmp_path / "m.gguf", to="gguf")
    found = json.loads((find_model(tmp_path / "m.gguf") / "tokenizer_config.json").read_text())["chat_template"]
    assert sorted(map(str, found)) == sorted(map(str, named))


def test_one_directory_stands_for_one_state_of_a_file(tmp_path, cache):
    source = write_plain(tmp_path / "model", CONFIGS["qwen2"])
    convert(source, tmp_path / "m.gguf", to="gguf")
    first = directory_of(tmp_path / "m.gguf")
    assert first == directory_of(tmp_path / "m.gguf") == find_model(str(tmp_path / "m.gguf"))
    convert(source, tmp_path / "m.gguf", to="gguf-q8_0", overwrite=True)
    assert directory_of(tmp_path / "m.gguf") != first
    assert sorted(path.name[:2] for path in cache.iterdir()) == ["m-", "m-"]
    assert directory_of(source) == source


def test_bad_arguments_are_refused(tmp_path):
    source = write_plain(tmp_path / "model", CONFIGS["qwen2"])
    with pytest.raises(UsageError, match=r"give a name that ends in \.gguf"):
        convert(source, tmp_path / "out", to="gguf")
    with pytest.raises(UsageError, match="an FFN is not widened in GGUF"):
        convert(source, tmp_path / "m.gguf", to="gguf", pad_ffn="auto")
    with pytest.raises(UsageError, match=r"expected one of .*gguf-q4_k"):
        convert(source, tmp_path / "m.gguf", to="gguf-q2_k")
    (tmp_path / "m.gguf").write_text("kept")
    with pytest.raises(StorageError, match="exists: name another file, or pass --overwrite"):
        convert(source, tmp_path / "m.gguf", to="gguf")
    assert (tmp_path / "m.gguf").read_text() == "kept"
    with pytest.raises(StorageError, match=r"cannot be created below .*/m\.gguf, which is a file"):
        convert(source, tmp_path / "m.gguf" / "n.gguf", to="gguf")
    with pytest.raises(UsageError, match="replacing it would delete"):
        convert(tmp_path / "m.gguf", tmp_path / "m.gguf", to="gguf-q8_0", overwrite=True)
    assert (tmp_path / "m.gguf").read_text() == "kept"
    (source / "tokenizer.model").unlink()
    with pytest.raises(CheckpointError, match="no tokenizer"):
        convert(source, tmp_path / "new.gguf", to="gguf")
    twice = write_files(tmp_path / "twice", CONFIGS["chatglm2"], plain_tensors(CONFIGS["chatglm2"]))
    tokenizer_files.write_poet(twice)
    with pytest.raises(UsageError, match=r"two tokens '\[gMASK\]'"):
        convert(twice, tmp_path / "new.gguf", to="gguf")
    narrow = write_plain(tmp_path / "narrow", CONFIGS["glm"] | {"head_dim": 8})
    with pytest.raises(UsageError, match="fewer than the residual stream of 64"):
        convert(narrow, tmp_path / "new.gguf", to="gguf")
    assert not (tmp_path / "new.gguf").exists()


def test_values_beyond_float16_are_refused_where_the_type_does_not_hold_them(tmp_path):
    values = CONFIGS["qwen2"]
    tensors = plain_tensors(values, torch.float32)
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1e9
    source = write_vocabulary(write_files(tmp_path / "model", values, tensors), values)
    for to, kind in (("gguf-f16", "F16"), ("gguf-q8_0", "Q8_0")):
        with pytest.raises(TensorError, match=rf"down_proj: has NaN, or values that overflow {kind}: .*gguf-f32"):
            convert(source, tmp_path / "m.gguf", to=to)
    convert(source, tmp_path / "m.gguf", to="gguf-f32")
    torch.testing.assert_close(logits(directory_of(tmp_path / "m.gguf")), logits(source))


@pytest.mark.parametrize(("to", "kind"), [("gguf-f16", "F16"), ("gguf-q8_0", "Q8_0")])
def test_values_too_small_for_float16_are_refused(tmp_path, to, kind):
    """A tensor that would become zeros; small rows of a tensor, and what keeps its values roughly, are no mistake."""
    values = CONFIGS["qwen2"]
    tensors = plain_tensors(values, torch.float32)
    tensors["model.layers.0.mlp.up_proj.weight"][3:9] *= 1e-9
    tensors["model.layers.0.mlp.gate_proj.weight"] *= 1e-3
    source = write_vocabulary(write_files(tmp_path / "model", values, tensors), values)
    convert(source, tmp_path / "m.gguf", to=to)
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1e-9
    lost = write_vocabulary(write_files(tmp_path / "lost", values, tensors), values)
    said = rf"layers\.1\.mlp\.down_proj: its values, \S+e-\d+ at most, are too small for {kind}: convert to gguf-f32"
    with pytest.raises(TensorError, match=said):
        convert(lost, tmp_path / "lost.gguf", to=to)
    convert(lost, tmp_path / "lost.gguf", to="gguf-f32")


def test_damaged_metadata_is_refused_by_key(tmp_path):
    source = write_plain(tmp_path / "model", CONFIGS["qwen2"])
    convert(source, tmp_path / "m.gguf", to="gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    for key, match in (
        (b"qwen2.block_count", "block_count: expected an integer, but it is missing"),
        (b"tokenizer.ggml.tokens", "tokenizer.ggml.tokens: expected a list of texts"),
        (b"tokenizer.ggml.scores", "scores: expected one number"),
    ):
        (tmp_path / "d.gguf").write_bytes(data.replace(key, b"x" * len(key)))
        with pytest.raises(CheckpointError, match=match):
            find_model(tmp_path / "d.gguf")


def test_the_command_converts_both_ways(tmp_path):
    source = write_plain(tmp_path / "model", CONFIGS["llama"])
    run = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "m.gguf"), "--to", "gguf-q8_0", "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout.splitlines()[-1])["kinds"] == {"Q8_0": 16}
    run = CliRunner().invoke(
        app, ["convert", str(tmp_path / "m.gguf"), str(tmp_path / "back"), "--to", "compressed-tensors", "--json"]
    )
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout.splitlines()[-1])["source"] == "gguf"


@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_computes_the_same(tmp_path, name):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    source = write_plain(tmp_path / "model", CONFIGS[name])
    convert(source, tmp_path / "m.gguf", to="gguf-f32")
    model = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    ours = load_tokenizer(source)
    for text in TEXTS[:1]:
        assert model.tokenize(text.encode(), add_bos=False, special=False) == ours.encode(text)
    model.eval(TOKENS[0].tolist())
    found = torch.tensor(model.scores[: TOKENS.shape[1]]).log_softmax(-1)
    expected = logits(source)[0].log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("file_type", ["Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"])
def test_what_llama_cpp_quantizes_is_read(tmp_path, file_type):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    convert(find_model("demo"), tmp_path / "m.gguf", to="gguf-f32")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{file_type}")
    names = [str(tmp_path / name).encode() for name in ("m.gguf", "q.gguf")]
    assert llama_cpp.llama_model_quantize(*names, params) == 0
    model = llama_cpp.Llama(str(tmp_path / "q.gguf"), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    model.eval(TOKENS[0].tolist())
    theirs = torch.tensor(model.scores[: TOKENS.shape[1]]).log_softmax(-1)
    convert(tmp_path / "q.gguf", tmp_path / "plain", to="float16")
    ours = logits(tmp_path / "plain")[0].log_softmax(-1)
    # llama.cpp rounds activations to 8 bits.
    assert float((theirs.exp() * (theirs - ours)).sum(-1).mean()) < 2e-3
