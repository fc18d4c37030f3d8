"""Multiple choice: which of several continuations is the most likely for a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch

from warpbus.errors import DataError, NumericError, UsageError
from warpbus.evaluation.likelihood import as_cached, grouped
from warpbus.models import Decoder
from warpbus.models.documents import Document, parse_line, read_lines
from warpbus.models.layers import BranchedAttention, CausalAttention
from warpbus.models.templates import Message, Template
from warpbus.models.templates.base import check_messages


@dataclass(frozen=True)
class Question:
    """A conversation that ends with the user, several answers, and the index of the right one."""

    messages: list[Message]
    choices: list[str]
    answer: int


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Questions from a `.jsonl`: `{"messages": [...], "choices": ["...", ...], "answer": 0}` a line.

    Raises:
        DataError: if the file is missing, empty, or a line malformed (the message names the line).
    """
    questions = [_question(where, parse_line(where, line)) for where, line in islice(read_lines(path), limit)]
    if not questions:
        raise DataError(f"{path}: no questions in it: expected lines with 'messages', 'choices' and 'answer'")
    return questions


def _question(where: str, record: dict[str, Any]) -> Question:
    messages, choices, answer = record.get("messages"), record.get("choices"), record.get("answer")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: expected 'messages', a conversation")
    try:
        check_messages(messages)
    except UsageError as error:
        raise DataError(f"{where}: {error}") from None
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: expected 'messages' that the assistant is to answer, the last is its own")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(choice, str) for choice in choices):
        raise DataError(f"{where}: expected 'choices', a list of two texts or more")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise DataError(f"{where}: expected 'answer', a number from 0 to {len(choices) - 1}")
    return Question(messages, choices, answer)


@torch.no_grad()
def choice_accuracy(model: Decoder, template: Template, questions: Sequence[Question]) -> float:
    """The accuracy: share of questions whose right answer has the highest mean log-likelihood per token, including its
    stop token.

    Raises:
        NumericError: if the model's scores are NaN or infinite.
    """
    texts = [_texts(template, question) for question in questions]
    likelihoods = _likelihoods(model, texts).cpu()
    if not likelihoods.isfinite().all():
        raise NumericError("a model's scores are NaN or infinite: it is damaged, or does not fit the dtype")
    of_questions = likelihoods.split([len(each) for each in texts])
    right = [int(each.argmax()) == question.answer for each, question in zip(of_questions, questions, strict=True)]
    return sum(right) / len(questions)


def _texts(template: Template, question: Question) -> list[Document]:
    """The conversation with each of the answers."""
    spans = [template.spans([*question.messages, {"role": "assistant", "content": text}]) for text in question.choices]
    return [Document(ids, _last_run(answers)) for ids, answers in spans]


@dataclass(frozen=True)
class _Row:
    """Texts with a common prefix: the prefix once, then the rest of each text, see `BranchedAttention`.

    Attributes:
        ids, positions, branches: of the tokens.
        scored: for each predicted token the index of the token before it, its id, and the number of its text.
    """

    ids: list[int]
    positions: list[int]
    branches: list[int]
    scored: list[tuple[int, int, int]]

    @classmethod
    def of(cls, texts: Sequence[Document], first: int) -> Self:
        """`first` is the number of the first text."""
        shared = min(text.answers.index(True) for text in texts)
        while len({tuple(text.ids[:shared]) for text in texts}) > 1:
            shared -= 1
        row = cls(texts[0].ids[:shared], [*range(shared)], [0] * shared, [])
        for branch, text in enumerate(texts, 1):
            before = shared - 1
            for position in range(shared, len(text.ids)):
                if text.answers[position] and position:
                    row.scored.append((before, text.ids[position], first + branch - 1))
                before = len(row.ids)
                row.ids.append(text.ids[position])
                row.positions.append(position)
                row.branches.append(branch)
        return row


def _likelihoods(model: Decoder, groups: Sequence[Sequence[Document]]) -> torch.Tensor:
    """The mean log-likelihood of the predicted tokens of each text. Texts of a group share a prefix."""
    branched = model.config.prompt_end is None  # else prompts are looked for in whole sequences
    if not branched:
        groups = [[text] for group in groups for text in group]
    rows: list[_Row] = []
    count = 0
    for group in groups:
        rows.append(_Row.of(group, count))
        count += len(group)
    device = next(model.parameters()).device
    sums, tokens = torch.zeros(count, device=device), torch.zeros(count, device=device)
    for picked in grouped([len(row.ids) for row in rows]):
        own = [rows[index] for index in picked]
        ids = _padded([row.ids for row in own], 0).to(device)
        if branched:
            positions = _padded([row.positions for row in own], 0).to(device)
            branches = _padded([row.branches for row in own], -1).to(device)
            hidden = model.hidden(ids, positions, as_cached(BranchedAttention(branches), model))
        else:
            hidden = model.hidden(ids, context=as_cached(CausalAttention(), model))
        scored = torch.tensor([(number, *each) for number, row in enumerate(own) for each in row.scored], device=device)
        number, before, expected, text = scored.view(-1, 4).unbind(1)
        log_probs = model.logits(hidden[number, before]).float().log_softmax(-1)
        sums.index_add_(0, text, log_probs.gather(1, expected[:, None])[:, 0])
        tokens.index_add_(0, text, torch.ones_like(sums[text]))
    return sums / tokens.clamp(min=1)


def _padded(rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows], dtype=torch.int64)


def _last_run(answers: list[bool]) -> list[bool]:
    """Mask all answers but the last: earlier answers of a conversation are part of the prompt."""
    end = len(answers) - answers[::-1].index(True)
    start = end
    while start > 0 and answers[start - 1]:
        start -= 1
    return [start <= index < end for index in range(len(answers))]
