"""`warpbus eval` as a person uses it."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from warpbus.cli import app
from warpbus.errors import CheckpointError, UsageError


@pytest.fixture
def data(tmp_path, write_lines):
    turns = [{"role": "user", "content": "写诗"}, {"role": "assistant", "content": "床前明月光，疑是地上霜。"}]
    return write_lines(tmp_path / "data.jsonl", {"messages": turns}, {"text": "举头望明月，低头思故乡。"})


@pytest.fixture
def choices(tmp_path, write_lines):
    asked = [{"role": "user", "content": "下一句：床前明月光"}]
    return write_lines(
        tmp_path / "choices.jsonl", {"messages": asked, "choices": ["疑是地上霜", "低头思故乡"], "answer": 0}
    )


def invoke(*arguments):
    words = ["eval", *[str(argument) for argument in arguments], "--device", "cpu"]
    return CliRunner().invoke(app, words, catch_exceptions=False, env={"COLUMNS": "160"})


def test_a_table_a_picture_and_a_page(tiny_model, tmp_path, data, choices):
    picture, page = tmp_path / "new" / "a.png", tmp_path / "a.html"
    found = invoke(tiny_model, "--data", data, "--choices", choices, "--no-speed", "--plot", picture, "--html", page)
    assert found.exit_code == 0
    assert "tiny on data.jsonl" in found.stdout
    assert "choices" in found.stdout
    assert "tokens/s" not in found.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "<h1>tiny on data.jsonl</h1>" in page.read_text(encoding="utf-8")


def test_json_is_all_of_stdout(tiny_model, make_model, tmp_path, data):
    other = make_model(tmp_path / "other", seed=1)
    found = invoke(tiny_model, other, "--data", data, "--limit", 1, "--json")
    assert found.exit_code == 0
    first, second = json.loads(found.stdout)
    assert (first["name"], second["name"]) == ("tiny", "other")
    assert first["tokens"] == second["tokens"] == 13
    assert (first["divergence"], first["agreement"], first["accuracy"]) == (0.0, 1.0, None)
    assert second["divergence"] > 0
    assert first["tokens_per_second"] > 0
    assert first["peak_bytes"] > first["weight_bytes"]


def test_models_of_one_name_are_reported_by_their_paths(tiny_model, tmp_path, data, monkeypatch):
    for name in ("a", "b"):
        shutil.copytree(tiny_model, tmp_path / name / "tiny")
    monkeypatch.chdir(tmp_path / "b" / "tiny")
    found = invoke(tmp_path / "a" / "tiny", ".", "--data", data, "--no-speed", "--json")
    assert [each["name"] for each in json.loads(found.stdout)] == [str(tmp_path / "a" / "tiny"), "."]
    with pytest.raises(UsageError, match="two models have one name"):
        invoke(tiny_model, tiny_model, "--data", data, "--no-speed")


def test_the_packaged_data_by_default_and_by_name(tiny_model, monkeypatch):
    given = {}

    def measure(models, **options):
        given.update(options, models=models)
        raise CheckpointError("enough")

    monkeypatch.setattr("warpbus.evaluation.evaluate", measure)
    with pytest.raises(CheckpointError, match="enough"):
        invoke("demo", "--dtype", "bfloat16")
    assert [name for name, _ in given["models"]] == ["glm-poet"]
    assert (given["data"].name, given["questions"].name) == ("validation.jsonl", "next-verse.jsonl")
    assert str(given["dtype"]) == "torch.bfloat16"
    with pytest.raises(CheckpointError, match="enough"):
        invoke(tiny_model, "--data", "demo", "--choices", "own.jsonl")
    assert (given["data"].name, given["questions"].name) == ("validation.jsonl", "own.jsonl")


def test_what_cannot_be(tiny_model, data, tmp_path):
    with pytest.raises(UsageError, match="--data is missing"):
        invoke(tiny_model)
    with pytest.raises(UsageError, match="dtype is 'int8'"):
        invoke(tiny_model, "--data", data, "--dtype", "int8")
    with pytest.raises(CheckpointError, match="there is no such directory"):
        invoke(tmp_path / "none", "--data", data)
    assert invoke().exit_code == 2
