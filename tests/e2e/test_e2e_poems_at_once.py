"""Several prompts to one model, as the example lets them be answered."""

import importlib.util
import re
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "poems_at_once.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("poems_at_once", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def poems(printed):
    return re.findall(r"^《(.+)》 \(stop\)\n((?:[\u4e00-\u9fff]{5}[，。]\n?){4})", printed, re.MULTILINE)


def test_every_title_gets_its_poem_and_seeds_repeat_them(example, capsys):
    assert example.main([]) == 0
    first = capsys.readouterr().out
    assert {title for title, _ in poems(first)} == set(example.TITLES)
    assert "tokens/s" in first
    assert example.main([]) == 0
    assert poems(capsys.readouterr().out) == poems(first)


def test_what_cannot_be_loaded_is_said_in_a_line(example, capsys, tmp_path):
    assert example.main([str(tmp_path / "nowhere")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "nowhere" in said
    assert said.count("\n") == 1
