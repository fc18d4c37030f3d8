"""`Generations`: pieces in the order of arrival, patience, limits of time, and receivers that are slow or fail."""

import asyncio

import pytest

from warpbus.engine import SamplingParams, TextPiece
from warpbus.server.generation import GenerationRequest, Generations, RequestRecord, RunningGenerations
from warpbus.server.metrics import Metrics
from warpbus.server.request_error import RequestError


class Script:
    """A model whose answers are what the test puts into them."""

    name = "script"

    def __init__(self):
        self.answers = []
        self.closed = []

    def generate(self, prompt, params, cache_salt):
        queue = asyncio.Queue()
        self.answers.append(queue)
        return self._pieces(queue, len(self.answers) - 1)

    async def _pieces(self, queue, index):
        try:
            while True:
                piece = await queue.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
            self.closed.append(index)


def piece(text, finish=None):
    return TextPiece(text, (7,), None, finish)


def begin(model, count=1, timeout=60.0):
    requests = [GenerationRequest([1], SamplingParams()) for _ in range(count)]
    record = RequestRecord()
    running = RunningGenerations()
    made = Generations(model, requests, timeout=timeout, metrics=Metrics(), record=record, running=running)
    return made, running


class Received:
    """What a receiver got; it takes the next piece only when `room` is set."""

    def __init__(self):
        self.pieces = []
        self.pauses = 0
        self.room = asyncio.Event()
        self.room.set()

    async def take(self, index, piece):
        self.pieces.append((index, piece))
        await self.room.wait()

    async def pause(self):
        self.pauses += 1


async def until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come to pass")


class Handed:
    """A model that says how many requests it has, and how many of them were called off; the third one is refused."""

    name = "handed"

    def __init__(self):
        self.asked = 0
        self.closed = 0

    def generate(self, prompt, params, cache_salt):
        if self.asked == 2:
            raise RequestError(429, "full")
        self.asked += 1
        return self

    async def aclose(self):
        self.closed += 1


def test_requests_are_handed_over_at_once_and_called_off_before_their_tasks_begin():
    async def run():
        model = Handed()
        generations, _ = begin(model, 3)
        assert model.asked == 2
        with pytest.raises(RequestError, match=r"^full$"):
            await generations.arrival(60.0)
        await generations.aclose()
        assert model.closed == 2

    asyncio.run(run())


def test_pieces_come_in_the_order_of_their_arrival_and_end():
    async def run():
        model, received = Script(), Received()
        generations, _ = begin(model, 2)
        arrival = asyncio.ensure_future(generations.arrival(60.0))
        await asyncio.sleep(0)
        model.answers[1].put_nowait(piece("b", "stop"))
        assert await arrival
        assert received.pieces == []
        running = asyncio.ensure_future(generations.run(received.take))
        await until(lambda: received.pieces == [(1, piece("b", "stop"))])
        assert not running.done()
        model.answers[0].put_nowait(piece("a", "length"))
        await running
        assert received.pieces[1:] == [(0, piece("a", "length"))]
        await generations.aclose()
        assert sorted(model.closed) == [0, 1]

    asyncio.run(run())


def test_patience_ends_without_a_piece_and_loses_none():
    async def run():
        model, received = Script(), Received()
        generations, _ = begin(model)
        for _ in range(3):
            assert not await generations.arrival(0.001)
        model.answers[0].put_nowait(piece("a"))
        assert await generations.arrival(60.0)
        running = asyncio.ensure_future(generations.run(received.take, 0.001, received.pause))
        await until(lambda: received.pauses >= 3)
        model.answers[0].put_nowait(piece("b", "stop"))
        await running
        assert received.pieces == [(0, piece("a")), (0, piece("b", "stop"))]
        await generations.aclose()
        assert model.closed == [0]

    asyncio.run(run())


def test_a_piece_waits_until_the_one_before_it_is_received():
    async def run():
        model, received = Script(), Received()
        received.room.clear()
        generations, _ = begin(model)
        running = asyncio.ensure_future(generations.run(received.take))
        await asyncio.sleep(0)
        model.answers[0].put_nowait(piece("a"))
        model.answers[0].put_nowait(piece("b"))
        model.answers[0].put_nowait(piece("c", "stop"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert model.answers[0].qsize() == 2  # the receiver holds one: the service merges the others
        received.room.set()
        await running
        assert [one.text for _, one in received.pieces] == ["a", "b", "c"]
        await generations.aclose()

    asyncio.run(run())


def test_the_time_of_all_answers_is_limited():
    async def run():
        for begun in (False, True):
            model, received = Script(), Received()
            received.room.clear()
            generations, _ = begin(model, timeout=0.01)
            await asyncio.sleep(0)
            if begun:
                model.answers[0].put_nowait(piece("a"))
            work = generations.run(received.take) if begun else generations.arrival(60.0)
            with pytest.raises(RequestError, match=r"^the answer takes longer than the server allows"):
                await work
            await generations.aclose()
            assert model.closed == [0]

    asyncio.run(run())


def test_a_server_that_ends_ends_them():
    async def run():
        model, received = Script(), Received()
        generations, running = begin(model)
        going = asyncio.ensure_future(generations.run(received.take))
        await asyncio.sleep(0)
        model.answers[0].put_nowait(piece("a"))
        await until(lambda: received.pieces == [(0, piece("a"))])
        running.end()
        with pytest.raises(RequestError, match=r"^the server ends"):
            await going
        await generations.aclose()
        assert model.closed == [0]
        later = Generations(
            model,
            [GenerationRequest([1], SamplingParams())],
            timeout=60.0,
            metrics=Metrics(),
            record=RequestRecord(),
            running=running,
        )
        with pytest.raises(RequestError, match=r"^the server ends"):
            await later.arrival(60.0)
        await later.aclose()

    asyncio.run(run())


def test_a_failed_answer_raises_its_error():
    async def run():
        model = Script()
        generations, _ = begin(model)
        await asyncio.sleep(0)
        model.answers[0].put_nowait(RuntimeError("broken"))
        with pytest.raises(RuntimeError, match=r"^broken$"):
            await generations.arrival(60.0)
        await generations.aclose()

    asyncio.run(run())


def test_a_failed_receiver_raises_its_error_and_ends_the_answers():
    async def run():
        model = Script()
        generations, _ = begin(model, 2)
        await asyncio.sleep(0)
        model.answers[0].put_nowait(piece("a"))

        async def fail(index, piece):
            raise TimeoutError("the client does not read")

        with pytest.raises(TimeoutError, match="does not read"):
            await generations.run(fail)
        await generations.aclose()
        assert sorted(model.closed) == [0, 1]

    asyncio.run(run())
