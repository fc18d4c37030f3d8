"""An agent's loop over Anthropic's API of `warpbus serve`: the model calls a tool until it has an answer.

    warpbus serve GLM-4.5-Air                   # in another terminal: a model that calls tools
    pip install anthropic
    python examples/agent_messages.py           # --url, --model and --key for another server

Claude Code sends such requests too (docs/clients.md says what was run). Give all of its roles the one model:

    export ANTHROPIC_BASE_URL=http://127.0.0.1:8000 ANTHROPIC_AUTH_TOKEN=none ANTHROPIC_MODEL=GLM-4.5-Air
    export ANTHROPIC_DEFAULT_OPUS_MODEL=GLM-4.5-Air ANTHROPIC_DEFAULT_SONNET_MODEL=GLM-4.5-Air
    export ANTHROPIC_DEFAULT_HAIKU_MODEL=GLM-4.5-Air
    claude
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import anthropic
from anthropic.types import MessageParam, ToolParam

QUESTION = "How many characters have the words “warp” and “bus” together? Ask the tool for each word."
TOOL: ToolParam = {
    "name": "count_characters",
    "description": "the number of characters of a word",
    "input_schema": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
}
MOST_TURNS = 8


def count_characters(word: str) -> str:
    """What the tool does."""
    return str(len(word))


def converse(client: anthropic.Anthropic, model: str, question: str, run: Callable[..., str] = count_characters) -> str:
    """Ask, run the tools that the model calls, and ask again with their results; the last text."""
    messages: list[MessageParam] = [{"role": "user", "content": question}]
    for _ in range(MOST_TURNS):
        with client.messages.stream(model=model, max_tokens=1024, messages=messages, tools=[TOOL]) as stream:
            for text in stream.text_stream:
                print(text, end="", flush=True)
            answer = stream.get_final_message()
        print()
        results: list[Any] = []
        for block in answer.content:
            if block.type == "tool_use":
                result = run(**block.input)
                print(f"{block.name}({block.input}) = {result}")
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
        if not results:
            return "".join(block.text for block in answer.content if block.type == "text")
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    return "(no answer yet)"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Have a model of a running warpbus serve use a tool.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--model", help="one that it serves; the first by default")
    parser.add_argument("--key", default="none", help="where the server wants one")
    parser.add_argument("--question", default=QUESTION)
    options = parser.parse_args(arguments)
    try:
        with anthropic.Anthropic(base_url=options.url, api_key=options.key) as client:
            model = options.model or client.models.list().data[0].id
            converse(client, model, options.question)
    except anthropic.APIConnectionError:
        print(f"error: nobody answers at {options.url}: start `warpbus serve`, or give --url", file=sys.stderr)
        return 1
    except anthropic.APIStatusError as error:
        print(f"error: {error.status_code}: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
