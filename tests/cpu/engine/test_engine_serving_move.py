"""A service whose engine moves while it answers: from the CPU to the CPU, by the whole way there is."""

import asyncio
from pathlib import Path

import pytest

import warpbus.demo
from warpbus.engine.options import ServiceOptions
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.service import Service
from warpbus.errors import DeviceError, UsageError

POET = Path(warpbus.demo.__file__).parent / "glm-poet"
OPTIONS = ServiceOptions(device="cpu", max_num_seqs=4)
SEEDED = SamplingParams(seed=3, max_tokens=60, ignore_eos=True)


async def tokens(service, *, moves=0):
    """An answer's tokens, with some moves in its midst."""
    found = []
    async for piece in service.generate(service.tokenizer.encode("春"), SEEDED):
        found += piece.token_ids
        if moves and len(found) > 5:
            moves -= 1
            moved = await service.move("cpu")
            assert moved.weights > 0
            assert moved.pause > 0
    return found


async def work():
    service = await Service.start(POET, OPTIONS)
    try:
        expected = await tokens(service)
        assert len(expected) == 60
        for moves in (1, 2):
            assert await tokens(service, moves=moves) == expected
        # Without work; and of two at once one waits for the other.
        moved, again = await asyncio.gather(service.move("cpu"), service.move("cpu"))
        assert moved.weights == again.weights
        with pytest.raises(UsageError, match="device is 'moon'"):
            await service.move("moon")
        with pytest.raises((DeviceError, UsageError)):
            await service.move("cuda:77")
        await service.sleep()
        with pytest.raises(UsageError, match="sleeps"):
            await service.move("cpu")
        await service.wake()
        assert await tokens(service) == expected
    finally:
        await service.close()


def test_answers_go_on_through_moves_and_what_cannot_be_is_refused():
    asyncio.run(work())
