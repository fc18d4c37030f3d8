"""Multiple choice: which of several continuations a model finds likeliest."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from warpbus.errors import DataError, NumericError, UsageError
from warpbus.evaluation.batches import batches
from warpbus.models import Decoder
from warpbus.models.documents import Document, parse_line, read_lines
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
    """The share of questions whose right answer has the highest mean log-likelihood a token, its stop token included.

    Raises:
        NumericError: if the model's scores are NaN or infinite.
    """
    documents = []
    for question in questions:
        for choice in question.choices:
            ids, answers = template.spans([*question.messages, {"role": "assistant", "content": choice}])
            documents.append(Document(ids, _last_run(answers)))
    likelihoods = torch.zeros(len(documents))
    device = next(model.parameters()).device
    for picked, ids_bt, predicted in batches(documents, device):
        chosen = predicted[:, 1:]
        rows = chosen.nonzero()[:, 0]
        log_probs = model.logits(model.hidden(ids_bt)[:, :-1][chosen]).float().log_softmax(-1)
        each = log_probs.gather(1, ids_bt[:, 1:][chosen][:, None])[:, 0]
        sums = torch.zeros(len(picked), device=device).index_add_(0, rows, each)
        likelihoods[picked] = (sums / chosen.sum(1).clamp(min=1)).cpu()
    if not likelihoods.isfinite().all():
        raise NumericError("a model's scores are NaN or infinite: it is damaged, or does not fit the dtype")
    right = start = 0
    for question in questions:
        best = int(likelihoods[start : start + len(question.choices)].argmax())
        right += best == question.answer
        start += len(question.choices)
    return right / len(questions)


def _last_run(answers: list[bool]) -> list[bool]:
    """Earlier answers of a conversation are given: only the last is weighed."""
    end = len(answers) - answers[::-1].index(True)
    start = end
    while start > 0 and answers[start - 1]:
        start -= 1
    return [start <= index < end for index in range(len(answers))]
