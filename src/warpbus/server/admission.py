"""Admits requests that generate, first come, first served.

Requests that arrive together would otherwise pass each `await` on their way together, so that the first one would reach
the engine only after all had been parsed: with 256 requests that is tenths of a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Scope

from warpbus.server.generation import unless_gone
from warpbus.server.registry import LONG_TEXT, Model

T = TypeVar("T")

# The most requests that are admitted in one round of the event loop. Running streams wait for no more than these.
_AT_ONCE = 2
_SLOT = "admission_slot"  # of a scope's state


class Slot:
    """The right of one request to be parsed and checked. Releasing it again does nothing."""

    def __init__(self, free: asyncio.Semaphore) -> None:
        self._free = free
        self._held = True

    def release(self) -> None:
        """Let the next request in, after the event loop has looked at everything else."""
        if self._held:
            self._held = False
            # Without a request that waits, those that begin in this round of the loop would all be let in at once.
            asyncio.get_running_loop().call_soon(self._free.release)


class Admission:
    """The queue of the requests of one server that generate."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_AT_ONCE)

    @asynccontextmanager
    async def slot(self, scope: Scope) -> AsyncIterator[Slot]:
        """Wait for a slot, which is held until its release or the end of the block."""
        await self._free.acquire()
        slot = scope["state"][_SLOT] = Slot(self._free)
        try:
            yield slot
        finally:
            slot.release()


async def with_text(request: Request, model: Model, size: int, work: Callable[[], T]) -> T:
    """The result of tokenizing or rendering, in a thread: the request releases its slot.

    Args:
        size: characters of the text.

    Raises:
        ClientGoneError: the client disconnected while a long text was tokenized.
    """
    slot: Slot | None = request.scope["state"].get(_SLOT)
    if slot is not None:
        slot.release()
    if size <= LONG_TEXT:
        return await model.in_thread(work, size)
    return await unless_gone(request.receive, model.in_thread(work, size))
