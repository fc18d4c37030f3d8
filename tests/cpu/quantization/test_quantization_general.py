"""The packaged calibration texts: their form, their licences, and that every model can be calibrated on them."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from warpbus.models.templates import find_template
from warpbus.models.tokenizers import load_tokenizer
from warpbus.quantization import quantize, read_calibration
from warpbus.quantization.texts import GENERAL_TEXTS

LINES = [json.loads(line) for line in GENERAL_TEXTS.read_text(encoding="utf-8").splitlines()]


def prose(line):
    return line.get("text") or "".join(message["content"] for message in line["messages"])


def test_they_are_small_and_each_source_has_a_licence():
    assert GENERAL_TEXTS.stat().st_size <= 2_000_000
    table = GENERAL_TEXTS.with_name("README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| [^|]+ \| ([^|]+) \|$", table, re.MULTILINE)
    stated = {name: licence for names, _, licence in rows for name in names.split(", ")}
    found = Counter(line["source"] for line in LINES)
    assert set(stated) == set(found)
    assert all(licence.strip() for licence in stated.values())
    assert sum(int(count) for _, count, _ in rows) == len(LINES)


def test_they_hold_english_chinese_code_and_conversations():
    text = "".join(map(prose, LINES))
    assert len(re.findall(r"[\u4e00-\u9fff]", text)) > 70_000
    assert len(re.findall(r"\b[a-z]{3,}\b", text)) > 80_000
    assert "__global__" in text
    assert "def " in text
    conversations = [line["messages"] for line in LINES if "messages" in line]
    assert len(conversations) > 30
    for messages in conversations:
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert all(message["content"].strip() for message in messages)


def test_nothing_of_a_test_set_is_in_them():
    """What compares models before and after must not be what they were calibrated on."""
    data = GENERAL_TEXTS.parents[2] / "demo" / "data"
    text = "".join(map(prose, LINES))
    held_out = [json.loads(line) for line in (data / "validation.jsonl").read_text(encoding="utf-8").splitlines()]
    answers = [record["messages"][-1]["content"].splitlines()[0] for record in held_out]
    assert len(answers) == 500
    assert [answer for answer in answers if len(answer) > 10 and answer in text] == []


@pytest.fixture(params=["tiny_model", "tiny_chatglm"])
def model(request):
    return request.getfixturevalue(request.param)


def test_models_with_a_template_take_every_line(model: Path):
    tokenizer = load_tokenizer(model)
    template = find_template(model, json.loads((model / "config.json").read_text(encoding="utf-8")), tokenizer)
    assert template is not None
    data = read_calibration(GENERAL_TEXTS, tokenizer, template, samples=1000, seqlen=100_000, seed=0)
    assert len(data.sequences) == len(LINES)
    assert min(map(len, data.sequences)) > 1000


def test_a_model_without_a_template_gets_texts(model: Path):
    tokenizer = load_tokenizer(model)
    data = read_calibration(GENERAL_TEXTS, tokenizer, None, samples=1000, seqlen=2048, seed=0)
    assert len(data.sequences) == len(LINES)


def test_quantize_without_calibration_data(make_model, tmp_path):
    model = make_model(tmp_path / "tiny", hidden_size=128, intermediate_size=128, head_dim=64)
    report = quantize(model, tmp_path / "out", scheme="w4a16-g64", device="cpu", samples=2, seqlen=64)
    assert report.settings["calibration"] == "packaged general texts"
    assert report.calibration_tokens == 128
    rounded = quantize(model, tmp_path / "rtn", scheme="w4a16-g64", algorithm="rtn", device="cpu")
    assert rounded.settings == {}
