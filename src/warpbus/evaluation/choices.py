"""Multiple choice: which of several continuations a model finds likeliest."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from warpbus.errors import DataError
from warpbus.evaluation.batches import batches
from warpbus.models import Decoder
from warpbus.models.documents import Document, parse_line, read_lines
from warpbus.models.templates import Message, Template


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
    questions = []
    for where, line in islice(read_lines(path), limit):
        record = parse_line(where, line)
        messages, choices, answer = record.get("messages"), record.get("choices"), record.get("answer")
        if not isinstance(messages, list) or not isinstance(choices, list) or answer not in range(len(choices)):
            raise DataError(f"{where}: expected 'messages', a list 'choices' and 'answer', an index into it")
        questions.append(Question(messages, choices, answer))
    if not questions:
        raise DataError(f"{path}: no questions in it")
    return questions


@torch.no_grad()
def choice_accuracy(model: Decoder, template: Template, questions: Sequence[Question]) -> float:
    """The share of questions whose right answer has the highest mean log-likelihood a token."""
    documents, owners = [], []
    for number, question in enumerate(questions):
        for choice in question.choices:
            ids, answers = template.spans([*question.messages, {"role": "assistant", "content": choice}])
            # Earlier answers of the conversation are given, only the last one is weighed.
            start = len(template.render(question.messages))
            documents.append(Document(ids, [index >= start and told for index, told in enumerate(answers)]))
            owners.append(number)
    likelihoods = torch.zeros(len(documents))
    device = next(model.parameters()).device
    for picked, ids_bt, predicted in batches(documents, device):
        chosen = predicted[:, 1:]
        rows = chosen.nonzero()[:, 0]
        log_probs = model.logits(model.hidden(ids_bt)[:, :-1][chosen]).float().log_softmax(-1)
        each = log_probs.gather(1, ids_bt[:, 1:][chosen][:, None])[:, 0]
        sums = torch.zeros(len(picked), device=device).index_add_(0, rows, each)
        likelihoods[picked] = (sums / chosen.sum(1).clamp(min=1)).cpu()
    right = start = 0
    for question in questions:
        best = int(likelihoods[start : start + len(question.choices)].argmax())
        right += best == question.answer
        start += len(question.choices)
    return right / len(questions)
