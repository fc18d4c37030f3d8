"""A service whose engine stands still, dies asleep, or cannot be started again: it recovers, or says that it cannot."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from test_engine_service import POET, SLOW, Counting, collect, counting, params, start, tokens, with_service

from warpbus.dist import Group
from warpbus.engine import service as service_module
from warpbus.engine import supervisor as supervisor_module
from warpbus.engine.options import ServiceOptions
from warpbus.engine.sequence import Sequence, TextPiece
from warpbus.engine.service import Health, Service
from warpbus.engine.supervisor import EngineDied, EngineSupervisor
from warpbus.errors import ConflictError, EngineDiedError, UnavailableError
from warpbus.models import Progress

_SECONDS = 300.0


async def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + _SECONDS
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def until_state(service: Service, state: str) -> Health:
    await until(lambda: service.health.state == state)
    return service.health


class Hanging(Counting):
    """Hangs in a step once its prompt begins with SLOW, as in a call of a GPU that does not come back."""

    def step(self) -> list[tuple[Sequence, TextPiece]]:
        if any(sequence.prompt[0] == SLOW for sequence in self._running):
            time.sleep(600)
        return super().step()


def hanging(model: Path, options: ServiceOptions, group: Group, progress: Progress) -> Hanging:
    return Hanging(group)


def newest_child() -> psutil.Process:
    return max(psutil.Process().children(), key=lambda child: (child.create_time(), child.pid))


@pytest.mark.parametrize("how", ["stopped", "a stopped rank", "a hanging step"])
def test_an_engine_that_stands_still_is_reported_and_started_again(how: str) -> None:
    async def run() -> None:
        options = ServiceOptions(device="cpu", watchdog_timeout=10, tensor_parallel=2 if how == "a stopped rank" else 1)
        service = await Service.start(POET, options, load=hanging if how == "a hanging step" else counting)
        process = (await service.stats()).process
        waiting = service.generate([SLOW], params(1000))
        if how == "stopped":
            os.kill(process, signal.SIGSTOP)
        elif how == "a stopped rank":
            newest_child().suspend()
        stood = await until_state(service, "unresponsive")
        rank = 1 if how == "a stopped rank" else 0
        what = "been in one step without progress" if how == "a hanging step" else "sent no heartbeat"
        assert stood.reason.startswith(f"process {rank} on cpu has {what} for ")
        assert service.alive  # others are taken, and wait
        with pytest.raises(
            EngineDiedError, match=rf"^the engine died: process {rank} on cpu has {what} for \d\d s, and"
        ):
            async for _ in waiting:
                pass
        await until_state(service, "ready")
        assert service.health == Health("ready", "", 1)
        assert (await service.stats()).process != process
        assert await collect(service, [10], 3) == (tokens(3, [10]), "length")
        await service.close()

    asyncio.run(run())


def test_an_engine_that_goes_on_again_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_SECONDS_UNTIL_REPORTED", 3.0)

    async def test(service: Service) -> None:
        process = psutil.Process((await service.stats()).process)
        process.suspend()
        await until_state(service, "unresponsive")
        process.resume()
        await until_state(service, "ready")
        assert service.health == Health("ready", "", 0)
        # The one that is asleep says so, and no more.
        await service.sleep()
        assert service.health.state == "asleep"

    with_service(test)


def test_a_restart_that_fails_ends_as_failed_and_close_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(service: Service) -> None:
        process = (await service.stats()).process
        monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
        waiting = service.generate([SLOW], params(1000))
        os.kill(process, signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="killed by signal 9") as ended:
            async for _ in waiting:
                pass
        assert ended.value.retry_after == 5.0
        failed = await until_state(service, "failed")
        assert "a process cannot be started" in failed.reason
        assert "/nowhere" in failed.reason
        assert "given up after 2 restarts in a row" in failed.reason
        with pytest.raises(EngineDiedError, match="a process cannot be started") as refused:
            service.generate([10], params(1))
        assert refused.value.retry_after is None

    with_service(test, max_restarts=2)


def test_a_fault_that_nobody_has_foreseen_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd:
        def __init__(self, *arguments: object, **others: object) -> None:
            raise ValueError("an odd fault\nof two lines")

    async def test(service: Service) -> None:
        monkeypatch.setattr(supervisor_module, "Processes", Odd)
        os.kill((await service.stats()).process, signal.SIGKILL)
        failed = await until_state(service, "failed")
        assert failed.reason.startswith("the engine died: ValueError: an odd fault; it is given up after 1 restarts")

    with_service(test, max_restarts=1)
    # At the first start, too.
    with pytest.raises(EngineDiedError, match=r"^ValueError: an odd fault$"):
        asyncio.run(start())
    # And one outside of the engine's lives.
    monkeypatch.setattr(EngineSupervisor, "_run_once", lambda self: 1 / 0)
    with pytest.raises(EngineDiedError, match=r"^ZeroDivisionError: division by zero$"):
        asyncio.run(start())


def test_a_command_that_cannot_be_sent_ends_the_engine_by_name() -> None:
    async def test(service: Service) -> None:
        waiting = service.generate([SLOW], params(1000))
        assert service._outbox is not None
        service._outbox.put(lambda: None)  # type: ignore[arg-type]  # cannot be pickled
        with pytest.raises(EngineDiedError, match=r"^the engine died: \w+: .*lambda.*; it is being restarted"):
            async for _ in waiting:
                pass
        await until_state(service, "ready")

    with_service(test)


def test_an_engine_that_dies_asleep_sleeps_on_until_it_is_woken() -> None:
    async def test(service: Service) -> None:
        process = psutil.Process((await service.stats()).process)
        others = [child for child in psutil.Process().children() if child != process]
        await service.sleep()
        process.kill()
        await until(lambda: service.health.reason.endswith("it sleeps until it is woken"))
        assert service.health.state == "asleep"
        await asyncio.sleep(1.0)  # longer than the pause before a restart
        assert psutil.Process().children() == others
        with pytest.raises(UnavailableError, match="the model is asleep"):
            service.generate([10], params(1))
        with pytest.raises(ConflictError, match="the model sleeps: wake it first"):
            await service.move("cpu")
        with pytest.raises(EngineDiedError, match="sleeps until it is woken"):
            await service.stats()
        await service.sleep()
        await service.wake()
        assert service.health == Health("ready", "", 1)
        assert await collect(service, [10], 3) == (tokens(3, [10]), "length")
        # Awake, it is started again as ever.
        os.kill((await service.stats()).process, signal.SIGKILL)
        await until_state(service, "restarting")
        await until_state(service, "ready")

    with_service(test)


def test_a_death_between_a_reply_and_its_reader_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    died = EngineDied(EngineDiedError("gone"), "gone", again=True)
    ask = Service._ask

    def dying(service: Service) -> Callable[[str], Awaitable[None]]:
        async def reply_and_die(query: str) -> None:
            await ask(service, query)
            service._on_events(time.monotonic(), [died])

        return reply_and_die

    async def test(service: Service) -> None:
        outbox = service._outbox
        await service.sleep()
        with monkeypatch.context() as patch:
            patch.setattr(service, "_ask", dying(service))
            await service.wake()
        assert service.health == Health("asleep", "the engine died: gone; it sleeps until it is woken", 0)
        service._outbox = outbox  # the engine lives, in truth
        await service.wake()
        assert service.health.state == "ready"

    with_service(test)


def test_close_ends_an_engine_that_hears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_SECONDS_TO_STOP", 0.2)

    async def test(service: Service) -> None:
        process = psutil.Process((await service.stats()).process)
        process.suspend()
        await service.close()
        assert service.health.state == "closed"
        assert not process.is_running()

    with_service(test)


def test_close_waits_no_longer_for_processes_that_cannot_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_SECONDS_TO_STOP", 0.2)
    monkeypatch.setattr(service_module, "_SECONDS_TO_KILL", 0.2)

    async def run() -> None:
        service = await start()
        process = psutil.Process((await service.stats()).process)
        process.suspend()
        with monkeypatch.context() as patch:
            patch.setattr(EngineSupervisor, "kill", lambda supervisor: None)
            await asyncio.wait_for(service.close(), _SECONDS)
        assert service.health.state == "closed"
        process.kill()
        await asyncio.wait_for(service._ended.wait(), _SECONDS)

    asyncio.run(run())
