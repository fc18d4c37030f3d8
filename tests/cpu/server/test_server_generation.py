"""`Generations`: pieces in the order of arrival, patience, limits of time, and clients that read slowly."""

import asyncio

import pytest

from warpbus.engine import SamplingParams, TextPiece
from warpbus.server.generation import GenerationRequest, Generations, RequestRecord, RunningGenerations
from warpbus.server.guard import _SendInTime
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


def test_pieces_come_in_the_order_of_their_arrival_and_end():
    async def run():
        model = Script()
        generations, _ = begin(model, 2)
        taking = asyncio.ensure_future(generations.take())
        await asyncio.sleep(0)
        model.answers[1].put_nowait(piece("b", "stop"))
        assert await taking == (1, piece("b", "stop"))
        model.answers[0].put_nowait(piece("a", "length"))
        assert await generations.take() == (0, piece("a", "length"))
        with pytest.raises(StopAsyncIteration):
            await generations.take()
        await generations.aclose()
        assert sorted(model.closed) == [0, 1]

    asyncio.run(run())


def test_patience_ends_without_a_piece_and_loses_none():
    async def run():
        model = Script()
        generations, _ = begin(model)
        for _ in range(3):
            assert await generations.take(0.001) is None
        model.answers[0].put_nowait(piece("a"))
        assert await generations.take(60.0) == (0, piece("a"))
        # A shorter patience than that of the wait before still ends.
        waiting = asyncio.ensure_future(generations.take(60.0))
        await asyncio.sleep(0)
        model.answers[0].put_nowait(piece("b"))
        assert await waiting == (0, piece("b"))
        assert await generations.take(0.001) is None
        await generations.aclose()
        assert model.closed == [0]

    asyncio.run(run())


def test_a_piece_waits_until_the_one_before_it_is_read():
    async def run():
        model = Script()
        generations, _ = begin(model)
        await asyncio.sleep(0)
        for text in "abc":
            model.answers[0].put_nowait(piece(text))
        for _ in range(10):
            await asyncio.sleep(0)
        assert model.answers[0].qsize() == 1  # one piece is queued, one is held: the service merges the others
        assert [(await generations.take())[1].text for _ in "abc"] == ["a", "b", "c"]
        await generations.aclose()

    asyncio.run(run())


def test_the_time_of_all_answers_is_limited():
    async def run():
        model = Script()
        generations, _ = begin(model, timeout=0.01)
        with pytest.raises(RequestError, match=r"^the answer takes longer than the server allows"):
            await generations.take()
        await generations.aclose()
        assert model.closed == [0]

    asyncio.run(run())


def test_a_server_that_ends_ends_them_behind_the_pieces_that_wait():
    async def run():
        model = Script()
        generations, running = begin(model)
        await asyncio.sleep(0)
        model.answers[0].put_nowait(piece("a"))
        for _ in range(5):
            await asyncio.sleep(0)
        running.end()
        assert await generations.take() == (0, piece("a"))
        with pytest.raises(RequestError, match=r"^the server ends"):
            await generations.take()
        await generations.aclose()
        with pytest.raises(RequestError, match=r"^the server ends"):
            await Generations(
                model,
                [GenerationRequest([1], SamplingParams())],
                timeout=60.0,
                metrics=Metrics(),
                record=RequestRecord(),
                running=running,
            ).take()

    asyncio.run(run())


def test_a_failed_answer_raises_its_error():
    async def run():
        model = Script()
        generations, _ = begin(model)
        await asyncio.sleep(0)
        model.answers[0].put_nowait(RuntimeError("broken"))
        with pytest.raises(RuntimeError, match=r"^broken$"):
            await generations.take()
        await generations.aclose()

    asyncio.run(run())


def test_messages_that_cannot_be_sent_time_out_and_others_do_not():
    async def run():
        blocked = asyncio.Event()
        sent = []

        async def send(message):
            if message == "blocks":
                await blocked.wait()
            sent.append(message)

        timed = _SendInTime(send, 0.02)
        assert not timed.used
        await timed("first")
        await asyncio.sleep(0.05)  # nothing is being sent: the timer goes on
        await timed("second")
        with pytest.raises(TimeoutError, match="does not read"):
            await timed("blocks")
        assert timed.used
        assert sent == ["first", "second"]
        assert asyncio.current_task().cancelling() == 0

        other = _SendInTime(send, 60.0)
        task = asyncio.ensure_future(other("blocks"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        other.close()
        timed.close()

    asyncio.run(run())
