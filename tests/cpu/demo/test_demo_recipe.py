"""The recipe of glm-poet on a few made-up poems."""

import json
import lzma
import random
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from warpbus.demo import recipe
from warpbus.demo.poems import Poem, read_poem
from warpbus.evaluation import read_questions
from warpbus.formats import Checkpoint
from warpbus.models import read_config
from warpbus.models.templates import find_template
from warpbus.models.tokenizers import load_tokenizer
from warpbus.train import TrainingSettings, train

CHARACTERS = "春夜江山月明花落风来人归酒诗梦雨云水天地心秋寒高长空远白青声"


def made_up(rng: random.Random, number: int) -> dict[str, Any]:
    """A poem of four or eight verses, or one of verses of different lengths."""

    def verse(size: int) -> str:
        return "".join(rng.choices(CHARACTERS, k=size))

    size, couplets = rng.choice((5, 7)), rng.choice((1, 2, 4))
    lines = [f"{verse(size)}，{verse(size)}。" for _ in range(couplets)]
    if number % 9 == 0:
        lines.append(f"{verse(3)}？")
    return {"dynasty": rng.choice("唐宋"), "author": verse(2), "title": f"{verse(3)}", "lines": lines}


def write_poems(path: Path, count: int, seed: int) -> Path:
    rng = random.Random(seed)
    records = [made_up(rng, number) for number in range(count)]
    records.append({**records[0], "lines": ["□" * 5]})
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return path


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


MakeData = Callable[..., Path]


@pytest.fixture(scope="module")
def make_data(tmp_path_factory: pytest.TempPathFactory) -> MakeData:
    poems = tmp_path_factory.mktemp("poems")
    given = write_poems(poems / "train.jsonl.xz", 40, 1), write_poems(poems / "valid.jsonl.xz", 12, 2)

    def make(output: Path, *options: str) -> Path:
        words = ["recipe", "--train", str(given[0]), "--valid", str(given[1]), "--output", str(output)]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "argv", [*words, "--renderings", "3", "--vocab-size", "450", *options])
            recipe.main()
        return output

    return make


