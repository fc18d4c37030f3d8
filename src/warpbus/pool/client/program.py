"""Programs: operators that are recorded once on fixed tensors; one message runs them all, as one CUDA graph."""

from collections.abc import Iterator
from contextlib import contextmanager

from warpbus.errors import UsageError
from warpbus.pool.client.session import Session


class Program:
    """A sequence of recorded operators."""

    def __init__(self, session: Session) -> None:
        self._session = session
        session.programs += 1
        self._number = session.programs
        self._dropped = False

    @property
    def number(self) -> int:
        """The number of the program in its session."""
        return self._number

    def run(self) -> None:
        """Run the operators on the present contents of their tensors. Does not wait.

        Raises:
            UsageError: the program was dropped, or one is being recorded.
        """
        with self._session.lock:
            if self._dropped:
                raise UsageError("the program cannot run: it was dropped, or its block ended with an error: record it")
            if self._session.recording:
                raise UsageError("a program cannot run while one is recorded: run it after the block")
            self._session.writer.run(self._number)
            self._session.advance()

    def drop(self) -> None:
        """Delete the program. Its results stay while they are referenced."""
        with self._session.lock:
            if self._dropped:
                return
            self._dropped = True
            self._session.writer.drop(self._number)
            self._session.advance()


@contextmanager
def recorded(session: Session) -> Iterator[Program]:
    """Record the operators in the block as a program instead of executing them, as `torch.cuda.graph` does.

    Nothing can be read in the block. Tensors made in it that somebody still has at its end get their values at each
    run, in the same place; the others are memory of a run alone. What the program reads has to stay alive.

    A block that ends with an exception leaves no program.

    Raises:
        UsageError: one is being recorded already.
    """
    with session.lock:
        if session.recording:
            raise UsageError("a program is being recorded already: one cannot be in another")
        session.flush()
        program = Program(session)
        session.writer.record(program.number)
        session.recording = True
    complete = False
    try:
        yield program
        with session.lock:
            session.flush()  # with what the block has let go of: it is memory of a run. Raises errors of earlier calls
        complete = True
    finally:
        with session.lock:
            session.writer.stop()
            session.recording = False
            if not complete:
                program.drop()
