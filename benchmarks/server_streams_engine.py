"""The engine of `server_streams.py`: it has no model and gives tokens at a fixed rate."""

import os
import time
from pathlib import Path

from warpbus.dist import Group
from warpbus.engine.options import ServiceOptions
from warpbus.engine.sequence import Sequence, TextPiece
from warpbus.models import Progress

STEP_SECONDS = "STAND_IN_STEP_SECONDS"
"""The environment variable with the seconds of a step."""

CONTEXT = 512


class StandIn:
    """An engine without a model: each step takes the same time and gives every running request one token."""

    max_model_len = CONTEXT
    plan = None

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = 0.0
        self._running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def add(self, sequence: Sequence) -> None:
        self._running.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        self._running.remove(sequence)

    def step(self) -> list[tuple[Sequence, TextPiece]]:
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + self._seconds
        pieces = []
        for sequence in self._running:
            sequence.append(1000 + len(sequence.token_ids))
            pieces.append((sequence, TextPiece("春", (sequence.token_ids[-1],), None, sequence.finish_reason, 0)))
        self._running = [sequence for sequence in self._running if not sequence.ended]
        return pieces


def stand_in(model: Path, options: ServiceOptions, group: Group, progress: Progress) -> StandIn:
    """Called in the engine's process."""
    del model, group, progress
    return StandIn(float(os.environ[STEP_SECONDS]))