@pytest.fixture(scope="module")
def data(make_data: MakeData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data") / "poet")


def well_formed(messages: list[dict[str, str]]) -> bool:
    roles = [message["role"] for message in messages]
    return (
        len(messages) > 0
        and roles == ["user", "assistant"] * (len(messages) // 2)
        and all(message["content"].strip() for message in messages)
    )


def test_files_of_conversations(data: Path) -> None:
    training = lines_of(data / "train.jsonl")
    assert len(training) == 3 * 40  # the poem with a lost character is left out
    assert len(lines_of(data / "validation.jsonl")) == 12
    assert len(lines_of(data / "calibration.jsonl")) == 40
    for name in ("train", "validation", "calibration"):
        for record in lines_of(data / f"{name}.jsonl"):
            assert list(record) == ["messages"]
            assert well_formed(record["messages"]), record
    # Some conversations have more than one turn, and what the user asks varies.
    assert any(len(record["messages"]) > 2 for record in training)
    assert len({record["messages"][0]["content"] for record in training}) > 90


def test_questions_have_one_true_answer(data: Path) -> None:
    questions = read_questions(data / "next-verse.jsonl")
    assert 2 < len(questions) <= 12
    follows = {}
    for record in lines_of(data / "validation.jsonl"):
        couplets = record["messages"][1]["content"].split("\n")
        follows.update(pairwise(couplets))
    for question in questions:
        assert len(set(question.choices)) == 4
        assert len({len(choice) for choice in question.choices}) == 1
        given = question.messages[0]["content"].removeprefix("下一句：")
        assert question.choices[question.answer] == follows[given]
    assert len({question.answer for question in questions}) > 1


def test_the_same_poems_make_the_same_files(make_data: MakeData, data: Path, tmp_path: Path) -> None:
    again = make_data(tmp_path / "again")
    files = [path.relative_to(data) for path in sorted(data.rglob("*")) if path.is_file()]
    assert len(files) == 8
    for path in files:
        assert (data / path).read_bytes() == (again / path).read_bytes(), path


def test_fewer_poems_to_try_the_recipe(make_data: MakeData, tmp_path: Path) -> None:
    assert len(lines_of(make_data(tmp_path / "few", "--limit", "5") / "train.jsonl")) == 15


def test_configurations_of_mixtures_of_experts(make_data: MakeData, tmp_path: Path) -> None:
    config = read_config(Checkpoint(make_data(tmp_path / "data", "--model", "poet-moe-small") / "model", weights=False))
    assert (config.family, config.num_layers, config.has_experts) == ("glm4_moe", 4, True)
    (tmp_path / "config.json").write_text(json.dumps(recipe.config(8000, "poet-moe")), encoding="utf-8")
    larger = read_config(Checkpoint(tmp_path, weights=False))
    assert round(larger.num_parameters / 1e6, 1) == 29.7
    # Groups of 128 divide all matrices.
    assert all(matrix.columns.length % 128 == 0 for _, matrix in larger.matrices)


def test_the_model_directory_is_one_that_training_starts_from(data: Path, tmp_path: Path) -> None:
    directory = data / "model"
    checkpoint = Checkpoint(directory, weights=False)
    config = read_config(checkpoint)
    tokenizer = load_tokenizer(directory)
    assert config.family == "glm"
    assert config.vocab_size == tokenizer.vocab_size <= 450
    assert {name: recipe.special_id(name) for name in recipe.SPECIALS} == tokenizer.special_ids
    assert config.stop_ids == tuple(
        tokenizer.special_ids[name] for name in ("<|endoftext|>", "<|user|>", "<|observation|>")
    )
    text = "写一首题为《春夜》的五言绝句。Continue: ~\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    small = dict(checkpoint.config, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16)
    tiny = tmp_path / "tiny"
    tiny.mkdir()
    for path in directory.iterdir():
        (tiny / path.name).write_bytes(path.read_bytes())
    (tiny / "config.json").write_text(json.dumps(small), encoding="utf-8")
    settings = TrainingSettings(steps=2, length=128, rows_per_step=2, rows_at_once=2, warmup=1)
    summary = train(
        tiny,
        tmp_path / "out",
        data=data / "train.jsonl",
        valid=data / "validation.jsonl",
        settings=settings,
        device="cpu",
    )
    assert summary["documents"] == 120
    assert Checkpoint(tmp_path / "out").names()


def test_answers_are_what_is_trained_on(data: Path) -> None:
    tokenizer = load_tokenizer(data / "model")
    template = find_template(data / "model", Checkpoint(data / "model", weights=False).config, tokenizer)
    assert template is not None
    for record in lines_of(data / "train.jsonl")[:30]:
        ids, answers = template.spans(record["messages"])
        trained = [token for token, reported in zip(ids, answers, strict=True) if reported]
        said = "".join(message["content"] for message in record["messages"] if message["role"] == "assistant")
        assert tokenizer.decode(trained) == said
        # Each answer ends with the token that hands over to the user.
        assert trained.count(tokenizer.special_ids["<|user|>"]) == len(record["messages"]) // 2
        rendered = template.render(record["messages"][:1])
        assert ids[: len(rendered)] == rendered


def test_every_kind_of_conversation_keeps_to_its_poem() -> None:
    couplets = ("床前明月光，疑是地上霜。", "举头望明月，低头思故乡。")
    poem, other = Poem("唐", "李白", "静夜思", couplets), Poem("宋", "某", "春夜", couplets[:1])
    rng = random.Random(0)
    for _ in range(200):
        composed = recipe.compose(poem, rng)
        assert well_formed(composed)
        assert composed[1]["content"] == poem.text
        asked, answered = (message["content"] for message in recipe.continue_poem(poem, rng))
        assert asked.endswith(couplets[0])
        assert answered == couplets[1]
        turns = recipe.next_verse(poem, rng)
        assert well_formed(turns)
        said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        assert "".join(said) in poem.text.replace("\n", "")
        first = re.sub("[，。]", "", turns[0]["content"])
        before = poem.text.replace("\n", "").split(said[0])[0]
        assert re.sub("[，。]", "", before)[-5:] in first
        assert well_formed(recipe.converse(poem, rng, other))
        # A poem of one couplet can only be composed, or asked for its second half.
        assert well_formed(recipe.converse(other, rng, poem))


def test_a_form_is_asked_for_only_where_the_poem_has_it() -> None:
    rng = random.Random(0)
    uneven = read_poem(
        {"dynasty": "唐", "author": "某", "title": "夜", "lines": ["床前明月光，疑是霜。", "举头望，低头思故乡。"]}
    )
    assert uneven is not None
    asked = [recipe.compose(uneven, rng)[0]["content"] for _ in range(200)]
    assert not any(form in text for text in asked for form in ("绝句", "律诗", "古诗", "quatrain"))
    quatrain = Poem("唐", "李白", "静夜思", ("床前明月光，疑是地上霜。", "举头望明月，低头思故乡。"))
    asked = [recipe.compose(quatrain, rng)[0]["content"] for _ in range(200)]
    assert 80 < sum("五言绝句" in text for text in asked) < 160
    assert any("five-character quatrain" in text for text in asked)
    assert not any("七言" in text or "律诗" in text for text in asked)
