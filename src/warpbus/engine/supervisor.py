"""Supervises the engine's processes: starts them, passes messages, and restarts them when they die.

A thread does all of it and lives as long as the processes: Linux ends them with the thread that started them.
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
from warpbus.engine.plan import MemoryPlan
from warpbus.engine.serving_process import serve
from warpbus.errors import EngineDiedError, WarpbusError

# After an engine has run for so long, earlier deaths do not count any more.
_SECONDS_OF_STABLE_RUN = 60.0
# The delay of the first restart; it doubles with each further death in a row.
_FIRST_PAUSE = 0.25
_LONGEST_PAUSE = 30.0
_SECONDS_TO_SEND = 5.0
# After so long without a heartbeat an engine is reported as stalled; heartbeats come every second.
_SECONDS_UNTIL_REPORTED = 8.0

_log = logging.getLogger("warpbus.engine")


class Outbox:
    """A queue of commands for one run of the engine's processes; a thread sends all queued ones together.

    Args:
        send: sends commands; may block.
        failed: called with the exception that `send` raised; later commands are lost.
    """

    def __init__(self, send: Callable[[list[Command]], None], failed: Callable[[Exception], None]) -> None:
        self._send = send
        self._failed = failed
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="warpbus-commands", daemon=True)
        self._thread.start()

    def put(self, command: Command) -> None:
        """Queue a command; it is lost if the engine dies."""
        self._commands.put(command)

    def close(self) -> None:
        """Send the queued commands and end the thread; gives up on a pipe that stays blocked for seconds."""
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
    """The engine accepts commands."""

    outbox: Outbox
    max_model_len: int
    plan: MemoryPlan | None


@dataclass(frozen=True)
class EngineDied:
    """The engine's processes have died, or could not be started.

    Attributes:
        error: the cause.
        what: the cause in words, without advice.
        again: they are being restarted.
    """

    error: WarpbusError
    what: str
    again: bool


@dataclass(frozen=True)
class EngineStalled:
    """The engine's processes live but make no progress; `what` says which and since when. Empty: progress again."""

    what: str


@dataclass(frozen=True)
class EngineEnded:
    """There are no processes, and none will be started."""


SupervisorEvent = Event | EngineUp | EngineDied | EngineStalled | EngineEnded


