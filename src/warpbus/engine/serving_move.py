"""Live migration of a served engine: prepared in a thread, and advanced between the steps of the serving loop."""

import threading

from warpbus.cuda.devices import resolve_device
from warpbus.engine.engine import Engine
from warpbus.engine.messages import ServedEngine
from warpbus.engine.moving import EngineMigration, Moved
from warpbus.engine.sequence import Sequence, TextPiece
from warpbus.errors import UsageError

PAUSE = 0.01
"""Seconds between two calls of `ServedMove.advance` for an engine without requests."""


class ServedMove:
    """A migration that the service has asked for.

    Args:
        number: of the command.
        engine: continues to step between the calls of `advance`.
        device: as in a CLI flag.

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

    def advance(self) -> tuple[list[tuple[Sequence, TextPiece]], Moved] | None:
        """Copy blocks ahead; when few are left, finish the migration.

        Returns:
            None while it is not finished; then the results of the last steps on the first GPU, and the cost.

        Raises:
            WarpbusError: the migration failed; the engine stays where it is.
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
        # In a thread: unmapping takes time.
        threading.Thread(target=self._move.release, name="warpbus-release", daemon=True).start()
        return finished

    def _prepare(self) -> None:
        try:
            self._move.prepare()
        except Exception as error:
            self._failure = error
