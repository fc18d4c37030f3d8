"""Reads calibration data: a file of texts or conversations, from which sequences are drawn.

`GENERAL_TEXTS` is the packaged file for runs without one; `data/README.md` says what is in it.
"""

import random
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from warpbus.errors import CheckpointError, DataError, UsageError
from warpbus.models.documents import cut_text, parse_line, read_line, read_lines, read_text, text_document
from warpbus.models.templates import Message, Template
from warpbus.models.templates.base import Variables
from warpbus.models.tokenizers import Tokenizer
from warpbus.quantization.calibration import Calibration
from warpbus.quantization.options import QuantizationOptions

GENERAL_TEXTS = Path(__file__).parent / "data" / "general.jsonl"

_Content = str | tuple[list[Message], Variables]


def read_calibration(
    path: Path,
    tokenizer: Tokenizer,
    template: Template | None,
    *,
    seqlen: int,
    seed: int,
    samples: int | None = None,
    tokens: int | None = None,
) -> Calibration:
    """Read a file and draw sequences from it.

    Args:
        path: a `.txt`, cut into sequences of `seqlen` tokens; or a `.jsonl`, each line of which is one sequence:
            `{"text": ...}`, or a conversation, with its tools if it has any (`documents.read_line`).
        tokenizer, template: those of the model; a model without a template cannot use conversations, except those of
            `GENERAL_TEXTS`, which are used as texts.
        seqlen: maximum tokens per sequence; longer lines are cut, and conversations of ChatGLM-6B with a longer prompt
            are skipped.
        seed: random seed. The same file, seed and numbers give the same sequences, and a smaller number gives the first
            ones of a larger number.
        samples: maximum number of sequences.
        tokens: drawing stops when this number of tokens is reached. Without both, `QuantizationOptions.default_tokens`
            and `most_sequences`.

    Raises:
        DataError: if the file is missing, is not text, holds nothing to use, or has a malformed line (named).
    """
    if path.is_dir():
        raise DataError(f"{path}: is a directory: expected a .txt, or a .jsonl of texts or conversations")
    if not path.is_file():
        raise DataError(f"{path}: no such calibration file: expected a .txt, or a .jsonl of texts or conversations")
    if path.suffix == ".txt":
        pieces = [tuple(piece.ids) for piece in cut_text(read_text(path, tokenizer), tokenizer, seqlen, least=1)]
        random.Random(seed).shuffle(pieces)
        return _drawn(pieces, samples, tokens)
    if path.suffix != ".jsonl":
        raise DataError(f"{path}: calibration data has to be a .txt or a .jsonl: rename or convert it")
    # Every line is checked, also those that are not drawn; only those that are drawn are tokenized.
    read = _text if template is None and path == GENERAL_TEXTS else partial(read_line, template=template, learned=False)
    lines: list[tuple[str, _Content]] = [(where, read(where, line)) for where, line in read_lines(path)]
    random.Random(seed).shuffle(lines)
    drawn = _drawn(_sequences(lines, tokenizer, template, seqlen), samples, tokens)
    if not drawn.sequences:
        raise DataError(f'{path}: no usable line: expected lines such as {{"text": ...}} or {{"messages": [...]}}')
    return drawn


def _drawn(sequences: Iterable[tuple[int, ...]], samples: int | None, tokens: int | None) -> Calibration:
    """The first sequences: see `read_calibration`."""
    if samples is None and tokens is None:
        samples, tokens = QuantizationOptions.most_sequences, QuantizationOptions.default_tokens
    found: list[tuple[int, ...]] = []
    total = 0
    for sequence in sequences:
        found.append(sequence)
        total += len(sequence)
        if len(found) == samples or (tokens is not None and total >= tokens):
            break
    return Calibration(tuple(found))


def _sequences(
    lines: Iterable[tuple[str, _Content]], tokenizer: Tokenizer, template: Template | None, seqlen: int
) -> Iterator[tuple[int, ...]]:
    """The lines of a file as tokens, without those that cannot be used."""
    for where, content in lines:
        ids = _encode(where, content, tokenizer, template)[:seqlen]
        # Of a model whose prompts end in special tokens, a prompt that was cut before them is no sequence it knows.
        if ids and set(tokenizer.prompt_suffix) <= set(ids):
            yield tuple(ids)


def _text(where: str, line: str) -> str:
    """The text of a line of `GENERAL_TEXTS`, or the contents of its conversation as one."""
    record = parse_line(where, line)
    text: str | None = record.get("text")
    return text if text is not None else "\n\n".join(message["content"] for message in record["messages"])


def _encode(where: str, content: _Content, tokenizer: Tokenizer, template: Template | None) -> list[int]:
    try:
        if isinstance(content, str):
            return text_document(tokenizer.encode(content), tokenizer).ids
        assert template is not None
        messages, variables = content
        return template.spans(messages, variables=variables)[0]
    except (UsageError, CheckpointError) as error:
        raise DataError(f"{where}: {error}") from None
