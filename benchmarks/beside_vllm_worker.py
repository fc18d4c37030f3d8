"""One engine of `beside_vllm.py`, in a process of its own: how fast it is with one sequence, many, and a long prompt.

    python benchmarks/beside_vllm_worker.py warpbus MODEL --requests 16,64,256
    ~/vllm/bin/python benchmarks/beside_vllm_worker.py vllm MODEL --requests 16,64,256

Both engines get the same random prompts, by token ids, and answer greedily without stopping. Prints a JSON object: the
version, and samples by case.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

ALONE, TOKENS = 128, 256  # tokens of the prompt and the answer of a request that is alone
LONG = 4096  # tokens of the long prompt
LEAST_ID, SPECIAL = 4, 256  # token ids are drawn from here on, and not from the last ones, which may be special

Generate = Callable[[list[list[int]], int], int]
"""Answers prompts with so many tokens each, and returns the number of all tokens generated."""


def warpbus_engine(model: Path, most: int, options: argparse.Namespace) -> tuple[str, Generate]:
    """Its version, and how it answers."""
    import warpbus
    from warpbus.engine import SamplingParams

    llm = warpbus.LLM(
        model, max_num_seqs=most, max_model_len=options.context, activation_dtype=options.activation_dtype
    )

    def generate(prompts: list[list[int]], tokens: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return sum(len(each.token_ids) for each in llm.generate(prompts, params))

    return warpbus.__version__, generate


def vllm_engine(model: Path, most: int, options: argparse.Namespace) -> tuple[str, Generate]:
    """The same of vLLM."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, as ours
    import vllm

    llm = vllm.LLM(
        str(model),
        max_num_seqs=most,
        max_model_len=options.context,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], tokens: int) -> int:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        answers = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
        return sum(len(each.outputs[0].token_ids) for each in answers)

    return vllm.__version__, generate


def measure(generate: Generate, vocabulary: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Samples by case: tokens/s of one sequence, output tokens/s of so many requests, ms to a long prompt's token."""
    draw = random.Random(0)

    def prompts(count: int, tokens: int) -> list[list[int]]:
        return [draw.choices(range(LEAST_ID, max(vocabulary - SPECIAL, LEAST_ID + 1)), k=tokens) for _ in range(count)]

    def seconds(asked: list[list[int]], tokens: int) -> float:
        start = time.perf_counter()
        generated = generate(asked, tokens)
        elapsed = time.perf_counter() - start
        if generated != tokens * len(asked):
            raise RuntimeError(f"{generated} tokens were generated, not {tokens} for each of {len(asked)} prompts")
        return elapsed

    alone = prompts(1, ALONE)
    seconds(alone, TOKENS)
    first = min(seconds(alone, 1) for _ in range(3))
    samples = {"one sequence": [(TOKENS - 1) / (seconds(alone, TOKENS) - first) for _ in range(3)]}
    for count in options.requests:
        seconds(prompts(count, options.prompt), options.answer)
        samples[f"{count} requests"] = [
            count * options.answer / seconds(prompts(count, options.prompt), options.answer) for _ in range(2)
        ]
    long = min(LONG, options.context - 1)
    seconds(prompts(1, long), 1)
    samples["first token"] = [1e3 * seconds(prompts(1, long), 1) for _ in range(5)]
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("warpbus", "vllm"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=lambda text: [*map(int, text.split(","))], default=[16, 64, 256])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each of many requests")
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--activation-dtype", default="auto")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    options = parser.parse_args()
    build = {"warpbus": warpbus_engine, "vllm": vllm_engine}[options.engine]
    version, generate = build(options.model, max(options.requests), options)
    vocabulary = json.loads((options.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    samples = measure(generate, vocabulary, options)
    print(json.dumps({"version": version, "samples": samples}))


if __name__ == "__main__":
    main()
