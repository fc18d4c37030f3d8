"""Tokenizes conversations and texts and packs them into rows.

A row of `length` tokens holds several documents. Each token attends only to its own document (`documents`), and its
position starts at 0 in each document. It has a target (`targets`) only if the next token is part of an answer or of a
plain text.
"""

import hashlib
import multiprocessing
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from warpbus.errors import DataError
from warpbus.models.documents import cut_text, encode_line, read_lines, read_text
from warpbus.models.templates import find_template, find_text_end
from warpbus.models.tokenizers import Tokenizer, load_tokenizer

IGNORED = -100  # the target that cross-entropy ignores


@dataclass(frozen=True)
class Documents:
    """Tokenized documents, concatenated.

    Attributes:
        tokens: int32 `[total]`.
        answers: bool `[total]`, true for tokens to be learnt.
        offsets: int64 `[documents + 1]`, the start of each document.
        truncated: how many documents were longer.
        dropped: how many documents of the file are not here, because nothing in them can be learnt.

    Each document has at least two tokens, and a token to be learnt that is not its first.
    """

    tokens: NDArray[np.int32]
    answers: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    truncated: int = 0
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def counts(self) -> dict[str, int]:
        """The numbers of documents, of those that were cut, and of those that were left out."""
        return {"documents": len(self), "truncated": self.truncated, "dropped": self.dropped}

    def digest(self) -> str:
        """A hash of the documents."""
        hashed = hashlib.blake2b(digest_size=16)
        for array in (self.tokens, self.answers, self.offsets):
            hashed.update(array.tobytes())
        return hashed.hexdigest()


