"""Multiple choice: what a question is, and which answer a model is said to choose."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from warpbus.errors import DataError, NumericError
from warpbus.evaluation import Question, choice_accuracy, read_questions
from warpbus.evaluation.choices import _likelihoods, _texts
from warpbus.formats import Checkpoint
from warpbus.models import Decoder, load_model
from warpbus.models.templates import Template, find_template
from warpbus.models.tokenizers import Tokenizer, load_tokenizer

WriteLines = Callable[..., Path]
ASKED = [{"role": "user", "content": "下一句：床前明月光"}]
QUESTION = {"messages": ASKED, "choices": ["疑是地上霜", "低头思故乡"], "answer": 1}


def test_questions_are_read(tmp_path: Path, write_lines: WriteLines) -> None:
    path = write_lines(tmp_path / "q.jsonl", QUESTION, "", {**QUESTION, "answer": 0})
    expected = [Question(ASKED, ["疑是地上霜", "低头思故乡"], answer) for answer in (1, 0)]
    assert read_questions(path) == expected
    assert read_questions(path, limit=1) == expected[:1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"answer": 2}, "expected 'answer', a number from 0 to 1"),
        ({"answer": -1}, "expected 'answer'"),
        ({"answer": True}, "expected 'answer'"),
        ({"answer": 1.0}, "expected 'answer'"),
        ({"answer": None}, "expected 'answer'"),
        ({"choices": ["a"]}, "expected 'choices', a list of two texts or more"),
        ({"choices": "ab"}, "expected 'choices'"),
        ({"choices": ["a", 1]}, "expected 'choices'"),
        ({"messages": []}, "expected 'messages'"),
        ({"messages": "a"}, "expected 'messages'"),
        ({"messages": [{"role": "poet", "content": "a"}]}, "unknown role 'poet'"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "a"}]}, "the last is its own"),
    ],
)
def test_a_malformed_question_is_named(
    change: dict[str, Any], said: str, tmp_path: Path, write_lines: WriteLines
) -> None:
    path = write_lines(tmp_path / "q.jsonl", QUESTION, {**QUESTION, **change})
    with pytest.raises(DataError, match=said) as raised:
        read_questions(path)
    assert str(raised.value).startswith(f"{path}:2: ")


def test_no_questions(tmp_path: Path, write_lines: WriteLines) -> None:
    with pytest.raises(DataError, match=r"q\.jsonl: no questions in it"):
        read_questions(write_lines(tmp_path / "q.jsonl", ""))
    with pytest.raises(DataError, match="no such file"):
        read_questions(tmp_path / "none.jsonl")


class Rigged(Decoder):
    """Finds some tokens likely wherever they stand."""

    def __init__(self, decoder: Decoder, likely: Sequence[int]) -> None:
        super().__init__(decoder.config)
        self.likely = likely

    def logits(self, hidden: Tensor) -> Tensor:
        scores = torch.zeros(*hidden.shape[:-1], self.config.vocab_size)
        scores[..., self.likely] = 5.0
        return scores


@pytest.fixture(scope="module")
def parts(tiny_model: Path) -> tuple[Decoder, Tokenizer, Template]:
    checkpoint = Checkpoint(tiny_model)
    tokenizer = load_tokenizer(tiny_model)
    template = find_template(tiny_model, checkpoint.config, tokenizer)
    assert template is not None
    return load_model(checkpoint, device="cpu", dtype=torch.float32), tokenizer, template


def test_a_rigged_model_chooses_as_it_was_rigged(parts: tuple[Decoder, Tokenizer, Template]) -> None:
    decoder, tokenizer, template = parts
    questions = [
        Question(ASKED, ["疑是地上霜", "举头望", "低头思故乡"], 1),
        Question(ASKED, ["举头", "地上霜霜霜"], 0),
        Question(ASKED, ["地上", "举举举举头望"], 0),
    ]
    rigged = Rigged(decoder, tokenizer.encode("举头望"))
    assert choice_accuracy(rigged, template, questions) == pytest.approx(2 / 3)
    assert choice_accuracy(Rigged(decoder, tokenizer.encode("地上霜")), template, questions[:1]) == 0.0


def test_earlier_answers_weigh_nothing(parts: tuple[Decoder, Tokenizer, Template]) -> None:
    """One likely token of two (with the stop token) beats three of seven; not so with forty unlikely ones before."""
    decoder, tokenizer, template = parts
    earlier = [*ASKED, {"role": "assistant", "content": "举" * 40}, *ASKED]
    rigged = Rigged(decoder, tokenizer.encode("霜"))
    assert choice_accuracy(rigged, template, [Question(earlier, ["霜霜霜地地地", "霜"], 1)]) == 1.0


@torch.no_grad()
def test_choices_are_those_of_a_slow_computation(parts: tuple[Decoder, Tokenizer, Template]) -> None:
    decoder, _, template = parts
    questions = [
        Question([{"role": "user", "content": f"下一句{index}"}], ["疑是地上霜", "举头", "低头思故乡"], index % 3)
        for index in range(12)
    ]
    right = 0
    for question in questions:
        means = []
        prompt = template.render(question.messages)
        for choice in question.choices:
            ids, _ = template.spans([*question.messages, {"role": "assistant", "content": choice}])
            log_probs = decoder(torch.tensor([ids]))[0].log_softmax(-1)
            each = [float(log_probs[index - 1, ids[index]]) for index in range(len(prompt), len(ids))]
            means.append(sum(each) / len(each))
        right += means.index(max(means)) == question.answer
    assert 0 < right < 12
    assert choice_accuracy(decoder, template, questions) == right / 12


class Watched(Decoder):
    """Counts the tokens that go through it."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.config)
        self.load_state_dict(decoder.state_dict())
        self.tokens = 0

    def embed(self, tokens_bt: Tensor) -> Tensor:
        self.tokens += tokens_bt.numel()
        return super().embed(tokens_bt)