class EngineSupervisor:
    """Starts and restarts the engine's processes. Belongs to the event loop in which it is created.

    Args:
        arguments: of `serve`, after its first two.
        devices: of the processes.
        threads: CPU threads per process on this machine; None: the cores are shared among the processes.
        cluster: see `ServiceOptions`.
        max_restarts: how often they are restarted after deaths in a row.
        patience: after so many seconds without progress the engine is killed and restarted.
        listen: called in the event loop with the time and the events of the engine or of its processes.
    """

    def __init__(
        self,
        arguments: tuple[object, ...],
        *,
        devices: abc.Sequence[torch.device],
        threads: int | None = None,
        cluster: str | None,
        max_restarts: int,
        patience: float,
        listen: Callable[[float, abc.Sequence[SupervisorEvent]], None],
    ) -> None:
        self._arguments = arguments
        self._devices = devices
        self._environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        self._cluster = cluster
        self._max_restarts = max_restarts
        self._patience = Patience(patience, _SECONDS_UNTIL_REPORTED, self._on_stalled)
        self._listen = listen
        self._loop = asyncio.get_running_loop()
        self._ending = threading.Event()
        self._may_start = threading.Event()
        self._may_start.set()
        self._fault: Exception | None = None
        self._processes: Processes | ClusterProcesses | None = None
        self._outbox: Outbox | None = None
        self._up_since: float | None = None
        threading.Thread(target=self._supervise, name="warpbus-engine", daemon=True).start()

    def stop(self) -> None:
        """Stop the engine after its step, or at once if it is being started. `EngineEnded` follows."""
        self._end()
        outbox = self._outbox
        if outbox is None:
            self.kill()
        else:
            outbox.put(Stop())

    def use_arguments(self, arguments: tuple[object, ...]) -> None:
        """Give the engine other arguments when it is restarted."""
        self._arguments = arguments

    def moved(self, device: torch.device) -> None:
        """The only process has moved to another device: restart it there."""
        self._devices = [device]

    def hold_restarts(self) -> None:
        """Do not restart the engine until `allow_restarts`: while it sleeps, other programs use its memory."""
        self._may_start.clear()

    def allow_restarts(self) -> None:
        """Restart the engine if it has died since `hold_restarts`, and whenever it dies from now on."""
        self._may_start.set()

    def kill(self) -> None:
        """Kill the processes. `EngineEnded` follows."""
        self._end()
        processes = self._processes
        if processes is not None:
            processes.kill()

    def _end(self) -> None:
        self._ending.set()
        self._may_start.set()  # a supervisor that waits for permission to restart ends instead

    def _supervise(self) -> None:
        try:
            self._run_with_restarts()
        except Exception as error:  # a bug in the supervisor: requests must not wait for an engine that never starts
            self._report(
                time.monotonic(), [EngineDied(_as_warpbus_error(error), str(_as_warpbus_error(error)), again=False)]
            )
        finally:
            self._report(time.monotonic(), [EngineEnded()])

    def _run_with_restarts(self) -> None:
        deaths, was_up = 0, False
        while True:
            self._up_since = None
            error = self._run_once()
            if self._ending.is_set():
                return
            now = time.monotonic()
            was_up = was_up or self._up_since is not None
            served = 0.0 if self._up_since is None else now - self._up_since
            deaths = 1 if served >= _SECONDS_OF_STABLE_RUN else deaths + 1
            again = was_up and deaths <= self._max_restarts
            what = error.what if isinstance(error, ProcessDiedError) else str(error)
            self._report(now, [EngineDied(error, what, again)])
            if not again or self._ending.wait(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (deaths - 1))):
                return
            self._may_start.wait()
            if self._ending.is_set():
                return

    def _run_once(self) -> WarpbusError:
        """Run the processes once; the cause of their end."""
        self._fault = None
        try:
            with self._start_processes() as processes:
                self._processes = processes
                if not self._ending.is_set():
                    self._run(processes)
        except Exception as error:
            return _as_warpbus_error(self._fault or error)
        finally:
            self._processes = None
        return EngineDiedError("the engine ended unexpectedly")

    def _start_processes(self) -> Processes | ClusterProcesses:
        devices, receive, patience = self._devices, self._on_engine_events, self._patience
        if self._cluster is None:
            return Processes(
                serve,
                devices=devices,
                receive=receive,
                apart=True,
                environment=self._environment,
                patience=patience,
            )
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
            processes.kill()  # a process that hangs does not read its commands
            raise
        finally:
            outbox, self._outbox = self._outbox, None
            if outbox is not None:
                outbox.close()

    def _on_engine_events(self, events: list[Event]) -> None:
        now = time.monotonic()
        if isinstance(events[0], Ready):
            assert self._processes is not None
            self._outbox = Outbox(self._processes.tell, self._on_send_failed)
            self._up_since = now
            self._report(now, [EngineUp(self._outbox, events[0].max_model_len, events[0].plan)])
        else:
            self._report(now, events)

    def _on_send_failed(self, error: Exception) -> None:
        self._fault = error
        processes = self._processes
        if processes is not None:
            processes.kill()

    def _on_stalled(self, what: str) -> None:
        self._report(time.monotonic(), [EngineStalled(what)])

    def _report(self, when: float, reports: abc.Sequence[SupervisorEvent]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._listen, when, reports)
        except RuntimeError:  # the loop is closed: nothing can await an answer any more
            self.kill()


def _as_warpbus_error(error: Exception) -> WarpbusError:
    """The same error; an unexpected exception becomes an EngineDiedError and is logged."""
    if isinstance(error, WarpbusError):
        return error
    _log.error("a fault of the engine's supervisor", exc_info=error)
    first = next(iter(str(error).splitlines()), "")
    found = EngineDiedError(f"{type(error).__name__}: {first}".removesuffix(": "))
    found.__cause__ = error
    return found
