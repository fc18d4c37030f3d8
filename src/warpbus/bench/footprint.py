"""How much of a GPU's memory a model takes, by the driver's account, in a process of its own.

The driver counts all of it: weights, cache, activations, graphs, the code of the kernels and the process's own context.
"""

import gc
import json
import subprocess
import sys

import torch

from warpbus.bench.decoders import random_prompt
from warpbus.cuda.dtype_names import short_name
from warpbus.engine.engine import Engine
from warpbus.engine.plan import MemoryPlan, Stored, enforce, plan_memory
from warpbus.errors import DeviceError
from warpbus.models import SHAPES, Decoder, ModelConfig, random_model
from warpbus.qtensor import Scheme


def measure_memory(
    shape: str,
    scheme: Scheme,
    dtype: torch.dtype,
    device: torch.device,
    *,
    encode: int,
    generate: int,
    limit: int | None = None,
) -> tuple[int, int]:
    """The most bytes taken while a prompt is read, and while tokens are generated.

    Args:
        shape: one of `SHAPES`, with random weights.
        encode: tokens of the prompt that is read.
        generate: tokens that are generated.
        limit: bytes of the GPU's memory that a plan is made for, as `warpbus chat --memory` does; None: without a plan,
            nothing is rounded or moved to take less.

    Raises:
        DeviceError: that process fails; the message is its own.
    """
    code = "from warpbus.bench.footprint import main; main()"
    free = torch.cuda.mem_get_info(device)[0]
    words = [shape, scheme, short_name(dtype), device, encode, generate, limit or 0]
    command = [sys.executable, "-c", code, *map(str, words)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        said = finished.stderr.strip().splitlines() or ["it said nothing"]
        raise DeviceError(f"bench decode: the memory could not be measured: {said[-1]}")
    left = json.loads(finished.stdout.splitlines()[-1])
    return free - left["encode"], free - left["generate"]


def main() -> None:
    """The main function of that process: prints the least number of free bytes."""
    shape, scheme, dtype, where, encode, generate, limit = sys.argv[1:]
    device = torch.device(where)
    torch.cuda.set_device(device)
    tasks = {"encode": (int(encode), 1), "generate": (1, int(generate))}
    longest = max(map(sum, tasks.values()))
    model, plan = _made(SHAPES[shape], Scheme.parse(scheme), getattr(torch, dtype), device, int(limit), longest)
    left = {}
    for name, (prompt, tokens) in tasks.items():
        # torch returns no cached memory by itself: the free memory at the end is that at the peak.
        gc.collect()
        torch.cuda.empty_cache()
        if plan is None:
            engine = Engine(model, max_model_len=prompt + tokens, max_num_seqs=1)
        else:
            engine = Engine.planned(model, plan, max_num_seqs=1)
        engine.decode([random_prompt(model.config, prompt)], tokens)
        left[name] = torch.cuda.mem_get_info(device)[0]
        del engine
    print(json.dumps(left))


def _made(
    config: ModelConfig, scheme: Scheme, dtype: torch.dtype, device: torch.device, limit: int, longest: int
) -> tuple[Decoder, MemoryPlan | None]:
    """The model; within `limit` bytes, if there are any, laid out by a plan that is in force from now on."""
    if not limit:
        return random_model(config, scheme, device, dtype), None
    plan = plan_memory(Stored.uniform(config, dtype, scheme), limit, max_model_len=longest, max_num_seqs=1)
    enforce(plan, device)
    where = "cpu" if plan.embedding_on_cpu else None
    return random_model(
        config, scheme, device, dtype, head=plan.head, embedding=plan.embedding, embedding_device=where
    ), plan
