"""A running server under a load: requests over HTTP whose answers are streamed, timed by the client's clock."""

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from warpbus.bench.servers import serving
from warpbus.bench.serving_load import Figures, Load, RequestSource, Trace
from warpbus.errors import DataError, DeviceError

KEY_VARIABLE = "WARPBUS_API_KEY"

try:
    import httpx
except ModuleNotFoundError:
    HAS_HTTPX = False
else:
    HAS_HTTPX = True


@contextmanager
def served(model: str, device: str) -> Iterator[str]:
    """Serve a model by `warpbus serve` in a process of its own; gives the server's address, and ends it at last.

    Raises:
        DeviceError: the server does not start; the message is its own.
    """
    command = ["serve", model, "--port", "0", "--device", device]
    with serving(command, r"ready at (\S+?):? ", f"bench serving: {model} is not served") as url:
        yield url


@dataclass(frozen=True)
class Served:
    """A model of a server.

    Attributes:
        name: that requests give.
        prompt_end: the tokens that each of its prompts has to end in: [gMASK] <sop> of ChatGLM-6B, and nothing for all
            others.
    """

    name: str
    prompt_end: tuple[int, ...] = ()


def first_model(url: str) -> Served:
    """The first model of a server.

    Raises:
        DeviceError: it does not answer.
        DataError: no such server answers.
    """
    with httpx.Client(base_url=url, headers=_headers(), timeout=30) as client:
        try:
            answer = client.get("/v1/models")
            answer.raise_for_status()
            model = answer.json()["data"][0]
            name = str(model["id"])
            if model.get("owned_by") != "warpbus":  # what others put behind a text is not asked for here
                return Served(name)
            whole, bare = _tokens(client, name, special=True), _tokens(client, name, special=False)
            ends = range(len(bare), len(whole) + 1)
            end = next((at for at in ends if whole[at - len(bare) : at] == bare), len(whole))
            return Served(name, tuple(whole[end:]))
        except httpx.HTTPError as error:
            raise DeviceError(f"--url {url}: no server answers there ({error}): start one with warpbus serve") from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise DataError(
                f"--url {url}: the program that answers has no list of models: give the address of a server"
            ) from None


def _tokens(client: httpx.Client, model: str, *, special: bool) -> list[int]:
    """The ids of a text, with or without the special tokens around it."""
    answer = client.post("/tokenize", json={"model": model, "prompt": "a", "add_special_tokens": special})
    answer.raise_for_status()
    return [int(token) for token in answer.json()["tokens"]]


def drive(url: str, model: str, load: Load) -> Figures:
    """Send a load to a server.

    Raises:
        DeviceError: the server refuses a request, or ends an answer before its time.
    """
    return Figures.of(asyncio.run(_send(url, model, load)))


async def _send(url: str, model: str, load: Load) -> list[Trace]:
    source, ended = RequestSource(load), asyncio.Event()
    traces: list[Trace] = []
    running: set[asyncio.Task[None]] = set()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=_headers(), timeout=None, limits=limits) as client:
        start = time.perf_counter()
        while running or not source.exhausted:
            now = time.perf_counter() - start
            for prompt, trace in source.due(now, len(running)):
                task = asyncio.create_task(_ask(client, model, prompt, load.tokens, trace, start))
                task.add_done_callback(lambda _: ended.set())
                running.add(task)
                traces.append(trace)
            wait = source.wait(now)
            try:
                await asyncio.wait_for(ended.wait(), None if math.isinf(wait) else wait)
            except TimeoutError:
                continue
            ended.clear()
            for task in [task for task in running if task.done()]:
                running.remove(task)
                if task.exception() is not None:
                    for other in running:
                        other.cancel()
                await task
    return traces


async def _ask(
    client: "httpx.AsyncClient", model: str, prompt: list[int], tokens: int, trace: Trace, start: float
) -> None:
    """Send one request, and note when each piece of its answer comes."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                said = (await answer.aread()).decode(errors="replace")
                raise DeviceError(f"bench serving: the server answered {answer.status_code}: {said[:300]}")
            async for event in _events(answer):
                if event.get("choices"):
                    trace.came(time.perf_counter() - start, 0)
                elif event.get("usage"):
                    trace.tokens = int(event["usage"]["completion_tokens"])
                elif "error" in event:
                    raise DeviceError(f"bench serving: the server ended an answer: {event['error']}")
    except httpx.HTTPError as error:
        raise DeviceError(f"bench serving: the server was lost ({error!r}): see what it says") from None
    if trace.tokens != tokens or not trace.times:
        raise DeviceError(
            f"bench serving: the server gave {trace.tokens} tokens of {tokens}: it has to know ignore_eos"
        )


async def _events(answer: "httpx.Response") -> AsyncIterator[dict[str, Any]]:
    """The data of server-sent events."""
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _headers() -> dict[str, str]:
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}
