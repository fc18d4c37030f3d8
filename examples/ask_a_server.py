"""Asks `warpbus serve` by OpenAI's client: a streamed answer, many at once, and one that has to be among some.

    warpbus serve demo                          # in another terminal
    pip install openai
    python examples/ask_a_server.py             # --url, --model and --key for another server

Nothing here is Warpbus's own but `guided_choice`: any server in the form of OpenAI's API takes the rest.
"""

import argparse
import asyncio
import sys
import time

import openai
from openai.types.chat import ChatCompletionMessageParam

TITLES = ("春夜", "江上", "秋思", "山中", "送别", "听雨", "古寺", "归舟")
FORMS = ("五言绝句", "七言绝句")


def conversation(request: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": request}]


async def stream(client: openai.AsyncOpenAI, model: str) -> None:
    """Print an answer while it is written, and what the server counted."""
    answer = await client.chat.completions.create(
        model=model,
        messages=conversation("写一首题为《春夜》的五言绝句。"),
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in answer:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:  # the last one, which has no choices
            print(f"\n({chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out)")


async def together(client: openai.AsyncOpenAI, model: str) -> list[str]:
    """Ask for a poem on each title, all at the same moment: the server computes them together."""
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(
            client.chat.completions.create(
                model=model, messages=conversation(f"写一首题为《{title}》的五言绝句。"), seed=number
            )
            for number, title in enumerate(TITLES)
        )
    )
    seconds = time.perf_counter() - started
    tokens = sum(answer.usage.completion_tokens for answer in answers if answer.usage is not None)
    print(f"{len(answers)} answers, {tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s")
    return [answer.choices[0].message.content or "" for answer in answers]


async def choose(client: openai.AsyncOpenAI, model: str, poem: str) -> str:
    """Let the model answer with one of `FORMS` and nothing else; whether it is right is the model's matter."""
    answer = await client.chat.completions.create(
        model=model,
        messages=conversation(f"{poem}\n这首诗是五言绝句还是七言绝句？"),
        temperature=0,
        extra_body={"guided_choice": FORMS},
    )
    return answer.choices[0].message.content or ""


async def run(url: str, model: str | None, key: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
        names = [each.id async for each in client.models.list()]
        chosen = model or names[0]
        print(f"{url} serves {', '.join(names)}")
        await stream(client, chosen)
        poems = await together(client, chosen)
        print(poems[0])
        print("the model says:", await choose(client, chosen, poems[0]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Ask a running warpbus serve.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server, with or without /v1")
    parser.add_argument("--model", help="one that it serves; the first by default")
    parser.add_argument("--key", default="none", help="where the server wants one")
    options = parser.parse_args(arguments)
    try:
        asyncio.run(run(options.url.rstrip("/").removesuffix("/v1"), options.model, options.key))
    except openai.APIConnectionError:
        print(f"error: nobody answers at {options.url}: start `warpbus serve demo`, or give --url", file=sys.stderr)
        return 1
    except openai.APIStatusError as error:
        print(f"error: {error.status_code}: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
