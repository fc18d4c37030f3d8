"""The first token of prompts of several lengths, with the graphs between the attention of layers and without them.

    python benchmarks/first_token.py
    python benchmarks/first_token.py --shape qwen3-30b-a3b --tokens 500 2000 --cached 4000 --new 100

Two engines share one random model of a real shape, in bfloat16 with quantized weights. One captures graphs for prompts
(`engine/prompt_graphs.py`), the other launches kernel by kernel. They take turns, with a new prompt each time; `--new`
tokens follow a prompt of `--cached` tokens, which both have in their caches. Prompts of each length are asked once
before, so that graphs are captured. The records go to benchmarks/results. On a CPU there are no such graphs, and the
two engines do the same.
"""

import argparse
import random
import shlex
import sys
import time
from pathlib import Path
from statistics import median

import torch

from warpbus.bench.cases import versions
from warpbus.bench.records import RESULTS, Peer, Record, now, ratio, write
from warpbus.engine.engine import Engine, request
from warpbus.models import SHAPES, random_model
from warpbus.qtensor import Scheme

ALL_GRAPHS = 1_000_000
"""An engine that is told how many graphs to keep, however many, captures none for prompts."""


def first_token(engine: Engine, prompt: list[int]) -> float:
    """Seconds from a request to its first token."""
    asked = request(prompt, tokens=1)
    start = time.perf_counter()
    engine.add(asked)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="glm-4.7-flash", help="glm-4.7-flash by default")
    parser.add_argument("--layers", type=int, help="of the model; all by default")
    parser.add_argument("--hidden", type=int, help="width of a model without experts; that of the shape by default")
    parser.add_argument("--scheme", default="w4a16-g128", help="w4a16-g128 by default")
    parser.add_argument("--device", default="cuda", help="cuda by default")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1100, 1500, 2048, 3000, 4096], help="of the prompts")
    parser.add_argument("--cached", type=int, default=8000, help="tokens before the new ones; 8000 by default")
    parser.add_argument("--new", type=int, nargs="*", default=[60, 200, 500, 1000], help="tokens behind cached ones")
    parser.add_argument("--rounds", type=int, default=7, help="prompts for each engine and length; 7 by default")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the directory of the records")
    options = parser.parse_args()

    config = SHAPES[options.shape].resized(num_layers=options.layers)
    if options.hidden is not None:
        config = config.resized(hidden_size=options.hidden, num_heads=options.hidden // 64, ffn_size=2 * options.hidden)
    model = random_model(config, Scheme.parse(options.scheme), torch.device(options.device), torch.bfloat16)
    cached = options.cached if options.new else 0
    cases = [(0, tokens) for tokens in options.tokens] + [(cached, tokens) for tokens in options.new]
    longest = max(before + tokens for before, tokens in cases) + 64
    engines = [
        Engine(model, max_num_seqs=1, max_model_len=longest, cache_tokens=4 * longest, most_graphs=most)
        for most in (None, ALL_GRAPHS)
    ]
    draw = random.Random(0)
    prefix = draw.choices(range(config.vocab_size), k=cached)
    records = []
    words = [each for at, each in enumerate(sys.argv) if at and "--output" not in sys.argv[at - 1 : at + 1]]
    for before, tokens in cases:
        samples: tuple[list[float], list[float]] = [], []
        for index in range(options.rounds + 1):
            for engine, times in zip(engines, samples, strict=True):
                if before and not index:
                    first_token(engine, prefix)
                seconds = first_token(engine, [*prefix[:before], *draw.choices(range(config.vocab_size), k=tokens)])
                if index:
                    times.append(seconds)
        ours, theirs = map(median, samples)
        print(
            f"{options.shape}, {tokens:,} tokens behind {before:,} cached ones: first token after {ours * 1e3:.1f} ms, "
            f"kernel by kernel {theirs * 1e3:.1f} ms: {ratio('latency', ours, theirs):.2f} times as fast",
            flush=True,
        )
        records.append(
            Record(
                bench="first-token",
                case={
                    "model": options.shape,
                    "layers": config.num_layers,
                    "hidden": config.hidden_size,
                    "scheme": options.scheme,
                    "prompt": tokens,
                    "cached": before,
                },
                metric="latency",
                unit="s",
                ours=ours,
                peer=Peer("kernel by kernel", f"torch {torch.__version__}", theirs),
                ratio=ratio("latency", ours, theirs),
                floor=None,
                samples={"ours": samples[0], "peer": samples[1]},
                device=torch.cuda.get_device_name(options.device) if options.device.startswith("cuda") else "cpu",
                versions=versions(),
                date=now(),
                command=shlex.join(["python", "benchmarks/first_token.py", *words]),
            )
        )
    print(write(records, options.output))


if __name__ == "__main__":
    main()
