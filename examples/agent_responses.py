"""A conversation over OpenAI's Responses API of `warpbus serve`, which keeps it: a turn names the one before it.

    warpbus serve demo                          # in another terminal
    pip install openai
    python examples/agent_responses.py          # --url, --model and --key for another server

Codex CLI uses the same API (docs/clients.md says what was run). In ~/.codex/config.toml:

    model = "GLM-4.5-Air"
    model_context_window = 131072
    model_provider = "warpbus"

    [model_providers.warpbus]
    name = "Warpbus"
    base_url = "http://127.0.0.1:8000/v1"
    wire_api = "responses"
"""

import argparse
import sys

import openai

TURNS = ("写一首题为《春夜》的五言绝句。", "再写一首题为《秋思》的五言绝句。")


def converse(client: openai.OpenAI, model: str, turns: tuple[str, ...] = TURNS) -> list[str]:
    """Send the turns one after another, each as a stream, without the history; the texts of the answers."""
    previous: str | None = None
    texts: list[str] = []
    for turn in turns:
        with client.responses.stream(
            model=model, input=turn, previous_response_id=previous or openai.omit, max_output_tokens=200
        ) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    print(event.delta, end="", flush=True)
            response = stream.get_final_response()
        usage = response.usage
        if usage is not None:
            cached = usage.input_tokens_details.cached_tokens
            print(f"\n({usage.input_tokens} tokens in, {cached} of them cached, {usage.output_tokens} out)")
        previous = response.id
        texts.append(response.output_text)
    return texts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Talk to a model of a running warpbus serve.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server, without /v1")
    parser.add_argument("--model", help="one that it serves; the first by default")
    parser.add_argument("--key", default="none", help="where the server wants one")
    options = parser.parse_args(arguments)
    try:
        with openai.OpenAI(base_url=f"{options.url}/v1", api_key=options.key) as client:
            converse(client, options.model or client.models.list().data[0].id)
    except openai.APIConnectionError:
        print(f"error: nobody answers at {options.url}: start `warpbus serve demo`, or give --url", file=sys.stderr)
        return 1
    except openai.APIStatusError as error:
        print(f"error: {error.status_code}: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
