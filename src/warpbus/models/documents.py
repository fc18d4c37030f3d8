"""Files of text as token ids: `.txt`, or `.jsonl` of texts or conversations. What training, calibration and evaluation
read."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from warpbus.errors import CheckpointError, DataError, UsageError
from warpbus.models.conversations import find_messages, template_inputs
from warpbus.models.templates import Message, Template
from warpbus.models.templates.base import Variables, check_messages
from warpbus.models.tokenizers import Tokenizer


@dataclass(frozen=True)
class Document:
    """A text or a conversation.

    Attributes:
        ids: its tokens.
        answers: for each token, whether it is to be predicted: the assistant's answers, or all of a plain text.
    """

    ids: list[int]
    answers: list[bool]

    def cut(self, length: int) -> "Document":
        """The first `length` tokens."""
        return Document(self.ids[:length], self.answers[:length])


def read_documents(
    path: Path, tokenizer: Tokenizer, template: Template | None, *, length: int, limit: int | None = None
) -> list[Document]:
    """The documents of a file, each of at most `length` tokens.

    A `.txt` is cut into documents of `length` tokens; each line of a `.jsonl` is one document (`read_line`);
    longer ones are cut.

    Raises:
        DataError: if the file is missing, holds no document, or a line is malformed (the message names the line).
    """
    documents = list(islice(_documents(path, tokenizer, template, length), limit))
    if not documents:
        raise DataError(f"{path}: no documents in it: expected lines like {{'messages': [...]}} or {{'text': ...}}")
    return documents


def _documents(path: Path, tokenizer: Tokenizer, template: Template | None, length: int) -> Iterator[Document]:
    if path.suffix == ".txt":
        yield from cut_text(read_text(path, tokenizer), tokenizer, length)
        return
    for where, line in read_lines(path):
        document = encode_line(where, line, tokenizer, template).cut(length)
        if len(document.ids) > 1:
            yield document


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a `.jsonl` that are not empty, each with `file:number` for messages."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{path}:{number}"
                if (text := _decode(where, line)).strip():
                    yield where, text
    except OSError as error:
        raise _unreadable(path, error) from None


def read_text(path: Path, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a plain text file."""
    try:
        text = _decode(str(path), path.read_bytes())
    except OSError as error:
        raise _unreadable(path, error) from None
    ids = tokenizer.encode(text)
    if len(ids) < 2:
        raise DataError(f"{path}: no text in it: expected at least two tokens")
    return ids


def cut_text(ids: list[int], tokenizer: Tokenizer, length: int, *, least: int = 2) -> Iterator[Document]:
    """The tokens of a text as documents of `length` tokens; see `text_document`.

    A last one with fewer than `least` tokens of the text is left out.

    Raises:
        DataError: if a document has no room for text behind the special tokens.
    """
    given = len(_empty_prompt(tokenizer))
    if length <= given:
        raise DataError(f"a document of {length} tokens has no room for text: give more than {given}")
    room = length - given
    for start in range(0, len(ids) - least + 1, room):
        yield text_document(ids[start : start + room], tokenizer)


def text_document(ids: list[int], tokenizer: Tokenizer, end: int | None = None) -> Document:
    """The tokens of a text that is to be predicted as a whole, and its `end`, a token that is to be predicted, too.

    It is what the model says to an empty prompt: the special tokens that a prompt consists of then come first.
    """
    given = _empty_prompt(tokenizer)
    answer = [*ids, end] if ids and end is not None else ids
    return Document([*given, *answer], [False] * len(given) + [True] * len(answer))


def _empty_prompt(tokenizer: Tokenizer) -> tuple[int, ...]:
    return (*tokenizer.prompt_prefix, *tokenizer.prompt_suffix)


def encode_line(
    where: str, line: str, tokenizer: Tokenizer, template: Template | None, *, end: int | None = None
) -> Document:
    """One line of a `.jsonl` (`read_line`); `where` names it in messages.

    A conversation has the answers that the template can mark in one sequence: of ChatGLM-6B it is the last alone, with
    all before it as its prompt (`Template.spans`). A text gets the token `end`.
    """
    content = read_line(where, line, template)
    try:
        if isinstance(content, str):
            return text_document(tokenizer.encode(content), tokenizer, end)
        messages, variables = content
        assert template is not None
        return Document(*template.spans(messages, variables=variables))
    except (UsageError, CheckpointError) as error:
        raise DataError(f"{where}: {error}") from None


def read_line(
    where: str, line: str, template: Template | None, *, learned: bool = True
) -> str | tuple[list[Message], Variables]:
    """The text of a line of a `.jsonl`, or its conversation as messages and variables for `Template.spans`.

    Args:
        where: the name of the line in messages.
        line: `{"text": ...}`, or a conversation under `messages` or `conversations` (`find_messages`), which may have
            `tools` (`template_inputs`).
        template: of the model, or None, and conversations are refused.
        learned: whether all answers of a conversation are learned.

    Raises:
        DataError: the line is malformed, or the conversation is none that the model can have.
    """
    record = parse_line(where, line)
    text = record.get("text")
    if isinstance(text, str):
        return text
    try:
        messages = find_messages(record)
        if messages is None:
            raise DataError(
                f"{where}: expected an object with 'messages' or 'conversations' (a conversation) or 'text'"
            )
        if template is None:
            raise DataError(f"{where}: a conversation, but the model has no chat template: use lines with 'text'")
        conversation, variables = template_inputs(messages, record.get("tools"), template, learned=learned)
        check_messages(conversation)
    except (UsageError, CheckpointError) as error:
        # General errors of a conversation get the number of its line.
        raise DataError(f"{where}: {error}") from None
    return conversation, variables


def parse_line(where: str, line: str) -> dict[str, Any]:
    """The JSON object in a line; `where` names it in messages."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg}): expected one object a line") from None
    except (ValueError, RecursionError):
        raise DataError(f"{where}: not JSON that can be read (too deep, or a number too long)") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected one JSON object a line, found {type(record).__name__}")
    return record


def _decode(where: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")  # some editors put a byte order mark first
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 (byte {error.start}): save it as UTF-8") from None


def _unreadable(path: Path, error: OSError) -> DataError:
    if path.exists():
        return DataError(f"{path}: cannot be read ({error.strerror}): expected a .jsonl or a .txt")
    return DataError(f"{path}: no such file: expected a .jsonl of conversations or texts, or a .txt")
