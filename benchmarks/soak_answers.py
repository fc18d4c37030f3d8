"""What `soak.py` asks for, and what it reads of the answers."""

import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from soak_client import Address, Connection, CutShortError, Head, events

Body = dict[str, Any]

_CHARACTERS = "春夏秋冬山水风云花月江河雪夜松竹梅兰琴酒人归来去何处天地日星海白青红绿高远长一二三五十百千万里"
_SYSTEM = "你是一位诗人。" * 12
_SCHEMA = {
    "type": "object",
    "properties": {"题": {"type": "string", "maxLength": 6}, "行": {"enum": [4, 8]}},
    "required": ["题", "行"],
    "additionalProperties": False,
}


class WrongError(Exception):
    """The server did what it should not do."""


@dataclass(frozen=True)
class Answer:
    """What a request brought, however it came.

    Attributes:
        choices: of each its text, its finish reason and, where they were asked for, the tokens of its logprobs.
        tokens: of the prompts and of the answers, as the usage says.
    """

    choices: tuple[tuple[str, str | None, tuple[str, ...] | None], ...]
    tokens: tuple[int, int]


@dataclass
class World:
    """What all requests of a soak know of.

    Attributes:
        address: of the server.
        model: its name.
        context: the longest prompt with its answer, in tokens.
        exact: an answer does not depend on what else is computed.
        references: requests, and their answers when nothing else ran.
        places: how many requests run or wait before others are refused; None if that is not known.
        trouble_until: requests that began before this time may get the answer that the engine died.
        outcomes: how many requests of a kind ended how.
        failures: what was wrong.
        sent: requests.
    """

    address: Address
    model: str
    context: int
    exact: bool
    places: int | None
    references: list[tuple[str, Body, Answer]] = field(default_factory=list)
    trouble_until: float = 0.0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    sent: int = 0

    def note(self, kind: str, outcome: str) -> None:
        """A request has ended."""
        self.sent += 1
        self.outcomes[kind, outcome] += 1


async def refusal(world: World, connection: Connection, head: Head, started: float) -> str:
    """The outcome of a request that was not answered although nothing was wrong with it."""
    error = error_of(await decoded(connection))
    retry = head.headers.get("retry-after", "")
    if head.status == 429 and error["code"] == "queue_full" and retry.isdecimal() and int(retry) >= 1:
        return "429, come again"
    if head.status == 503 and retry.isdecimal() and started < world.trouble_until:
        return "503, the engine died"
    raise WrongError(f"{head.status} {error} (retry-after {retry!r})")


async def decoded(connection: Connection) -> Any:
    """The JSON of a body."""
    return loads(await connection.body())


def error_of(content: Any) -> Any:
    """OpenAI's error object."""
    if not isinstance(content, dict) or set(content.get("error", ())) != {"message", "type", "param", "code"}:
        raise WrongError(f"no error object: {content!r:.300}")
    return content["error"]


async def answered(world: World, connection: Connection, path: str, body: Body) -> Answer | str:
    """Ask, and read the answer to its end; or the outcome, where there is none."""
    started = time.monotonic()
    await connection.ask("POST", path, body)
    head = await connection.head()
    if head.status != 200:
        return await refusal(world, connection, head, started)
    if not body.get("stream"):
        content = await decoded(connection)
        choices = [(choice["index"], _text(choice), choice) for choice in content["choices"]]
        return _answer(choices, content["usage"])
    if not head.headers.get("content-type", "").startswith("text/event-stream"):
        raise WrongError(f"a stream of {head.headers.get('content-type')}")
    found, usage, end = [], None, ""
    async for event in events(connection):
        if end:
            raise WrongError(f"{event} follows the end of a stream")
        if event is None:
            end = "[DONE]"
        elif "error" in event:
            end = "error"
            if error_of(event)["type"] != "service_unavailable" or started > world.trouble_until:
                raise WrongError(f"in a stream: {event}")
        else:
            found += [(choice["index"], _text(choice), choice) for choice in event["choices"]]
            usage = event["usage"] or usage
    if not end:
        raise CutShortError("a stream without an end")
    return "the stream said that the engine died" if end == "error" else _answer(found, usage)


