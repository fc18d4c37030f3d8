"""Many prompts to one model in this process, each with its own parameters, and the answers as they come.

    python examples/poems_at_once.py                       # the packaged poet
    python examples/poems_at_once.py MODEL --memory 6GB    # a model directory, within so much of a GPU

All are computed together. Each is drawn by its own seed, so the same command prints the same poems.
"""

import argparse
import sys
import time

import warpbus
from warpbus.demo import model_path

TITLES = ("春夜", "江上", "秋思", "山中", "送别", "听雨", "古寺", "归舟")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Let a model write several poems at once.")
    parser.add_argument(
        "model", nargs="?", default=str(model_path()), help="a model directory; the packaged poet by default"
    )
    parser.add_argument("--memory", help="what the process may take of a GPU, for instance 6GB")
    options = parser.parse_args(arguments)
    try:
        write(options.model, options.memory)
    except warpbus.WarpbusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def write(model: str, memory: str | None) -> None:
    """Print the poems in the order in which they are done."""
    llm = warpbus.LLM(model, memory=memory)
    print(llm.describe())
    prompts = [llm.render([{"role": "user", "content": f"写一首题为《{title}》的五言绝句。"}]) for title in TITLES]
    # The first is the likeliest answer, the others are drawn.
    params = [
        warpbus.SamplingParams(temperature=0.8 if seed else 0, top_p=0.9, seed=seed, max_tokens=256)
        for seed in range(len(TITLES))
    ]
    started = time.perf_counter()
    tokens = 0
    for chunk in llm.generate(prompts, params, stream=True):
        if chunk.completion is not None:
            tokens += len(chunk.completion.token_ids)
            print(f"\n《{TITLES[chunk.index]}》 ({chunk.completion.finish_reason})\n{chunk.completion.text.strip()}")
    seconds = time.perf_counter() - started
    print(f"\n{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    sys.exit(main())
