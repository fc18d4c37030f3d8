"""Damage to valid messages, as fuzzing wants it: bits, lengths, pieces of others, values in other values' places."""

import faulthandler
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_EXTREMES = tuple(
    struct.pack(form, value)
    for form, values in (
        ("<B", (0, 1, 0x7F, 0x80, 0xFF)),
        ("<I", (0, 1, 15, 2**16, 2**20 + 1, 2**24, 10**6 + 1, 2**31 - 1, 2**31, 2**32 - 1)),
        ("<Q", (0, 1, 2**31, 2**32, 2**40, 2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 1)),
        ("<d", (float("nan"), float("inf"), -0.0)),
    )
    for value in values
)


def _flip(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    for _ in range(1 + int(rng.random() * 4)):
        data[int(rng.random() * len(data))] ^= 1 << int(rng.random() * 8)


def _byte(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    data[int(rng.random() * len(data))] = int(rng.random() * 24)  # tags, kinds and instructions are small


def _truncate(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    del data[int(rng.random() * len(data)) :]


def _insert(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    at = int(rng.random() * len(data))
    data[at:at] = rng.randbytes(1 + int(rng.random() * 12))


def _delete(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    at = int(rng.random() * len(data))
    del data[at : at + 1 + int(rng.random() * 12)]


def _repeat(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    at = int(rng.random() * len(data))
    piece = data[at : at + 1 + int(rng.random() * 40)]
    data[at:at] = piece * (1 + int(rng.random() * 8))


def _extreme(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    value = rng.choice(_EXTREMES)
    at = int(rng.random() * len(data))
    data[at : at + len(value)] = value


def _splice(data: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    other = rng.choice(others)
    start, end = sorted((int(rng.random() * len(other)), int(rng.random() * (len(other) + 1))))
    at = int(rng.random() * len(data))
    data[at : at + int(rng.random() * (end - start + 1))] = other[start:end]


_WAYS: tuple[Callable[[bytearray, random.Random, Sequence[bytes]], None], ...] = (
    _flip,
    _byte,
    _truncate,
    _insert,
    _delete,
    _repeat,
    _extreme,
    _extreme,
    _splice,
)


def mutate(rng: random.Random, corpus: Sequence[bytes]) -> bytes:
    """One message of the corpus, damaged once to three times."""
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if data:
            rng.choice(_WAYS)(data, rng, corpus)
    return bytes(data)


_ODD = (
    *(None, True, -1, 0, 1, 2, 15, 64, 2**31, 2**47, 2**62, 2**63 - 1, -(2**63)),
    *(
        0.0,
        float("nan"),
        float("inf"),
        1j,
        "",
        "input",
        "int",
        "aten::add_.Tensor",
        "x" * 5000,
        "line\nline",
        b"",
        b"bytes",
    ),
    *(torch.bool, torch.complex128, torch.float8_e8m0fnu, torch.strided, torch.channels_last),
    *([], (), {}, [[]], [None] * 70, [2**62] * 65, [[[[[[1]]]]]], {"input": 0}, {"input": -1}, {"input": 2**40}),
    *({"number": "int", "index": 0}, {"number": "x", "index": 0}, {"device": None}, {"line\n" * 900: 1}),
)


def _nodes(value: Any) -> list[Any]:
    """A value and all that are in it."""
    found = [value]
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        found += _nodes(item)
    return found


def mutate_value(rng: random.Random, corpus: Sequence[Any]) -> Any:
    """One value of the corpus with one to three values in it replaced, left out or doubled."""
    value = rng.choice(corpus)
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = _changed(rng, value, int(rng.random() * len(_nodes(value))), corpus)[0]
    return value


def _changed(rng: random.Random, value: Any, at: int, corpus: Sequence[Any]) -> tuple[Any, int]:
    """The value with its node number `at` changed, and `at` less the number of its nodes."""
    if at == 0:
        return (rng.choice(_ODD) if rng.random() < 0.6 else rng.choice(_nodes(rng.choice(corpus)))), -1
    at -= 1
    if isinstance(value, dict):
        found = {}
        for key, item in value.items():
            found[key], at = _changed(rng, item, at, corpus) if at >= 0 else (item, at)
        return found, at
    if isinstance(value, list | tuple):
        items = []
        for item in value:
            here = at == 0
            changed, at = _changed(rng, item, at, corpus) if at >= 0 else (item, at)
            items += ([changed], [], [item, item], [item, changed])[rng.choice((0, 0, 0, 1, 2, 3)) if here else 0]
        return type(value)(items), at
    return value, at


@contextmanager
def no_hang(seconds: float = 120) -> Iterator[None]:
    """The process ends, and shows where it was, if this takes so long."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
