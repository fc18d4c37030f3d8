"""The requests of a service that its engine has not finished yet. For one event loop."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from warpbus.dist.outcome import JobFailure
from warpbus.engine.answer import Inbox
from warpbus.engine.messages import Reply, RequestFailed, StepResults
from warpbus.errors import UnavailableError

# How many end times of requests are kept to estimate the speed of the queue.
_END_TIMES_KEPT = 256
# The longest estimate of the queue, in seconds.
_LONGEST_WAIT = 120.0


class PendingRequests:
    """The requests that run or wait, and the questions that wait for a reply, by their numbers."""

    def __init__(self) -> None:
        self._numbers = count()
        self._inboxes: dict[int, Inbox] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._end_times: deque[float] = deque(maxlen=_END_TIMES_KEPT)
        self._no_requests = asyncio.Event()
        self._no_requests.set()

    def __len__(self) -> int:
        """Requests."""
        return len(self._inboxes)

    def __contains__(self, number: object) -> bool:
        """Whether a request runs or waits."""
        return number in self._inboxes

    @property
    def tokens(self) -> int:
        """Tokens computed for the requests: of their prompts, unless they are cached, and of their answers so far."""
        return sum(inbox.prompt_tokens + inbox.times.output_tokens for inbox in self._inboxes.values())

    def next_number(self) -> int:
        """The number of the next command."""
        return next(self._numbers)

    def add(self, inbox: Inbox) -> int:
        """Add a request; its number."""
        number = self.next_number()
        self._inboxes[number] = inbox
        self._no_requests.clear()
        return number

    def drop(self, number: int) -> Inbox | None:
        """Forget a request; None if it has ended already."""
        inbox = self._inboxes.pop(number, None)
        if not self._inboxes:
            self._no_requests.set()
        return inbox

    def uses(self, adapter: str) -> bool:
        """Whether a request names an adapter."""
        return any(inbox.adapter == adapter for inbox in self._inboxes.values())

    def deliver(self, when: float, step: StepResults) -> None:
        """Give the results of a step, which arrived at the time `when`, to their requests."""
        for number, piece in step.pieces:
            inbox = self._inboxes.get(number)
            if inbox is None:  # its answer was closed
                continue
            inbox.put(piece, when)
            if piece.finish_reason is not None:
                self._end_times.append(when)
                self.drop(number)

    def fail(self, failed: RequestFailed) -> None:
        """End a request with its error."""
        inbox = self.drop(failed.number)
        if inbox is not None:
            inbox.fail(failed.failure.error("the engine"))

    def fail_all(self, error: Callable[[], UnavailableError]) -> None:
        """Fail all requests and questions, each with an exception of its own."""
        for number in list(self._inboxes):
            inbox = self.drop(number)
            if inbox is not None:
                inbox.fail(error())
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error())

    async def reply(self, send: Callable[[int], None]) -> Any:
        """Send a question, and wait for the reply.

        Args:
            send: sends the question with its number.

        Raises:
            WarpbusError: the engine replied with it, or that of `fail_all`.
        """
        number = self.next_number()
        future = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            send(number)
            return await future
        finally:
            self._replies.pop(number, None)

    def take_reply(self, reply: Reply) -> None:
        """Give a reply to the question that waits for it, if it still does."""
        future = self._replies.get(reply.number)
        if future is None or future.done():
            return
        if isinstance(reply.answer, JobFailure):
            future.set_exception(reply.answer.error("the engine"))
        else:
            future.set_result(reply.answer)

    async def wait_for_requests(self, seconds: float) -> None:
        """Wait until no request runs or waits, or at most so many seconds. Raises TimeoutError then."""
        await asyncio.wait_for(self._no_requests.wait(), seconds)

    def seconds_of_queue(self, running: int, default: float) -> float:
        """How many seconds until the waiting requests have started, estimated from the end times of recent requests.

        Args:
            running: requests that run at once.
            default: without recent requests.
        """
        waiting = max(1, len(self._inboxes) - running)
        passed = time.monotonic() - self._end_times[0] if self._end_times else 0.0
        if passed <= 0.0:
            return default
        return min(_LONGEST_WAIT, max(1.0, waiting * passed / len(self._end_times)))
