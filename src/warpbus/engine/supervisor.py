"""Keeps the engine's processes running: starts them, hands messages over, and starts them again when they die.

All of it happens in a thread, which lives as long as they do: the kernel ends them with the thread that started them.
"""

import asyncio
import logging
import threading
import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from warpbus.dist import Patience, ProcessDiedError, Processes
from warpbus.dist.cluster import ClusterProcesses
from warpbus.engine.messages import Command, Event, Ready, Stop
from warpbus.engine.serving_process import serve
from warpbus.errors import EngineDiedError, WarpbusError

# An engine that served for so long had a good start: earlier deaths are forgotten.
_SECONDS_OF_GOOD_SERVICE = 60.0
# The pause after the first death; it doubles with each further one in a row.
_FIRST_PAUSE = 0.25
_LONGEST_PAUSE = 30.0
_SECONDS_TO_SEND = 5.0
# After so long an engine that stands still is reported; heartbeats come every second, so that ten seconds suffice.
_SECONDS_UNTIL_REPORTED = 8.0

_log = logging.getLogger("warpbus.engine")


class Outbox:
    """Takes commands for one life of the engine at once; a thread sends them, all that wait together.

    Args:
        send: sends them.
        failed: called with what `send` raised; commands are lost from then on.
    """

    def __init__(self, send: Callable[[list[Command]], None], failed: Callable[[Exception], None]) -> None:
        self._send = send
        self._failed = failed
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="warpbus-commands", daemon=True)
        self._thread.start()

    def put(self, command: Command) -> None:
        """Send a command soon; it is lost if the engine dies."""
        self._commands.put(command)

    def close(self) -> None:
        """Send what waits, and end; a pipe that takes nothing for seconds is given up."""
        self._commands.put(None)
        self._thread.join(_SECONDS_TO_SEND)

    def _run(self) -> None:
        try:
            self._send_all()
        except Exception as error:
            self._failed(error)

    def _send_all(self) -> None:
        while True:
            waiting = [self._commands.get()]
            while not self._commands.empty():
                waiting.append(self._commands.get())
            commands = [command for command in waiting if command is not None]
            if commands:
                self._send(commands)
            if len(commands) < len(waiting):
                return


@dataclass(frozen=True)
class EngineUp:
    """The engine takes commands."""

    outbox: Outbox
    max_model_len: int


@dataclass(frozen=True)
class EngineDied:
    """The engine's processes have died, or could not be started.

    Attributes:
        error: why.
        what: the same in words, without advice.
        again: they are being started again.
    """

    error: WarpbusError
    what: str
    again: bool


@dataclass(frozen=True)
class EngineStalled:
    """The engine's processes live, but do not go on; `what` says which and since when. Empty: they go on again."""

    what: str


@dataclass(frozen=True)
class EngineEnded:
    """There are no processes any more, and will be none."""


SupervisorEvent = Event | EngineUp | EngineDied | EngineStalled | EngineEnded