def loads(data: bytes) -> Any:
    """JSON that the server has sent."""
    try:
        return json.loads(data)
    except ValueError as error:
        raise WrongError(f"no JSON ({error}): {data[:300]!r}") from error


def _text(choice: Body) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice["delta"]).get("content") or "")


def _answer(parts: list[tuple[int, str, Body]], usage: Body | None) -> Answer:
    if usage is None:
        raise WrongError("an answer without usage")
    choices = []
    for index in range(1 + max(index for index, _, _ in parts)):
        mine = [(text, choice) for number, text, choice in parts if number == index]
        reasons = [choice["finish_reason"] for _, choice in mine if choice["finish_reason"] is not None]
        if len(reasons) != 1 or mine[-1][1]["finish_reason"] is None:
            raise WrongError(f"choice {index} ends with {reasons}")
        scores = [choice["logprobs"] for _, choice in mine if choice.get("logprobs")]
        names = tuple(name for one in scores for name in _names(one))
        choices.append(("".join(text for text, _ in mine), reasons[0], names or None))
    return Answer(tuple(choices), (usage["prompt_tokens"], usage["completion_tokens"]))


def _names(logprobs: Body) -> list[str]:
    if "tokens" in logprobs:
        return list(logprobs["tokens"])
    return [one["token"] for one in logprobs["content"]]


def verse(draw: random.Random, least: int, most: int) -> str:
    """Some characters."""
    return "".join(draw.choices(_CHARACTERS, k=draw.randint(least, most)))


def asked(world: World, draw: random.Random, *, repeats: bool) -> tuple[str, Body]:
    """A path and a body with which nothing is wrong; `repeats`: its answer is the same every time."""
    body: Body = {"model": world.model, "max_tokens": draw.choice((1, 8, 40, 90, 160, 300))}
    chat = draw.random() < 0.6
    # Some begin alike, over several blocks of the cache.
    start = _SYSTEM if draw.random() < 0.4 else ""
    if chat:
        system = [{"role": "system", "content": start}] if start else []
        body["messages"] = [*system, {"role": "user", "content": verse(draw, 1, 60)}]
    else:
        texts = [start + verse(draw, 1, 60) for _ in range(draw.choice((1, 1, 1, 2)))]
        ids = [draw.randrange(300, 7000) for _ in range(draw.randint(1, 90))]
        body["prompt"] = draw.choice((texts[0], texts, ids))
    if repeats and draw.random() < 0.5:
        body["temperature"] = 0
    else:
        # Of thousands of tokens that are about as likely, rounding may choose another one when the batch is another.
        body |= {"temperature": draw.choice((0.5, 1.0)), "top_k": 20 if repeats else draw.choice((0, 20))}
        body["top_p"] = draw.choice((0.8, 1.0))
        if repeats or draw.random() < 0.3:
            body["seed"] = draw.randrange(1 << 40)
    if draw.random() < 0.25:
        body["n"] = draw.randint(2, 4)
    _add_options(body, draw, chat=chat)
    return "/v1/chat/completions" if chat else "/v1/completions", body


def _add_options(body: Body, draw: random.Random, *, chat: bool) -> None:
    if draw.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": draw.randint(0, 20)} if chat else {"logprobs": draw.randint(0, 20)}
    if draw.random() < 0.2:
        body |= {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    if draw.random() < 0.1:
        body["logit_bias"] = {str(draw.randrange(300, 7000)): draw.choice((-100, 5)) for _ in range(3)}
    if draw.random() < 0.25:
        body["stop"] = draw.sample(_CHARACTERS, draw.randint(1, 4))
    if draw.random() < 0.2:
        grammars: tuple[Body, ...] = (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "poem", "schema": _SCHEMA}}},
            {"response_format": {"type": "json_object"}},
            {"guided_regex": r"[0-9]{3,9}(\.[0-9]{2})?"},
            {"guided_choice": ["春夜", "秋日", "春"]},
        )
        body |= draw.choice(grammars)
    elif draw.random() < 0.3:
        body["ignore_eos"] = True
    elif draw.random() < 0.2:
        body["min_tokens"] = body["max_tokens"] // 2
