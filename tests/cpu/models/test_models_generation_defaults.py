"""Sampling parameters that a checkpoint recommends."""

import json

import pytest

from warpbus.errors import CheckpointError
from warpbus.models.generation_defaults import read_generation_defaults


def read(tmp_path, content):
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "generation_config.json").write_text(text)
    return read_generation_defaults(tmp_path)


def test_sampling_parameters_are_read(tmp_path):
    assert read_generation_defaults(tmp_path) == {}
    given = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05}
    others = {"do_sample": True, "eos_token_id": [1], "max_new_tokens": 5, "transformers_version": "5"}
    assert read(tmp_path, {**given, **others}) == given
    assert read(tmp_path, {"top_k": -1, "temperature": None}) == {"top_k": 0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ({"temperature": -1}, "temperature is -1: expected a number from 0 to 100"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"min_p": True}, "min_p is True"),
        ('{"repetition_penalty": NaN}', "repetition_penalty is nan"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, message):
    with pytest.raises(CheckpointError, match=r"generation_config\.json") as caught:
        read(tmp_path, content)
    assert message in str(caught.value)
