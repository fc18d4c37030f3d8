"""The kinds of requests that `soak.py` mixes: answers that are read, clients that leave, and what is refused."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from soak_answers import Answer, Body, World, WrongError, answered, asked, decoded, error_of, loads, refusal, verse
from soak_client import Connection, CutShortError

Kind = Callable[[World, random.Random], Awaitable[None]]


async def same_as_alone(world: World, draw: random.Random) -> None:
    """A request of which is known what it gets when nothing else runs."""
    path, body, expected = draw.choice(world.references)
    body = _streamed(body, draw)
    async with await Connection.open(world.address) as connection:
        found = await answered(world, connection, path, body)
    if isinstance(found, Answer):
        if world.exact and found != expected:
            raise WrongError(f"{path} {json.dumps(body, ensure_ascii=False)}: {found} instead of {expected}")
        found = "answered in a stream" if body.get("stream") else "answered"
    world.note("same as alone", found)


async def new(world: World, draw: random.Random) -> None:
    """A request that was never made before."""
    path, body = asked(world, draw, repeats=False)
    body = _streamed(body, draw)
    async with await Connection.open(world.address) as connection:
        found = await answered(world, connection, path, body)
    if isinstance(found, Answer):
        _check(body, found)
        found = "answered in a stream" if body.get("stream") else "answered"
    world.note("new", found)


async def several(world: World, draw: random.Random) -> None:
    """Requests that follow each other on a connection, which stays open also after errors."""
    async with await Connection.open(world.address) as connection:
        for _ in range(draw.randint(2, 4)):
            if draw.random() < 0.3:
                await connection.ask("GET", draw.choice(("/v1/models", "/version", "/is_sleeping")))
                if (await connection.head()).status != 200:
                    raise WrongError(f"{await connection.body()!r}")
                await connection.body()
                world.note("several on a connection", "answered")
                continue
            path, body, _ = draw.choice(world.references)
            found = await answered(world, connection, path, _streamed(body, draw))
            world.note("several on a connection", "answered" if isinstance(found, Answer) else found)


async def leaves_before_answer(world: World, draw: random.Random) -> None:
    """A client that goes while it waits: in the queue, while the prompt is read, or just before the end."""
    path, body = asked(world, draw, repeats=False)
    body = _streamed(body | {"max_tokens": draw.choice((1, 40, 250))}, draw)
    async with await Connection.open(world.address) as connection:
        await connection.ask("POST", path, body)
        await asyncio.sleep(draw.choice((0.0, 0.001, 0.01, 0.05, 0.3)))
        await _go(connection, draw)
    world.note("leaves before the answer", "left")


async def leaves_midstream(world: World, draw: random.Random) -> None:
    """A client that goes after some events."""
    path, body = asked(world, draw, repeats=False)
    body |= {"stream": True, "max_tokens": 250, "n": draw.choice((1, 1, 3))}
    started = time.monotonic()
    async with await Connection.open(world.address) as connection:
        await connection.ask("POST", path, body)
        head = await connection.head()
        if head.status != 200:
            world.note("leaves in mid-stream", await refusal(world, connection, head, started))
            return
        left = draw.randint(1, 30)
        async for _ in connection.pieces():
            left -= 1
            if not left:
                await _go(connection, draw)
                break
    world.note("leaves in mid-stream", "read to the end" if left else "left")


async def never_reads(world: World, draw: random.Random) -> None:
    """A client that asks for much and reads nothing of it for a while, and then goes."""
    path, body = asked(world, draw, repeats=False)
    chat = path == "/v1/chat/completions"
    body |= {"stream": True, "max_tokens": 60, "n": 2, "logprobs": True} if chat else {"stream": True, "logprobs": 20}
    if chat:
        body["top_logprobs"] = 20
    async with await Connection.open(world.address, receive_buffer=2048) as connection:
        await connection.ask("POST", path, body)
        await asyncio.sleep(draw.uniform(0.5, 3))
        await _go(connection, draw)
    world.note("never reads", "left")


async def half_sent(world: World, draw: random.Random) -> None:
    """A client that goes before it has sent all of its request."""
    data = json.dumps(asked(world, draw, repeats=False)[1]).encode()
    async with await Connection.open(world.address) as connection:
        if draw.random() < 0.3:
            await connection.send(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncont")
        else:
            await connection.ask(
                "POST", "/v1/completions", data[: len(data) // 2], headers={"content-length": str(len(data))}
            )
        await asyncio.sleep(draw.choice((0.0, 0.05)))
        await _go(connection, draw)
    world.note("half sent", "left")


@dataclass(frozen=True)
class Refused:
    """A request that has to be refused.

    Attributes:
        why: what is wrong with it.
        status: that it gets.
        send: sends it.
        cut: the server may close the connection before the client has read the answer, as where it stops reading.
    """

    why: str
    status: int
    send: Callable[[World, Connection, random.Random], Awaitable[None]]
    cut: bool = False


async def refused(world: World, draw: random.Random) -> None:
    """A request with something wrong."""
    wrong = draw.choice([one for one in REFUSED if world.address.key is not None or one.status != 401])
    started = time.monotonic()
    async with await Connection.open(world.address) as connection:
        try:
            await wrong.send(world, connection, draw)
            head = await connection.head()
            data = await connection.body()
        except CutShortError:
            if not wrong.cut:
                raise WrongError(f"{wrong.why}: the connection was closed") from None
            world.note("refused", f"{wrong.why}: closed")
            return
    if head.status == 503 and started < world.trouble_until:
        world.note("refused", "503, the engine died")
        return
    # A grammar is looked at by the engine, which it has to reach.
    if head.status == 429 and error_of(loads(data))["code"] == "queue_full":
        world.note("refused", "429, come again")
        return
    if head.status != wrong.status:
        raise WrongError(f"{wrong.why}: {head.status} {data[:300]!r} instead of {wrong.status}")
    # What is no HTTP is answered by the HTTP library, in its words.
    if head.headers.get("content-type", "").startswith("application/json"):
        error_of(loads(data))
    world.note("refused", f"{wrong.status}: {wrong.why}")


async def other_routes(world: World, draw: random.Random) -> None:
    """What does not generate."""
    text = verse(draw, 1, 300)
    async with await Connection.open(world.address) as connection:
        started = time.monotonic()
        route = draw.choice(("/tokenize", "/v1/models", "/health", "/metrics", "/version", "/openapi.json", "/"))
        body = {"prompt": text} if route == "/tokenize" else None
        await connection.ask("POST" if body else "GET", route, body)
        head = await connection.head()
        if head.status == 503 and started < world.trouble_until:
            await connection.body()
            world.note("other routes", "503, the engine died")
            return
        if head.status != 200:
            raise WrongError(f"{route}: {head.status} {await connection.body()!r}")
        if body:
            await connection.ask("POST", "/detokenize", {"tokens": (await decoded(connection))["tokens"]})
            if (await connection.head()).status == 200 and (back := (await decoded(connection))["prompt"]) != text:
                raise WrongError(f"{text} came back as {back}")
            world.note("other routes", "answered")
        else:
            await connection.body()
    world.note("other routes", "answered")


async def burst(world: World, draw: random.Random) -> None:
    """More requests at once than may run and wait: some are answered, the others refused for now."""
    body: Body = {"model": world.model, "prompt": verse(draw, 1, 30), "max_tokens": 30, "ignore_eos": True}

    async def one() -> None:
        async with await Connection.open(world.address) as connection:
            found = await answered(world, connection, "/v1/completions", body)
        world.note("burst", "answered" if isinstance(found, Answer) else found)

    await asyncio.gather(*[one() for _ in range((world.places or 100) + 20)])


def _streamed(body: Body, draw: random.Random) -> Body:
    return body | {"stream": True, "stream_options": {"include_usage": True}} if draw.random() < 0.5 else body


async def _go(connection: Connection, draw: random.Random) -> None:
    if draw.random() < 0.5:
        connection.reset()
    else:
        await connection.leave()


def _check(body: Body, found: Answer) -> None:
    prompts = body["prompt"] if isinstance(body.get("prompt"), list) and isinstance(body["prompt"][0], str) else [0]
    wanted = len(prompts) * body.get("n", 1)
    if len(found.choices) != wanted:
        raise WrongError(f"{len(found.choices)} choices instead of {wanted}")
    if not wanted <= found.tokens[1] <= wanted * body["max_tokens"]:
        raise WrongError(f"{found.tokens[1]} tokens, but max_tokens {body['max_tokens']} and {wanted} choices")
    for text, reason, names in found.choices:
        if reason == "stop" and any(stop in text for stop in body.get("stop", ())):
            raise WrongError(f"a stop string is in {text!r}")
        if body.get("logprobs") not in (None, False) and text and not names:
            raise WrongError(f"no logprobs for {text!r}")


def _json(why: str, status: int, change: Any, path: str = "/v1/completions", *, cut: bool = False) -> Refused:
    """A request whose body is changed, or replaced by bytes."""

    async def send(world: World, connection: Connection, draw: random.Random) -> None:
        usual: Body = {"model": world.model, "max_tokens": 8, "stream": draw.random() < 0.3}
        usual |= {"prompt": "春"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "春"}]}
        found = change(world) if callable(change) else change
        await connection.ask("POST", path, found if isinstance(found, bytes) else usual | found)

    return Refused(why, status, send, cut)


def _plain(
    why: str, status: int, method: str, path: str, headers: dict[str, str | None] | None = None, body: Any = None
) -> Refused:
    async def send(world: World, connection: Connection, draw: random.Random) -> None:
        content = {"model": world.model, "prompt": "春"} if body is None and method == "POST" else body
        await connection.ask(method, path, content, headers=headers)

    return Refused(why, status, send)


def _bytes(why: str, status: int, data: bytes, *, cut: bool = False) -> Refused:
    async def send(world: World, connection: Connection, draw: random.Random) -> None:
        await connection.send(data)

    return Refused(why, status, send, cut)


async def _chunked(world: World, connection: Connection, draw: random.Random) -> None:
    await connection.ask("POST", "/v1/completions", headers={"content-length": None, "transfer-encoding": "chunked"})
    for _ in range(12):
        await connection.send(b"40000\r\n" + b" " * 0x40000 + b"\r\n")
    await connection.send(b"0\r\n\r\n")


_CHAT = "/v1/chat/completions"
_HUGE = b" " * (3 << 20)
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

REFUSED = (
    _json("JSON that is none", 400, b'{"model": '),
    _json("an empty body", 400, b"", _CHAT),
    _json("bytes that are no text", 400, b'{"prompt": "\xff\xfe"}'),
    _json("JSON nested too deep", 400, b"[" * 100_000, _CHAT),
    _json("a list in place of an object", 400, b"[1, 2]"),
    _json("a number in place of an object", 400, b"1e999", _CHAT),
    _json("NaN", 400, b'{"model": "x", "prompt": "x", "temperature": NaN}'),
    _json("a number of many digits", 400, b'{"model": "x", "prompt": "x", "seed": ' + b"9" * 5000 + b"}"),
    _json("a wrong type", 400, {"max_tokens": "8"}),
    _json("messages of a wrong type", 400, {"messages": "春"}, _CHAT),
    _json("no messages", 400, {"messages": []}, _CHAT),
    _json("an unknown role", 400, {"messages": [{"role": "x", "content": "春"}]}, _CHAT),
    _json("a picture", 400, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, _CHAT),
    _json("an unsupported field", 400, {"use_beam_search": True}),
    _json("out of range", 400, {"temperature": -1}),
    _json("too hot", 400, {"temperature": 1e6}),
    _json("no probability", 400, {"top_p": 0}, _CHAT),
    _json("too many answers", 400, {"n": 999}),
    _json("too many stop strings", 400, {"stop": ["x"] * 99}),
    _json("an empty stop string", 400, {"stop": ""}),
    _json("more minimum than maximum", 400, {"min_tokens": 9}),
    _json("an empty prompt", 400, {"prompt": ""}),
    _json("no token of the vocabulary", 400, {"prompt": [10**7]}),
    _json("a bias for no token", 400, {"logit_bias": {"100000000": 1}}),
    _json("a prompt that is too long", 400, lambda world: {"prompt": [500] * world.context}),
    _json("a long prompt as text", 400, lambda world: {"prompt": "春夜" * world.context}),
    _json("a long conversation", 400, lambda world: {"messages": [{"role": "user", "content": "一" * 9999}]}, _CHAT),
    _json("no regular expression", 400, {"guided_regex": "("}),
    _json("a long expression", 400, {"guided_regex": "a" * 70_000}),
    _json("no schema", 400, {"guided_json": {"type": "colour"}}),
    _json("two grammars", 400, {"guided_regex": "a", "guided_choice": ["b"]}, _CHAT),
    _json("tools that it does not know", 400, {"tools": [_TOOL]}, _CHAT),
    _json("an unknown model", 404, {"model": "gpt-99"}),
    _json("a huge body", 413, _HUGE, cut=True),
    Refused("a huge body in pieces", 413, _chunked, cut=True),
    _plain("no such route", 404, "POST", "/v1/nothing"),
    _plain("a route with tricks", 404, "GET", "/page/../../../etc/passwd"),
    _plain("a wrong method", 405, "GET", "/v1/completions"),
    _plain("embeddings of nothing", 400, "POST", "/v1/embeddings"),
    _plain("no key", 401, "POST", "/v1/completions", {"authorization": None}),
    _plain("a wrong key", 401, "GET", "/v1/models", {"authorization": "Bearer not-the-key"}),
    _plain("another host", 403, "POST", "/v1/completions", {"host": "evil.example"}),
    _plain("another origin", 403, "POST", "/v1/completions", {"origin": "https://evil.example"}),
    _plain("a length of many digits", 413, "POST", "/v1/completions", {"content-length": "9" * 20}),
    _bytes("no HTTP", 400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", cut=True),
    _bytes(
        "a length that is none", 400, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: x\r\n\r\n"
    ),
    _bytes("a head without end", 400, b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 20_000, cut=True),
)

KINDS: tuple[tuple[Kind, float], ...] = (
    (same_as_alone, 34),
    (new, 12),
    (several, 4),
    (leaves_before_answer, 9),
    (leaves_midstream, 9),
    (never_reads, 1),
    (half_sent, 3),
    (refused, 22),
    (other_routes, 5),
)
"""And how often each is chosen."""
