"""PEFT's files: what is read, what is refused by its name, and that no file can do harm."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from warpbus.errors import CheckpointError, StorageError, TensorError, WarpbusError
from warpbus.formats.module_patterns import ModulePattern, is_listed
from warpbus.formats.peft import PeftLora, write_peft

SETTINGS: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "THUDM/chatglm2-6b",
    "r": 2,
    "lora_alpha": 8,
    "target_modules": ["dense"],
    "modules_to_save": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "lora_dropout": 0.1,
    "inference_mode": True,
    "init_lora_weights": True,
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_dora": False,
    "use_rslora": False,
    "layer_replication": None,
    "megatron_core": "megatron.core",
    "loftq_config": {},
}
MODULE = "transformer.encoder.layers.0.self_attention.dense"
A, B = f"base_model.model.{MODULE}.lora_A.weight", f"base_model.model.{MODULE}.lora_B.weight"
TENSORS = {A: torch.arange(6.0).view(2, 3), B: torch.arange(8.0).view(4, 2)}


def write(directory: Path, tensors: dict[str, Tensor] | None = None, **settings: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(SETTINGS | settings))
    save_file(TENSORS if tensors is None else tensors, directory / "adapter_model.safetensors")
    return directory


def read_all(directory: Path) -> None:
    lora = PeftLora.open(directory)
    for module in lora.modules:
        lora.settings.is_target(module)
        lora.read(module)


def refused(directory: Path, message: str) -> None:
    """Opening the file, or reading all of it, ends in one line."""
    with pytest.raises(CheckpointError, match=message) as caught:
        read_all(directory)
    assert len(str(caught.value).splitlines()) == 1


def refusals(file: Path, contents: list[bytes]) -> list[str]:
    """What is said of the contents of one file that are not read; nothing else but a sentence may come."""
    said = []
    for content in contents:
        file.write_bytes(content)
        try:
            read_all(file.parent)
        except WarpbusError as error:
            said.append(str(error))
    return said


def test_reads(tmp_path: Path) -> None:
    lora = PeftLora.open(write(tmp_path))
    assert lora.modules == (MODULE,)
    assert lora.settings.base == "THUDM/chatglm2-6b"
    assert lora.shape(MODULE) == (4, 2, 3)
    a, b = lora.read(MODULE)
    assert torch.equal(a, TENSORS[A])
    assert torch.equal(b, TENSORS[B] * 4)
    assert lora.settings.is_target(MODULE) is True
    assert lora.settings.is_target("transformer.encoder.layers.0.mlp.dense_4h_to_h") is False


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [
        ({}, 4.0),
        ({"lora_alpha": 3}, 1.5),
        ({"lora_alpha": -0.5}, -0.25),
        ({"use_rslora": True}, 8 / math.sqrt(2)),
        ({"fan_in_fan_out": True}, 4.0),
        ({"r": 9, "rank_pattern": {"dense": 2}}, 4.0),
        ({"alpha_pattern": {"self_attention.dense": 5}}, 2.5),
        ({"alpha_pattern": {"attention.dense": 5}}, 4.0),
        ({"alpha_pattern": {"ense": 5, r"layers\.\d+\.self_attention\.dense": 6, "dense": 7}}, 3.0),
        ({"alpha_pattern": {"^transformer.*dense$": 10}}, 5.0),
        ({"init_lora_weights": "gaussian", "eva_config": {"rho": 2.0}}, 4.0),
    ],
)
def test_scaling(settings: dict[str, Any], scaling: float, tmp_path: Path) -> None:
    lora = PeftLora.open(write(tmp_path, **settings))
    torch.testing.assert_close(lora.read(MODULE)[1], TENSORS[B] * scaling)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"target_modules": None}, None),
        ({"target_modules": "all-linear"}, None),
        ({"target_modules": ["query_key_value"]}, False),
        ({"target_modules": [MODULE]}, True),
        ({"target_modules": ["ense"]}, False),
        ({"target_modules": r".*\.(dense|query_key_value)"}, True),
        ({"target_modules": "dense"}, False),
        ({"exclude_modules": ["self_attention.dense"]}, False),
        ({"exclude_modules": r".*layers\.0\..*"}, False),
        ({"layers_to_transform": 0}, True),
        ({"layers_to_transform": [1, 2]}, False),
    ],
)
def test_targets(settings: dict[str, Any], found: bool | None, tmp_path: Path) -> None:
    assert PeftLora.open(write(tmp_path, **settings)).settings.is_target(MODULE) is found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "PREFIX_TUNING"}, r"adapter_config\.json: peft_type is 'PREFIX_TUNING'"),
        ({"peft_type": None}, "peft_type is None"),
        ({"use_dora": True}, "use_dora is True, which is not computed"),
        ({"use_qalora": True}, "use_qalora is True"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is list of 1"),
        ({"target_parameters": ["experts.down"]}, "target_parameters is list of 1"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is list of 1"),
        ({"a_setting_of_tomorrow": {"x": 1}}, "a_setting_of_tomorrow is dict of 1"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16': .* base model's own weights"),
        ({"init_lora_weights": []}, "init_lora_weights is list of 0"),
        ({"r": 0}, "r: expected an integer from 1 to 4096, found 0"),
        ({"r": 4097}, "r: expected an integer from 1 to 4096, found 4097"),
        ({"r": 2.0}, "r: expected an integer"),
        ({"r": True}, "r: expected an integer"),
        ({"rank_pattern": {"dense": "many"}}, "rank_pattern: dense: expected an integer from 1 to 4096, found 'many'"),
        ({"rank_pattern": [1]}, "rank_pattern: expected an object of patterns"),
        ({"lora_alpha": float("nan")}, "lora_alpha: expected a finite number, found nan"),
        ({"lora_alpha": float("inf")}, "lora_alpha: expected a finite number, found inf"),
        ({"lora_alpha": "16"}, "lora_alpha: expected a finite number, found '16'"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern: '\\(': not a regular expression"),
        ({"alpha_pattern": {".*a.*b.*c.*": 1}}, "alpha_pattern: .* more than 3 repetitions"),
        ({"rank_pattern": {f".*{name}": 1 for name in range(65)}}, "rank_pattern: more than 64 patterns"),
        ({"alpha_pattern": {f"a{name}": 1 for name in range(4097)}}, "alpha_pattern: expected 4096 patterns at most"),
        ({"use_rslora": "yes"}, "use_rslora: expected true or false, found 'yes'"),
        ({"target_modules": 3}, "target_modules: expected a list of names, or a pattern, found 3"),
        ({"target_modules": "(a+)+b"}, "target_modules: .* may take forever to match"),
        ({"layers_to_transform": ["1"]}, "layers_to_transform: expected the number of a layer"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(write(tmp_path, **settings), message)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "it holds no tensors"),
        ({A: TENSORS[A]}, "lora_B.weight is missing: expected both matrices"),
        ({B: TENSORS[B]}, "lora_A.weight is missing"),
        (TENSORS | {A: torch.ones(3, 3)}, r"lora_A\.weight: expected 2 rows, the rank that .* gives, found 3"),
        (TENSORS | {B: torch.ones(4, 3)}, r"lora_B\.weight: expected 2 columns, as the other matrix, found 3"),
        (TENSORS | {A: torch.ones(2)}, r"lora_A\.weight: expected a matrix, found shape \[2\]"),
        (TENSORS | {A: torch.ones(2, 0)}, r"lora_A\.weight: expected a matrix, found shape \[2, 0\]"),
        (TENSORS | {B: torch.ones(4, 2, dtype=torch.int8)}, r"lora_B\.weight: expected floating point.*torch\.int8"),
        (TENSORS | {A: TENSORS[A].clone().fill_(math.nan)}, r"lora_A\.weight: holds NaN or infinity"),
        (TENSORS | {B: torch.full((4, 2), math.inf).half()}, r"lora_B\.weight: holds NaN or infinity"),
        (TENSORS | {f"base_model.model.{MODULE}.bias": torch.ones(4)}, r"dense\.bias: trained biases are not computed"),
        (TENSORS | {"base_model.model.lm_head.weight": torch.ones(2, 2)}, r"lm_head\.weight: whole trained weights"),
        (TENSORS | {f"base_model.model.{MODULE}.lora_magnitude_vector": torch.ones(4)}, "DoRA is not computed"),
        (TENSORS | {"base_model.model.embed.lora_embedding_A": torch.ones(2, 2)}, "of the embedding are not computed"),
        (TENSORS | {f"base_model.model.{MODULE}.lora_C.weight": torch.ones(2)}, "expected names that end in"),
        (TENSORS | {".lora_A.weight": torch.ones(2, 2)}, "expected names that end in"),
        (TENSORS | {"base_model.model.x\ny.lora_Z": torch.ones(2)}, "expected names that end in"),
    ],
)  # fmt: skip
def test_tensors_that_are_refused(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    refused(write(tmp_path, tensors), message)


def test_files_that_are_missing(tmp_path: Path) -> None:
    refused(tmp_path, r"adapter_config\.json: there is no such file")
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    refused(tmp_path, r"no weights: expected adapter_model\.safetensors or adapter_model\.bin")


def test_a_pickle_is_read_as_tensors_alone(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(TENSORS, tmp_path / "adapter_model.bin")
    assert torch.equal(PeftLora.open(tmp_path).read(MODULE)[0], TENSORS[A])
    torch.save({A: torch.zeros(1).expand(2, 2**40)}, tmp_path / "adapter_model.bin")
    refused(tmp_path, r"adapter_model\.bin: tensor .* would have .* bytes, the file has")
    torch.save({"model": refused}, tmp_path / "adapter_model.bin")
    refused(tmp_path, "nothing in it was executed")


def test_damaged_settings_end_in_a_sentence(tmp_path: Path) -> None:
    """Bytes changed at random, and values of other kinds in the place of each."""
    raw = json.dumps(SETTINGS | {"rank_pattern": {"dense": 2}}).encode()
    generator = random.Random(0)
    write(tmp_path)
    odd: list[Any] = [None, True, -1, 1e300, "x", "\ud800", [], [[]], {}, {"a": {}}, "a" * 5000, 2**70]
    texts = [json.dumps(SETTINGS | {key: value}).encode() for key in SETTINGS for value in odd]
    for _ in range(400):
        damaged = bytearray(raw)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(len(raw))] = generator.randrange(256)
        texts.append(bytes(damaged[: generator.choice((len(raw), generator.randrange(len(raw))))]))
    texts += [b"[" * 10**5, b"\xff\xfe", b"3", b"[]", b'{"peft_type": "LORA", "r": ' + b"9" * 5000 + b"}"]
    said = refusals(tmp_path / "adapter_config.json", texts)
    assert len(said) > 250
    assert all(len(message.splitlines()) == 1 and len(message) < 1000 for message in said)


def test_damaged_weights_end_in_a_sentence(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    raw = file.read_bytes()
    generator = random.Random(1)
    pieces = [raw[:length] for length in range(0, len(raw), 3)]
    for _ in range(300):
        damaged = bytearray(raw)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(len(raw))] = generator.randrange(256)
        pieces.append(bytes(damaged))
    said = refusals(file, pieces)
    assert len(said) > 150
    assert all(len(message.splitlines()) == 1 for message in said)


def test_writes_what_peft_reads(tmp_path: Path) -> None:
    """The names and settings that `peft.PeftModel.from_pretrained` looks for, written out by hand."""
    matrices = {MODULE: (TENSORS[A].bfloat16(), TENSORS[B].bfloat16())}
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["dense"], "base_model_name_or_path": "THUDM/chatglm2-6b"}
    write_peft(tmp_path / "out", matrices, settings)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name: tensor.dtype for name, tensor in stored.items()} == {A: torch.bfloat16, B: torch.bfloat16}
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text()) == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        **settings,
    }
    assert torch.equal(PeftLora.open(tmp_path / "out").read(MODULE)[1], TENSORS[B] * 2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    with pytest.raises(StorageError, match=r"no adapter_config\.json"):
        write_peft(tmp_path / "other", matrices, settings, overwrite=True)


@pytest.mark.parametrize(
    "expression",
    [
        "(a+)+b", "(a*)*", "(?:a|b)*c", "(.*)(.*)(.*)(.*)(.*)(.*)x", "a?a?a?a?a?a?aaaaaa", r"(.)\1+", "(x{1,9}){1,9}",
        "(?x)(a+) *b", "(?i)a", "[ab](c)+", r"(\))+", "x" * 1001, "(?P<n>a)(?P=n)", "a{2}b{2}c{2}d{2}e{2}f{2}",
        "[^][](.+)+![]]", "(?#[)(.+)+!(?#])", "(?:|)" * 30 + "!", "(?:.|.)" * 30 + "!", "(?:a|aa)" * 30 + "!",
        r"(?:\d|1)" * 30 + "!", "((a)|(?:b|.))" * 20 + "!", ".*(a|.).*(a|.).*(a|.).*b.*", "(a)(?(1)b|c)",
    ],
)  # fmt: skip
def test_patterns_without_a_bound_are_refused(expression: str) -> None:
    with pytest.raises(CheckpointError, match=r"somewhere: .*(may take forever|1,001 characters)") as caught:
        ModulePattern(expression, "somewhere")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "expression",
    [
        r"model\.layers\.\d+\.self_attn\.(q|k|v|o)_proj", r".*layers\.[0-9]+\..*proj", r"(?:.*\.)x", r"[*+?{}()]\+\)x*",
        r".*\.(?:q_proj|v_proj)", r"(?!.*visual).*q_proj", "[]*+]x", r".*layers\.[\d]{1,}\.mlp\..*",
        r".*layers\.(?:0|1|2|10|11|20|21)\.(?:self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj",
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp|ffn).*?(?:q_proj|k_proj|down_proj).*?)|"
        r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|mlp|ffn)\.(?:(?:q_proj|k_proj|down_proj)))",
    ],
)  # fmt: skip
def test_patterns_as_people_write_them(expression: str) -> None:
    names = ["model.layers.0.self_attn.q_proj", "model.layers.11.mlp.down_proj", "visual.q_proj", "*+)xx", "]x", "a.x"]
    pattern = ModulePattern(expression, "somewhere")
    for name in names:
        assert pattern.is_name(name) == (re.fullmatch(expression, name) is not None)
        assert pattern.is_end(name) == (re.match(rf"(.*\.)?({expression})$", name) is not None)


def test_listed_names_are_whole_parts() -> None:
    assert is_listed("a.b.dense", ["dense"])
    assert is_listed("a.b.dense", ["b.dense"])
    assert is_listed("dense", ["dense"])
    assert not is_listed("a.b.dense", ["ense", "dense.x", "a.b"])


def test_a_rank_of_4096_and_no_more(tmp_path: Path) -> None:
    tensors = {A: torch.ones(4096, 3), B: torch.ones(4, 4096)}
    assert PeftLora.open(write(tmp_path, tensors, r=4096)).shape(MODULE) == (4, 4096, 3)
    tensors = {A: torch.ones(4097, 3), B: torch.ones(4, 4097)}
    with pytest.raises(TensorError, match="expected 4096 rows"):
        PeftLora.open(write(tmp_path, tensors, r=4096)).shape(MODULE)
