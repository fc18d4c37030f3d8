"""Admission of requests: first come, first served, a few per round of the event loop, and no slot is ever lost."""

import asyncio
import json
import threading
from itertools import pairwise

import pytest
from serving_fakes import FakeService

from warpbus.errors import QueueFullError
from warpbus.server import admission
from warpbus.server.admission import Admission
from warpbus.server.app import create_app
from warpbus.server.registry import LONG_TEXT, Models

COMPLETIONS = "/v1/completions"


class Client:
    """Sends requests to an application without a network."""

    def __init__(self, service):
        models = Models()
        models.add("parrot", service)
        self.app = create_app(models)

    async def post(self, fields, path=COMPLETIONS, sent=None, leaves=None):
        """The status of the response.

        Args:
            fields: of the body; or the body.
            sent: awaited before each message of the response is taken.
            leaves: the client disconnects when this event is set.
        """
        body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        received = [{"type": "http.request", "body": body, "more_body": False}]
        status = []

        async def receive():
            if received:
                return received.pop()
            await (leaves or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if sent is not None:
                await sent()
            if message["type"] == "http.response.start":
                status.append(message["status"])

        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path}
        scope |= {"raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http"}
        scope["headers"] = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        await self.app(scope, receive, send)
        return status[0] if status else None


async def rounds(count):
    for _ in range(count):
        await asyncio.sleep(0)


def prompt(number, size=8):
    return {"prompt": f"{number:{size}}", "max_tokens": 1}


async def others_pass(client):
    """More requests than there are slots are answered."""
    assert (
        await asyncio.wait_for(asyncio.gather(*[client.post(prompt(number)) for number in range(8)]), 60) == [200] * 8
    )


def test_slots_are_given_in_the_order_of_arrival_and_few_per_round():
    async def run():
        queue, order, most = Admission(), [], 0

        async def one(number):
            async with queue.slot({"state": {}}):
                order.append(number)

        tasks = [asyncio.create_task(one(number)) for number in range(20)]
        while not all(task.done() for task in tasks):
            before = len(order)
            await asyncio.sleep(0)
            most = max(most, len(order) - before)
        assert order == list(range(20))
        assert most <= admission._AT_ONCE

    asyncio.run(run())


def test_a_slot_is_released_once():
    async def run():
        queue = Admission()
        for _ in range(5):
            async with queue.slot({"state": {}}) as slot:
                slot.release()
                slot.release()
        await rounds(2)
        assert queue._free._value == admission._AT_ONCE

    asyncio.run(run())


def test_requests_that_are_cancelled_while_they_wait_lose_no_slot():
    async def run():
        queue, hold = Admission(), asyncio.Event()

        async def one(until):
            async with queue.slot({"state": {}}):
                await until.wait()

        holding = [asyncio.create_task(one(hold)) for _ in range(admission._AT_ONCE)]
        waiting = [asyncio.create_task(one(hold)) for _ in range(6)]
        await rounds(2)
        for task in (*waiting[::2], holding[0]):
            task.cancel()
        await rounds(2)
        waiting[1].cancel()  # it has just been woken
        hold.set()
        await asyncio.gather(*holding, *waiting, return_exceptions=True)
        await rounds(2)
        assert queue._free._value == admission._AT_ONCE

    asyncio.run(run())


def test_requests_reach_the_engine_in_the_order_of_their_arrival():
    service = FakeService()

    async def run():
        client = Client(service)
        assert await asyncio.gather(*[client.post(prompt(number)) for number in range(12)]) == [200] * 12

    asyncio.run(run())
    assert [service.tokenizer.decode(ids).strip() for ids, _ in service.asked] == [str(number) for number in range(12)]


def test_few_requests_are_parsed_in_one_round():
    async def run():
        client, refused = Client(FakeService()), []

        async def sent():
            refused.append("head or body")

        fields = {**prompt(1), "model": "other"}
        tasks = [asyncio.create_task(client.post(fields, sent=sent)) for _ in range(12)]
        seen = [0]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            seen.append(len(refused))
        assert seen[-1] == 24
        assert max(after - before for before, after in pairwise(seen)) <= 2 * admission._AT_ONCE

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (b"{", 400),
        ({"prompt": 5}, 400),
        ({"prompt": ""}, 400),
        ({"prompt": "a", "model": "other"}, 404),
        ({"prompt": "a" * 3000}, 400),
    ],
)
def test_a_request_that_is_refused_releases_its_slot_even_if_its_client_does_not_read(fields, status):
    async def run():
        client, reads = Client(FakeService()), asyncio.Event()
        refused = [asyncio.create_task(client.post(fields, sent=reads.wait)) for _ in range(4)]
        try:
            await others_pass(client)
        finally:
            reads.set()
        assert await asyncio.gather(*refused) == [status] * 4

    asyncio.run(run())


def test_a_full_queue_and_an_engine_that_fails_release_the_slot():
    async def run():
        service = FakeService()
        client = Client(service)
        for fails, status in ((QueueFullError("full", retry_after=1.0), 429), (RuntimeError("broken"), 500)):
            service.fails = fails
            answers = [client.post(prompt(number)) for number in range(4)]
            found = await asyncio.gather(*answers, return_exceptions=True)
            assert all(one == status or isinstance(one, RuntimeError) for one in found)
        service.fails = None
        await others_pass(client)

    asyncio.run(run())


def test_clients_that_leave_and_requests_that_are_cancelled_release_their_slots():
    async def run():
        service = FakeService()
        service.pause = asyncio.Event()
        client, leaves = Client(service), asyncio.Event()
        fields = {"prompt": "abc", "max_tokens": 5}
        gone = [asyncio.create_task(client.post(fields, leaves=leaves)) for _ in range(4)]
        cancelled = [asyncio.create_task(client.post(fields)) for _ in range(4)]
        while service.running < 4:
            await asyncio.sleep(0)
        leaves.set()
        for task in cancelled:
            task.cancel()
        await asyncio.gather(*gone, *cancelled, return_exceptions=True)
        assert service.running == 0
        service.pause = 0.0
        await others_pass(client)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": "x" * (LONG_TEXT + 1)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * (LONG_TEXT + 1)}]}),
        ("/generate", {"text": "x" * (LONG_TEXT + 1)}),
        ("/tokenize", {"prompt": "x" * (LONG_TEXT + 1)}),
    ],
)
def test_a_long_text_does_not_hold_up_short_ones(path, fields):
    service = FakeService()
    encode, go_on = service.tokenizer.encode, threading.Event()

    def wait_for_the_others(text):
        if len(text) > LONG_TEXT:
            assert go_on.wait(60)
        return encode(text)

    service.tokenizer.encode = wait_for_the_others

    async def run():
        client = Client(service)
        long = [asyncio.create_task(client.post(fields, path)) for _ in range(4)]
        await rounds(20)
        for size in (8, 2000):
            assert await asyncio.wait_for(client.post(prompt(1, size)), 60) == 200
        assert not any(task.done() for task in long)
        go_on.set()
        await asyncio.gather(*long)

    try:
        asyncio.run(run())
    finally:
        go_on.set()
