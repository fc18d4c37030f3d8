"""The first token of a prompt whose KV blocks are in main memory or on disk, beside one that is computed.

    python benchmarks/kv_host_memory.py
    python benchmarks/kv_host_memory.py --device cuda --shape llama-3-8b --tokens 32768
    python benchmarks/kv_host_memory.py --tokens 2048 --rounds 8 --threads 1

An engine has a KV cache with room for one prompt. In each round a new prompt is computed, which evicts the blocks of
the one before to main memory; then the one before is asked again, whose blocks come back. So both take turns, and
every sample is kept. The model is random: a GLM with ChatGLM2-6B's layout in float32, or `--shape` in bfloat16. On a
CPU the copies are within main memory; a GPU computes faster, and copies over its link.

For the disk, each round starts an engine anew, which is asked for the prompt that the last one has computed, and then
computes another. The files are written out and dropped from the system's page cache before, so that they are read from
the disk of `--disk`, which a run on a GPU leaves out. The records go to benchmarks/results.
"""

import argparse
import os
import random
import shlex
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

# As in cpu_decode.py: libgomp reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from warpbus.bench.cases import versions
from warpbus.bench.records import RESULTS, Peer, Record, now, ratio, write
from warpbus.cuda.cpu import cpu_model
from warpbus.cuda.memory_size import parse_memory
from warpbus.engine.blocks import BLOCK
from warpbus.engine.disk_cache import DiskSpace
from warpbus.engine.engine import Engine, request
from warpbus.models import SHAPES, Decoder, random_model


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


def measure(model: Decoder, tokens: int, rounds: int, host_bytes: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token: of prompts in main memory, and of computed ones."""
    cache = -(-(tokens + 2) // BLOCK) * BLOCK
    engine = Engine(model, max_model_len=cache, cache_tokens=cache, host_bytes=host_bytes)
    draw = random.Random(0)
    found, computed = [], []
    before: list[int] = []
    for index in range(rounds + 1):
        prompt = draw.choices(range(model.config.vocab_size), k=tokens)
        seconds = first_token(engine, prompt)
        if index:
            computed.append(seconds)
            hits = engine.stats().host_hits
            found.append(first_token(engine, before))
            if engine.stats().host_hits - hits < tokens - 3 * BLOCK:  # a block or two may still be in the cache
                raise RuntimeError("the prompt was not found in main memory")
        before = prompt
    return found, computed


def measure_disk(model: Decoder, tokens: int, rounds: int, directory: Path) -> tuple[list[float], list[float]]:
    """As `measure`, of prompts on the disk."""
    cache = -(-(tokens + 2) // BLOCK) * BLOCK
    space = DiskSpace(directory, 2**40, "benchmark")
    draw = random.Random(1)
    found, computed = [], []
    before: list[int] = []
    for index in range(rounds + 1):
        engine = Engine(model, max_model_len=cache, cache_tokens=cache, disk=space)
        if index:
            found.append(first_token(engine, before))
            if engine.stats().disk_hits < tokens - BLOCK:
                raise RuntimeError("the prompt was not found on the disk")
        before = draw.choices(range(model.config.vocab_size), k=tokens)
        seconds = first_token(engine, before)
        if index:
            computed.append(seconds)
        engine.save()
        engine.close()
        forget_pages(directory)
    return found, computed


def forget_pages(directory: Path) -> None:
    """Write files out, and drop them from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt; 2048 by default")
    parser.add_argument("--rounds", type=int, default=6, help="6 by default")
    parser.add_argument("--threads", type=int, default=1, help="1 by default")
    parser.add_argument("--device", default="cpu", help="cpu by default")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="a model of this shape, whole and in bfloat16")
    parser.add_argument(
        "--host-memory", default="16GB", help="for evicted blocks, two prompts at least; 16GB by default"
    )
    parser.add_argument("--hidden", type=int, default=512, help="width of the model; 512 by default")
    parser.add_argument("--layers", type=int, default=12, help="12 by default")
    parser.add_argument("--disk", type=Path, help="a directory for the files; by default that of temporary files")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the directory of the record")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    on_gpu = options.device != "cpu"
    shape, dtype = SHAPES[options.shape or "chatglm2-6b"], torch.bfloat16
    if options.shape is None:
        dtype = torch.float32
        shape = shape.resized(
            hidden_size=options.hidden,
            num_heads=options.hidden // 64,
            ffn_size=options.hidden * 7 // 2,
            num_layers=options.layers,
        )
    model = random_model(shape, None, options.device, dtype)
    words = [
        each for at, each in enumerate(sys.argv) if at and not {"--output", "--disk"} & {*sys.argv[at - 1 : at + 1]}
    ]

    def record(bench: str, samples: tuple[list[float], list[float]], where: str) -> Record:
        found, computed = samples
        ours, theirs = median(found), median(computed)
        print(
            f"first token of {options.tokens:,} tokens on {options.device}: {ours * 1e3:.0f} ms from {where}, "
            f"{theirs * 1e3:.0f} ms computed: {ratio('latency', ours, theirs):.1f} times as fast"
        )
        return Record(
            bench=bench,
            case={
                "model": options.shape or "chatglm2",
                "parameters": shape.num_parameters,
                "hidden": shape.hidden_size,
                "layers": shape.num_layers,
                "prompt": options.tokens,
                "threads": options.threads,
                "dtype": str(dtype).removeprefix("torch."),
            },
            metric="latency",
            unit="s",
            ours=ours,
            peer=Peer("computed", f"torch {torch.__version__}", theirs),
            ratio=ratio("latency", ours, theirs),
            floor=None,
            samples={"ours": found, "peer": computed},
            device=torch.cuda.get_device_name(options.device) if on_gpu else "cpu",
            versions={**versions(), "cpu": cpu_model()},
            date=now(),
            command=shlex.join(["python", "benchmarks/kv_host_memory.py", *words]),
        )

    host_bytes = parse_memory(options.host_memory)
    memory = record("kv-host-memory", measure(model, options.tokens, options.rounds, host_bytes), "main memory")
    print(write([memory], options.output))
    if on_gpu:
        return
    with tempfile.TemporaryDirectory(dir=options.disk) as directory:
        disk = record("kv-disk", measure_disk(model, options.tokens, options.rounds, Path(directory)), "disk")
    print(write([disk], options.output))


if __name__ == "__main__":
    main()