class EngineSupervisor:
    """See above. Belongs to the event loop in which it is made.

    Args:
        arguments: of `serve`, after its first two.
        devices: of the processes.
        cluster: see `ServiceOptions`.
        max_restarts: how often they are started again after deaths in a row.
        patience: for so many seconds an engine may stand still before it is ended, and started again.
        listen: called in the event loop with what the engine says, or what happened to it, and the time that was.
    """

    def __init__(
        self,
        arguments: tuple[object, ...],
        *,
        devices: abc.Sequence[torch.device],
        cluster: str | None,
        max_restarts: int,
        patience: float,
        listen: Callable[[float, abc.Sequence[SupervisorEvent]], None],
    ) -> None:
        self._arguments = arguments
        self._devices = devices
        self._cluster = cluster
        self._max_restarts = max_restarts
        self._patience = Patience(patience, _SECONDS_UNTIL_REPORTED, self._stalled)
        self._listen = listen
        self._loop = asyncio.get_running_loop()
        self._ending = threading.Event()
        self._may_start = threading.Event()
        self._may_start.set()
        self._fault: Exception | None = None
        self._processes: Processes | ClusterProcesses | None = None
        self._outbox: Outbox | None = None
        self._up_since: float | None = None
        threading.Thread(target=self._keep, name="warpbus-engine", daemon=True).start()

    def stop(self) -> None:
        """Let the engine leave after its step; if it is being started, at once. `EngineEnded` follows."""
        self._end()
        outbox = self._outbox
        if outbox is None:
            self.kill()
        else:
            outbox.put(Stop())

    def moved(self, device: torch.device) -> None:
        """The only process has moved: if it has to be started again, it is there."""
        self._devices = [device]

    def hold(self) -> None:
        """Do not start an engine that has died before `let_start`: while it sleeps, others use its memory."""
        self._may_start.clear()

    def let_start(self) -> None:
        """Start the engine if it has died since `hold`, and whenever it dies from now on."""
        self._may_start.set()

    def kill(self) -> None:
        """End the processes at once. `EngineEnded` follows."""
        self._end()
        processes = self._processes
        if processes is not None:
            processes.kill()

    def _end(self) -> None:
        self._ending.set()
        self._may_start.set()  # whoever waits to start it ends instead

    def _keep(self) -> None:
        try:
            self._live_again_and_again()
        except Exception as error:  # a fault of ours: nobody should wait for an engine that never comes
            self._report(time.monotonic(), [EngineDied(_explained(error), str(_explained(error)), again=False)])
        finally:
            self._report(time.monotonic(), [EngineEnded()])

    def _live_again_and_again(self) -> None:
        deaths, was_up = 0, False
        while True:
            self._up_since = None
            error = self._live()
            if self._ending.is_set():
                return
            now = time.monotonic()
            was_up = was_up or self._up_since is not None
            served = 0.0 if self._up_since is None else now - self._up_since
            deaths = 1 if served >= _SECONDS_OF_GOOD_SERVICE else deaths + 1
            again = was_up and deaths <= self._max_restarts
            what = error.what if isinstance(error, ProcessDiedError) else str(error)
            self._report(now, [EngineDied(error, what, again)])
            if not again or self._ending.wait(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (deaths - 1))):
                return
            self._may_start.wait()
            if self._ending.is_set():
                return

    def _live(self) -> WarpbusError:
        """One life of the processes: why it ended."""
        self._fault = None
        try:
            with self._new() as processes:
                self._processes = processes
                if not self._ending.is_set():
                    self._run(processes)
        except Exception as error:
            return _explained(self._fault or error)
        finally:
            self._processes = None
        return EngineDiedError("the engine ended without being told to")

    def _new(self) -> Processes | ClusterProcesses:
        devices, receive, patience = self._devices, self._receive, self._patience
        if self._cluster is None:
            return Processes(serve, devices=devices, receive=receive, apart=True, patience=patience)
        return ClusterProcesses(
            serve,
            processes=len(devices),
            address=self._cluster,
            gpus=devices[0].type == "cuda",
            receive=receive,
            patience=patience,
        )

    def _run(self, processes: Processes | ClusterProcesses) -> None:
        try:
            processes.run(*self._arguments)
        except BaseException:
            processes.kill()  # a process that hangs does not take commands either
            raise
        finally:
            outbox, self._outbox = self._outbox, None
            if outbox is not None:
                outbox.close()

    def _receive(self, events: list[Event]) -> None:
        now = time.monotonic()
        if isinstance(events[0], Ready):
            assert self._processes is not None
            self._outbox = Outbox(self._processes.tell, self._cannot_send)
            self._up_since = now
            self._report(now, [EngineUp(self._outbox, events[0].max_model_len)])
        else:
            self._report(now, events)

    def _cannot_send(self, error: Exception) -> None:
        self._fault = error
        processes = self._processes
        if processes is not None:
            processes.kill()

    def _stalled(self, what: str) -> None:
        self._report(time.monotonic(), [EngineStalled(what)])

    def _report(self, when: float, reports: abc.Sequence[SupervisorEvent]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._listen, when, reports)
        except RuntimeError:  # the loop is closed: nobody is there who could want an answer
            self.kill()


def _explained(error: Exception) -> WarpbusError:
    """The same error, or one in words for one that nobody has foreseen."""
    if isinstance(error, WarpbusError):
        return error
    _log.error("a fault of the engine's supervisor", exc_info=error)
    first = next(iter(str(error).splitlines()), "")
    found = EngineDiedError(f"{type(error).__name__}: {first}".removesuffix(": "))
    found.__cause__ = error
    return found
