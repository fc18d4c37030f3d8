"""An engine whose kernel never ends: it is reported, ended and started again, on one GPU and on two."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from warpbus.demo import model_path
from warpbus.dist import Group
from warpbus.engine.loading import load_engine
from warpbus.engine.options import ServiceOptions
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.sequence import Sequence, TextPiece
from warpbus.engine.service import Service
from warpbus.errors import EngineDiedError
from warpbus.models import Progress

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

FATAL = 777  # max_tokens of the request at which the kernel hangs
CYCLES = 1 << 42  # of a GPU's clock: more than half an hour


class HangingEngine:
    """The engine, but at one request its last rank launches a kernel that spins."""

    def __init__(self, engine: Any, group: Group) -> None:
        self._engine = engine
        self._last = group.rank == group.world - 1
        self._hangs = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, sequence: Sequence) -> None:
        self._hangs = sequence.params.max_tokens == FATAL
        self._engine.add(sequence)

    def step(self) -> list[tuple[Sequence, TextPiece]]:
        if self._hangs and self._last:
            torch.cuda._sleep(CYCLES)
        pieces: list[tuple[Sequence, TextPiece]] = self._engine.step()
        torch.cuda.synchronize()
        return pieces


def hanging(model: Path, options: ServiceOptions, group: Group, progress: Progress) -> HangingEngine:
    return HangingEngine(load_engine(model, options, group, progress), group)


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_kernel_that_never_ends_is_reported_and_the_engine_started_again(gpus: int) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip("needs 2 GPUs")

    async def answer(service: Service, tokens: int) -> int:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
        return sum([len(piece.token_ids) async for piece in service.generate([5, 6, 7], params)])

    async def run() -> None:
        options = ServiceOptions(device="cuda", tensor_parallel=gpus, watchdog_timeout=20)
        service = await Service.start(model_path(), options, load=hanging)
        assert await answer(service, 8) == 8
        waiting = asyncio.ensure_future(answer(service, FATAL))
        if gpus == 1:  # the other one of two may end first, as it waits in an exchange
            end = time.monotonic() + 60
            while service.health.state != "unresponsive":
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
            assert "in one step without progress" in service.health.reason
        with pytest.raises(EngineDiedError, match="in one step without progress" if gpus == 1 else "the engine died"):
            await asyncio.wait_for(waiting, 120)
        while service.health.state != "ready":
            assert service.health.state == "restarting"
            await asyncio.sleep(0.05)
        assert await answer(service, 8) == 8
        await service.close()

    asyncio.run(asyncio.wait_for(run(), 400))
