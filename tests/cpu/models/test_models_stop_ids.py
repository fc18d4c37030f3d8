"""Where each model's answers end: what its published files say, and what they leave out."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from warpbus.formats import Checkpoint
from warpbus.models import read_config
from warpbus.models.templates import load_template
from warpbus.models.tokenizers.ranks import GLM4_SPECIALS
from warpbus.models.tokenizers.spm import CHATGLM2_SPECIALS, CHATGLM3_SPECIALS

CHATGLM = {
    "model_type": "chatglm",
    "hidden_size": 4096,
    "inner_hidden_size": 16384,
    "layernorm_epsilon": 1e-5,
    "max_sequence_length": 2048,
    "num_attention_heads": 32,
    "num_layers": 28,
    "position_encoding_2d": True,
}
CHATGLM2 = {
    "model_type": "chatglm",
    "_name_or_path": "THUDM/chatglm2-6b",
    "add_qkv_bias": True,
    "ffn_hidden_size": 13696,
    "hidden_size": 4096,
    "kv_channels": 128,
    "layernorm_epsilon": 1e-5,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 32,
    "num_layers": 28,
    "padded_vocab_size": 65024,
    "seq_length": 32768,
    "eos_token_id": 2,
}
GLM4_STOPS = [151329, 151336, 151338]
NATIVE = {
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 151552,
    "max_position_embeddings": 32768,
    "eos_token_id": GLM4_STOPS,
}
SECOND = {text: 64789 + i for i, text in enumerate(CHATGLM2_SPECIALS)}
THIRD = {text: 64789 + i for i, text in enumerate(CHATGLM3_SPECIALS)}


def first(shift: int) -> dict[str, int]:
    return {"[gMASK]": shift + 130001, "<sop>": shift + 130004, "<eop>": shift + 130005}


@pytest.mark.parametrize(
    ("config", "specials", "tokenizer_config", "expected"),
    [
        (CHATGLM | {"vocab_size": 130528, "bos_token_id": 130004, "eos_token_id": 130005}, first(0), {}, {130005}),
        (CHATGLM | {"vocab_size": 150528, "bos_token_id": 150004}, first(20000), {"eos_token": "<eop>"}, {150005}),
        (CHATGLM2, SECOND, {}, {2}),
        (CHATGLM2 | {"_name_or_path": "THUDM/chatglm3-6b", "seq_length": 8192}, THIRD, {}, {2, 64795, 64797}),
        (
            CHATGLM2 | {"padded_vocab_size": 151552, "eos_token_id": GLM4_STOPS, "num_layers": 40},
            GLM4_SPECIALS,
            {"eos_token": "<|endoftext|>"},
            set(GLM4_STOPS),
        ),
        # A file that names the end of texts alone.
        (
            CHATGLM2 | {"padded_vocab_size": 151552, "eos_token_id": 151329, "num_layers": 40},
            GLM4_SPECIALS,
            {},
            set(GLM4_STOPS),
        ),
        (NATIVE | {"model_type": "glm"}, GLM4_SPECIALS, {"chat_template": "[gMASK]"}, set(GLM4_STOPS)),
        (NATIVE | {"model_type": "glm4"}, GLM4_SPECIALS, {"chat_template": "[gMASK]"}, set(GLM4_STOPS)),
    ],
    ids=["chatglm", "chatglm-first", "chatglm2", "chatglm3", "glm-4", "glm-4-base", "glm", "glm4"],
)
def test_answers_end_where_the_models_end_them(
    tmp_path: Path,
    config: dict[str, Any],
    specials: dict[str, int],
    tokenizer_config: dict[str, Any],
    expected: set[int],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    suffix = (specials["[gMASK]"], specials["<sop>"]) if "<eop>" in specials and "<|user|>" not in specials else ()
    tokenizer: Any = SimpleNamespace(special_ids=specials, strips={}, prompt_suffix=suffix)
    template = load_template(tmp_path, config, tokenizer)
    found = read_config(Checkpoint(tmp_path, weights=False)).stop_ids
    assert {*found, *template.stop_ids} == expected
