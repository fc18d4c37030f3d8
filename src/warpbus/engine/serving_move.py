"""The move of a served engine to another GPU: in step with its turns, and made ready in a thread beside them."""

import threading

from warpbus.cuda.devices import resolve_device
from warpbus.engine.engine import Engine
from warpbus.engine.messages import ServedEngine
from warpbus.engine.moving import EngineMigration, Moved
from warpbus.engine.sequence import Sequence, TextPiece
from warpbus.errors import UsageError

PAUSE = 0.01
"""Seconds between two turns of an engine that has nothing to do but to move."""


class ServedMove:
    """A move that was asked for.

    Args:
        number: of the question.
        engine: goes on stepping between the calls of `turn`.
        device: as a flag names it.

    Raises:
        UsageError: the engine cannot move there.
        DeviceError: there is no such GPU.
    """

    def __init__(self, number: int, engine: ServedEngine, device: str) -> None:
        if not isinstance(engine, Engine):
            raise UsageError("this engine cannot move")
        self.number = number
        self._move = EngineMigration(engine, resolve_device(device))
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._prepare, name="warpbus-move", daemon=True)
        self._thread.start()

    def turn(self) -> tuple[list[tuple[Sequence, TextPiece]], Moved] | None:
        """Copy ahead; when little is left, move: what the last steps on the first GPU brought, and what it took.

        Raises:
            WarpbusError: it cannot be done; the engine stays where it is.
        """
        if self._thread.is_alive():
            return None
        try:
            if self._failure is not None:
                raise self._failure
            if not self._move.copy_ahead():
                return None
            finished = self._move.finish()
        except BaseException:
            self._move.release()
            raise
        # Unmapping takes time, and nobody waits for it.
        threading.Thread(target=self._move.release, name="warpbus-release", daemon=True).start()
        return finished

    def _prepare(self) -> None:
        try:
            self._move.prepare()
        except Exception as error:
            self._failure = error
