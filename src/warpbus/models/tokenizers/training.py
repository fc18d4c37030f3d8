"""Trains a SentencePiece vocabulary of single characters, as a small model of Chinese verse wants it."""

from __future__ import annotations

import contextlib
import io
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece

from warpbus.errors import DataError, StorageError, UsageError

# The characters with a meaning of their own in SentencePiece's training data: space, unknown mark, column, end.
_RESERVED = frozenset("\u2581\u2585\t\0")
_BYTES = 256
_SENTENCE = 500


def train_sentencepiece(
    texts: Iterable[str], output: Path, *, vocab_size: int, specials: Sequence[str], required_chars: str
) -> int:
    """Writes a SentencePiece model whose pieces are single characters; returns its number of pieces.

    Ids: 0 is `<unk>`, which never appears since every other character is spelled in bytes; then `specials` as control
    symbols in their order from 1 on; then the 256 byte pieces; then the space, all of `required_chars`, and the most
    frequent characters of `texts` as far as `vocab_size` goes. If `texts` hold fewer characters the model is smaller.
    Text passes unchanged: no normalization, no space added or removed, a line feed is a character like others.

    The characters are counted here, not by SentencePiece's trainer: that one lets required characters fall out of a
    full vocabulary. It gets one short text with exactly the characters chosen.

    Raises UsageError if `vocab_size` has no room for what is required, DataError if `texts` is empty, StorageError if
    `output` cannot be written.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    if not counts:
        raise DataError("the texts to train a vocabulary on are empty: expected at least one character")
    required = dict.fromkeys(c for c in " " + required_chars if c not in _RESERVED)
    room = vocab_size - 1 - len(specials) - _BYTES
    if room < len(required):
        raise UsageError(
            f"vocab_size {vocab_size} is too small: {1 + len(specials) + _BYTES + len(required)} pieces are required "
            "(specials, bytes, required_chars); raise vocab_size"
        )
    chosen = list(required)
    # Ties are broken by code point, so that the vocabulary does not depend on the order of the texts.
    for char, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(chosen) == room:
            break
        if char not in required and char not in _RESERVED and not "\ud800" <= char <= "\udfff":
            chosen.append(char)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=("".join(chosen[i : i + _SENTENCE]) for i in range(0, len(chosen), _SENTENCE)),
        model_writer=model,
        model_type="char",
        vocab_size=1 + len(specials) + _BYTES + len(chosen),
        control_symbols=list(specials),
        unk_id=0,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    _write(output, model.getvalue())
    return 1 + len(specials) + _BYTES + len(chosen)


def _write(output: Path, data: bytes) -> None:
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(output)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise StorageError(
            f"{output}: cannot be written ({error.strerror}); choose another path or free space"
        ) from None