@torch.no_grad()
def test_what_the_choices_share_is_computed_once(parts: tuple[Decoder, Tokenizer, Template]) -> None:
    decoder, _, template = parts
    question = Question([{"role": "user", "content": "床前明月光" * 20}], ["疑", "是", "地", "上"], 0)
    prompt = len(template.render(question.messages))
    watched = Watched(decoder)
    choice_accuracy(watched, template, [question])
    assert prompt > 100
    assert watched.tokens < prompt + 20


@torch.no_grad()
@pytest.mark.parametrize(
    "choices",
    [
        ["疑是", "疑是地上霜", "疑"],  # one begins like another
        ["霜", "霜", "霜地"],  # two are the same
        ["", "疑是地上霜"],  # one says nothing
        ["举头望明月", "低"],
    ],
)
def test_any_choices(parts: tuple[Decoder, Tokenizer, Template], choices: list[str]) -> None:
    decoder, _, template = parts
    earlier = [*ASKED, {"role": "assistant", "content": "疑是地上霜"}]
    means = []
    for messages in (ASKED, [*earlier, *ASKED]):
        prompt = template.render(messages)
        for choice in choices:
            ids, _ = template.spans([*messages, {"role": "assistant", "content": choice}])
            log_probs = decoder(torch.tensor([ids]))[0].log_softmax(-1)
            each = [float(log_probs[index - 1, ids[index]]) for index in range(len(prompt), len(ids))]
            means.append(sum(each) / len(each))
    questions = [Question(messages, choices, 0) for messages in (ASKED, [*earlier, *ASKED])]
    found = _likelihoods(decoder, [_texts(template, question) for question in questions])
    torch.testing.assert_close(found, torch.tensor(means), rtol=1e-4, atol=1e-5)


def test_a_broken_model(parts: tuple[Decoder, Tokenizer, Template]) -> None:
    decoder, _, template = parts
    broken = Decoder(decoder.config)
    broken.final_norm.weight.data.fill_(float("nan"))
    with pytest.raises(NumericError, match="NaN"):
        choice_accuracy(broken, template, [Question(**json.loads(json.dumps(QUESTION)))])
