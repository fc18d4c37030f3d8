"""The first token of a prompt whose KV blocks are in main memory, beside one that is computed, on the CPU.

    python benchmarks/kv_host_memory.py
    python benchmarks/kv_host_memory.py --tokens 2048 --rounds 8 --threads 1

An engine has a KV cache with room for one prompt. In each round a new prompt is computed, which evicts the blocks of
the one before to main memory; then the one before is asked again, whose blocks come back. So both take turns, and
every sample is kept. The model is random: a GLM with ChatGLM2-6B's layout, float32. On a CPU the copies are within main
memory; a GPU computes faster, and copies over its link. The record goes to benchmarks/results.
"""

import argparse
import os
import random
import shlex
import sys
import time
from pathlib import Path
from statistics import median

# As in cpu_decode.py: libgomp reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from warpbus.bench.cases import versions
from warpbus.bench.records import RESULTS, Peer, Record, now, ratio, write
from warpbus.cuda.cpu import cpu_model
from warpbus.engine.blocks import BLOCK
from warpbus.engine.engine import Engine, request
from warpbus.models import SHAPES, ModelConfig, random_model


def first_token(engine: Engine, prompt: list[int]) -> float:
    """Seconds from a request to its first token; the request is ended then."""
    asked = request(prompt, tokens=2)
    start = time.perf_counter()
    engine.add(asked)
    while not asked.token_ids:
        engine.step()
    seconds = time.perf_counter() - start
    engine.abort(asked)
    return seconds


def measure(shape: ModelConfig, tokens: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token: of prompts in main memory, and of computed ones."""
    cache = -(-(tokens + 2) // BLOCK) * BLOCK
    engine = Engine(
        random_model(shape, None, "cpu", torch.float32), max_model_len=cache, cache_tokens=cache, host_bytes=2**32
    )
    draw = random.Random(0)
    found, computed = [], []
    before: list[int] = []
    for index in range(rounds + 1):
        prompt = draw.choices(range(shape.vocab_size), k=tokens)
        seconds = first_token(engine, prompt)
        if index:
            computed.append(seconds)
            hits = engine.stats().host_hits
            found.append(first_token(engine, before))
            if engine.stats().host_hits - hits < tokens - 3 * BLOCK:  # a block or two may still be in the cache
                raise RuntimeError("the prompt was not found in main memory")
        before = prompt
    return found, computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt; 2048 by default")
    parser.add_argument("--rounds", type=int, default=6, help="6 by default")
    parser.add_argument("--threads", type=int, default=1, help="1 by default")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model; 512 by default")
    parser.add_argument("--layers", type=int, default=12, help="12 by default")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the directory of the record")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    shape = SHAPES["chatglm2-6b"].resized(
        hidden_size=options.hidden,
        num_heads=options.hidden // 64,
        ffn_size=options.hidden * 7 // 2,
        num_layers=options.layers,
    )
    found, computed = measure(shape, options.tokens, options.rounds)
    ours, theirs = median(found), median(computed)
    words = [each for at, each in enumerate(sys.argv) if at and "--output" not in sys.argv[at - 1 : at + 1]]
    record = Record(
        bench="kv-host-memory",
        case={
            "model": "chatglm2",
            "parameters": shape.num_parameters,
            "hidden": options.hidden,
            "layers": options.layers,
            "prompt": options.tokens,
            "threads": options.threads,
            "dtype": "float32",
        },
        metric="latency",
        unit="s",
        ours=ours,
        peer=Peer("computed", f"torch {torch.__version__}", theirs),
        ratio=ratio("latency", ours, theirs),
        floor=None,
        samples={"ours": found, "peer": computed},
        device="cpu",
        versions={**versions(), "cpu": cpu_model()},
        date=now(),
        command=shlex.join(["python", "benchmarks/kv_host_memory.py", *words]),
    )
    print(
        f"first token of {options.tokens:,} tokens, {options.threads} thread(s): {ours * 1e3:.0f} ms from main memory, "
        f"{theirs * 1e3:.0f} ms computed: {record.ratio:.1f} times as fast"
    )
    print(write([record], options.output))


if __name__ == "__main__":
    main()
