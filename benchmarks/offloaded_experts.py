"""How fast a mixture of experts runs where not all of its experts fit on the GPU, beside what the plan says.

    python benchmarks/offloaded_experts.py SHAPE --memory 8GB [--scheme w4a16-g128] [--max-model-len 4096]

SHAPE is a known shape, such as glm-4.7-flash; weights are random. With random weights all experts are chosen about
equally often, so that moving hot experts to the GPU gains less than with a trained model.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import torch

from warpbus.cuda.memory_size import parse_memory
from warpbus.cuda.rates import card_of
from warpbus.engine.engine import Engine
from warpbus.engine.forecast import forecast_plan
from warpbus.engine.plan import Stored, check_host_memory, enforce, plan_memory
from warpbus.errors import WarpbusError
from warpbus.models import SHAPES, random_model
from warpbus.qtensor import Scheme


def run(shape: str, memory: str, scheme: Scheme, max_model_len: int, tokens: int) -> None:
    """Plan, load, and time a long prompt and the steps after a short one."""
    device, config = torch.device("cuda", 0), SHAPES[shape]
    stored = Stored.uniform(config, torch.bfloat16, scheme)
    limit = parse_memory(memory, torch.cuda.get_device_properties(device).total_memory)
    plan = plan_memory(stored, limit, max_model_len=max_model_len, max_num_seqs=1)
    check_host_memory(plan)
    print(plan)
    print(forecast_plan(stored, card_of(device), plan).speed())
    enforce(plan, device)
    model = random_model(
        *(config, scheme, device, torch.bfloat16),
        head=plan.head,
        embedding=plan.embedding,
        embedding_device="cpu" if plan.embedding_on_cpu else None,
        offloaded=plan.offloaded,
    )
    engine = Engine.planned(model, plan, max_num_seqs=1)
    engine.warm()
    draw = torch.Generator().manual_seed(0)
    length = min(plan.prefill_tokens, plan.context - 8)
    prompt = torch.randint(config.vocab_size, (length,), generator=draw).tolist()
    print(f"prompt of {length:,} tokens: {_seconds(engine, prompt, 1) * 1e3:.0f} ms")
    short = prompt[:128]
    first = _seconds(engine, short, 1)
    for _ in range(3):
        experts = engine._instance.runner.experts
        before, seconds = experts.exchanged, _seconds(engine, short, tokens) - first
        print(f"{(tokens - 1) / seconds:.1f} tokens/s, {experts.exchanged - before} experts moved to the GPU meanwhile")


def _seconds(engine: Engine, prompt: list[int], tokens: int) -> float:
    engine.shrink()  # no prompt is in the cache already
    torch.cuda.synchronize()
    begin = time.perf_counter()
    engine.decode([prompt], tokens)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--memory", required=True)
    parser.add_argument("--scheme", default="w4a16-g128")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=512)
    given = parser.parse_args(arguments)
    try:
        run(given.shape, given.memory, Scheme.parse(given.scheme), given.max_model_len, given.tokens)
    except WarpbusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