@dataclass(frozen=True)
class PackedBatch:
    """A batch of packed rows, each tensor int64 `[rows, length]`."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor

    def pick(self, rows: slice) -> "PackedBatch":
        """The batch of some of the rows."""
        return PackedBatch(self.tokens[rows], self.targets[rows], self.positions[rows], self.documents[rows])

    def to(self, device: torch.device) -> "PackedBatch":
        def move(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

        return PackedBatch(move(self.tokens), move(self.targets), move(self.positions), move(self.documents))


def tokenize(path: Path, model: Path, config: dict[str, Any], *, length: int, workers: int = 1) -> Documents:
    """Read a `.jsonl` of conversations (`messages`) or texts (`text`), or a `.txt`, and tokenize it.

    A text of a `.jsonl` ends with the tokenizer's end-of-sequence token, as an answer does with its stop token.
    Documents with nothing to learn (no answer begins within `length` tokens) are dropped.

    Args:
        path: the file; a `.txt` is split into documents of `length` tokens.
        model: the directory with the tokenizer and the chat template.
        config: the model's parsed `config.json`.
        length: longer documents are truncated.
        workers: number of tokenizing processes.

    Raises:
        DataError: the file is missing, has nothing to learn, or a line of it is malformed.
    """
    if path.suffix == ".txt":
        return _tokenize_text(path, load_tokenizer(model), length)
    encode = partial(_encode_lines, model, config, length)
    chunks = _chunks(read_lines(path), 4096)
    if workers > 1:
        # Spawned, not forked: this process may already have threads and a CUDA context, which do not survive a fork.
        with _without_interrupts():
            pool = multiprocessing.get_context("spawn").Pool(workers)
        with pool:
            parts = list(pool.imap(encode, chunks))
    else:
        parts = [encode(chunk) for chunk in chunks]
    if not any(len(part.lengths) for part in parts):
        raise DataError(
            f"{path}: nothing to learn in it: expected lines like {{'messages': [...]}}, with an answer of the "
            f"assistant that begins within {length} tokens, or {{'text': ...}}"
        )
    lengths = np.concatenate([part.lengths for part in parts])
    return Documents(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.answers for part in parts]),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
        sum(part.truncated for part in parts),
        sum(part.dropped for part in parts),
    )


_Lines = list[tuple[str, str]]


class _TokenizedLines(NamedTuple):
    """The documents of some lines; `lengths` has one number per document, the rest is as in `Documents`."""

    tokens: NDArray[np.int32]
    answers: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    truncated: int
    dropped: int


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A block whose child processes ignore Ctrl-C, which a terminal sends to all: this process ends them.

    Otherwise each of them would print a stack trace, also one that is still importing modules.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _chunks(lines: Iterable[tuple[str, str]], size: int) -> Iterator[_Lines]:
    iterator = iter(lines)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _encode_lines(model: Path, config: dict[str, Any], length: int, lines: _Lines) -> _TokenizedLines:
    tokenizer = load_tokenizer(model)
    template = find_template(model, config, tokenizer)
    end = find_text_end(model, config, tokenizer)  # otherwise a model that is trained on texts would never stop
    tokens: list[int] = []
    answers: list[bool] = []
    lengths: list[int] = []
    truncated = 0
    for where, line in lines:
        whole = encode_line(where, line, tokenizer, template, end=end)
        document = whole.cut(length)
        if any(document.answers[1:]):
            tokens += document.ids
            answers += document.answers
            lengths.append(len(document.ids))
            truncated += len(whole.ids) > length
    arrays = np.array(tokens, np.int32), np.array(answers, np.bool_), np.array(lengths, np.int64)
    return _TokenizedLines(*arrays, truncated, len(lines) - len(lengths))


def _tokenize_text(path: Path, tokenizer: Tokenizer, length: int) -> Documents:
    pieces = list(cut_text(read_text(path, tokenizer), tokenizer, length))
    return Documents(
        np.concatenate([np.array(piece.ids, np.int32) for piece in pieces]),
        np.concatenate([np.array(piece.answers, np.bool_) for piece in pieces]),
        np.cumsum([0, *[len(piece.ids) for piece in pieces]], dtype=np.int64),
    )


def pack(documents: Documents, order: Sequence[int] | NDArray[np.int64], length: int) -> list[NDArray[np.int64]]:
    """Fill rows of `length` tokens with whole documents, in the order given.

    Args:
        documents: none longer than `length`.
        order: indexes of documents.
        length: tokens per row.

    Returns:
        for each row, the indexes of its documents.
    """
    sizes = np.diff(documents.offsets)[order]
    rows: list[NDArray[np.int64]] = []
    start = filled = 0
    for index, size in enumerate(sizes.tolist()):
        if filled + size > length:
            rows.append(np.asarray(order[start:index], np.int64))
            start, filled = index, 0
        filled += size
    rows.append(np.asarray(order[start:], np.int64))
    return rows


def assemble(documents: Documents, rows: Sequence[NDArray[np.int64]], length: int) -> PackedBatch:
    """The tokens, targets, positions and document numbers of packed rows."""
    shape = (len(rows), length)
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    targets = np.full(shape, IGNORED, np.int64)
    # Padding is a separate document: no other token attends to it.
    numbers = np.full(shape, -1, np.int64)
    for row, members in enumerate(rows):
        starts, ends = documents.offsets[members], documents.offsets[members + 1]
        sizes = ends - starts
        total = int(sizes.sum())
        ids = np.repeat(np.arange(len(members)), sizes)
        within = np.arange(total) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        source = np.repeat(starts, sizes) + within
        tokens[row, :total] = documents.tokens[source]
        positions[row, :total] = within
        numbers[row, :total] = ids
        following = (ids[1:] == ids[:-1]) & documents.answers[source[1:]]
        targets[row, : total - 1] = np.where(following, tokens[row, 1:total], IGNORED)
    return PackedBatch(*(torch.from_numpy(array) for array in (tokens, targets, positions, numbers)))


@dataclass(frozen=True)
class Batches:
    """The batches of a run, for each step and each of `world` processes.

    Every epoch is shuffled by `seed` and the epoch number. The batch of a step depends only on its index, so that a run
    can be resumed.
    """

    documents: Documents
    length: int
    rows_per_step: int
    seed: int

    def steps(self, start: int, total: int, rank: int = 0, world: int = 1) -> Iterator[PackedBatch]:
        """The batches of steps `start` to `total - 1` for process `rank` of `world`."""
        step = epoch = 0
        carried: list[NDArray[np.int64]] = []
        while step < total:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.documents))
            carried += pack(self.documents, order, self.length)
            whole = len(carried) // self.rows_per_step
            for index in range(whole):
                if step >= total:
                    return
                if step >= start:
                    rows = carried[index * self.rows_per_step : (index + 1) * self.rows_per_step]
                    yield assemble(self.documents, rows[rank::world], self.length)
                step += 1
            carried = carried[whole * self.rows_per_step :]
            epoch += 1

    def steps_per_epoch(self) -> float:
        """Approximate number of steps per epoch."""
        rows = pack(self.documents, np.arange(len(self.documents)), self.length)
        return len(rows) / self.rows_per_step
