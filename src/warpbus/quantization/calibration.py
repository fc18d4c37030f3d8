"""What a model is calibrated on: a file of texts or conversations as batches of tokens. Knows nothing of layers."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import DataError, UsageError
from warpbus.models.documents import parse_line, read_lines, read_text
from warpbus.models.templates import Template
from warpbus.models.tokenizers import Tokenizer

# The names that conversations exported by other programs have for the roles.
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}


@dataclass(frozen=True)
class TokenBatch:
    """Sequences side by side, padded on the right.

    Attributes:
        ids: int64 `[batch, tokens]`.
        real: bool `[batch, tokens]`, false where there is padding.
    """

    ids: Tensor
    real: Tensor


@dataclass(frozen=True)
class Calibration:
    """The token ids of each sequence, none empty."""

    sequences: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """How many tokens there are, padding not counted."""
        return sum(map(len, self.sequences))

    def batches(self, tokens: int) -> list[TokenBatch]:
        """Sequences of similar length together, longest first, at most `tokens` a batch with its padding.

        A sequence longer than that is a batch of its own.
        """
        waiting = sorted(self.sequences, key=len, reverse=True)
        found = []
        while waiting:
            longest = len(waiting[0])
            count = max(1, tokens // longest)
            picked, waiting = waiting[:count], waiting[count:]
            ids = torch.zeros(len(picked), longest, dtype=torch.int64)
            real = torch.zeros(len(picked), longest, dtype=torch.bool)
            for row, sequence in enumerate(picked):
                ids[row, : len(sequence)] = torch.tensor(sequence)
                real[row, : len(sequence)] = True
            found.append(TokenBatch(ids, real))
        return found


def read_calibration(
    path: Path, tokenizer: Tokenizer, template: Template | None, *, samples: int, seqlen: int, seed: int
) -> Calibration:
    """Read a file and draw sequences from it.

    Args:
        path: a `.txt`, cut into sequences of `seqlen` tokens; or a `.jsonl`, each line of which is one sequence:
            `{"text": ...}`, or a conversation under `messages` or `conversations`.
        tokenizer, template: of the model; a model without a template takes no conversations.
        samples: how many sequences are drawn at most.
        seqlen: the longest sequence in tokens; longer lines are cut.
        seed: of the draw. The same file, seed and numbers give the same sequences.

    Raises:
        DataError: if the file is missing, is not text, holds nothing to use, or has a malformed line (named).
    """
    if not path.is_file():
        raise DataError(f"{path}: no such calibration file: expected a .txt, or a .jsonl of texts or conversations")
    if path.suffix == ".txt":
        ids = read_text(path, tokenizer)
        pieces = [tuple(ids[start : start + seqlen]) for start in range(0, len(ids), seqlen)]
        random.Random(seed).shuffle(pieces)
        return Calibration(tuple(pieces[:samples]))
    if path.suffix != ".jsonl":
        raise DataError(f"{path}: calibration data has to be a .txt or a .jsonl: rename or convert it")
    # Every line is checked, also those that are not drawn; only those that are drawn are tokenized.
    records = [(where, _content(where, parse_line(where, line))) for where, line in read_lines(path)]
    random.Random(seed).shuffle(records)
    sequences: list[tuple[int, ...]] = []
    for where, content in records:
        if len(sequences) == samples:
            break
        if ids := _encode(where, content, tokenizer, template)[:seqlen]:
            sequences.append(tuple(ids))
    if not sequences:
        raise DataError(f'{path}: no usable line: expected lines such as {{"text": ...}} or {{"messages": [...]}}')
    return Calibration(tuple(sequences))


def _content(where: str, record: dict[str, Any]) -> str | list[dict[str, str]]:
    """The text or the conversation of a line; DataError if it has neither."""
    text = record.get("text")
    if isinstance(text, str):
        return text
    messages = record.get("messages", record.get("conversations"))
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: expected a text under 'text', or a list under 'messages' or 'conversations'")
    return [_message(where, message) for message in messages]


def _message(where: str, message: object) -> dict[str, str]:
    if isinstance(message, dict):
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if isinstance(role, str) and isinstance(content, str):
            return {"role": _ROLES.get(role, role), "content": content}
    raise DataError(
        f"{where}: expected messages such as {{'role': 'user', 'content': ...}}, found {str(message)[:60]!r}"
    )


def _encode(
    where: str, content: str | list[dict[str, str]], tokenizer: Tokenizer, template: Template | None
) -> list[int]:
    if isinstance(content, str):
        return tokenizer.encode(content)
    if template is None:
        raise DataError(f"{where}: a conversation, but the model has no chat template: use lines with 'text'")
    try:
        return template.spans(content)[0]
    except UsageError as error:
        raise DataError(f"{where}: {error}") from None
