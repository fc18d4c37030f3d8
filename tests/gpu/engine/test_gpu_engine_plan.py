"""The memory contract by the driver's account, with the shapes of well-known models, a process for each.

Experts of GLM-4.7-Flash that do not fit lie in 12 GB of main memory.
"""

import json
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

PROGRAM = """
import json, sys, time
began = time.perf_counter()
import torch
from warpbus.cuda.vmm import mapped_bytes
from warpbus.engine.engine import Engine
from warpbus.engine.plan import Stored, enforce, plan_memory
from warpbus.models import SHAPES, random_model
from warpbus.qtensor import Scheme

limit, context, seqs = map(int, sys.argv[2:])
config, scheme, device = SHAPES[sys.argv[1]], Scheme.parse("w4a16-g128"), torch.device("cuda", 0)
begin = int(sys.stdin.read())
phases = []


def ended(prompt):
    return prompt if config.prompt_end is None else [*prompt[:-1], config.prompt_end]


def note(what):
    torch.cuda.synchronize()
    taken, cache = begin - torch.cuda.mem_get_info(device)[0], mapped_bytes(device)
    # Beside torch and the cache the driver has given the context, kernels, libraries and graphs.
    outside = taken - torch.cuda.memory_reserved() - cache
    graphs = engine._instance.step._graphs._captured if engine else ()
    seconds = round(time.perf_counter() - began, 1)
    phases.append({"after": what, "seconds": seconds, "outside": outside, "cache": cache, "graphs": len(graphs)})


engine = None
plan = plan_memory(Stored.uniform(config, torch.float16, scheme), limit, max_model_len=context, max_num_seqs=seqs)
enforce(plan, device)
note("context")
where = "cpu" if plan.embedding_on_cpu else None
model = random_model(
    config, scheme, device, torch.float16, head=plan.head, embedding=plan.embedding, embedding_device=where,
    offloaded=plan.offloaded,
)
note("weights")
engine = Engine.planned(model, plan, max_num_seqs=seqs)
engine.warm()
note("warm")
length = min(2048, context - 64)
prompt = torch.randint(config.vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
answer = engine.decode([ended(prompt)], 64)[0]
note("a prompt")
long = engine.decode([ended([7 + at] * (context - 40)) for at in range(seqs)], 40)[-1]
note("long prompts")
for rows in {1, 2, 3, min(5, seqs), seqs} & set(range(seqs + 1)):
    for length in (10, 600, 1100):
        engine.decode([ended([7 + at] * length) for at in range(rows)], 3)
note("all sizes of graphs")
print(json.dumps({"phases": phases, "tokens": [len(answer), len(long)], "plan": plan.to_json(),
                  "torch": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.max_memory_allocated()}))
"""


@pytest.mark.parametrize(
    ("model", "limit", "context", "seqs"),
    [
        ("chatglm2-6b", 5_000_000_000, 8320, 1),
        ("chatglm2-6b", 6_000_000_000, 28672, 1),
        ("chatglm2-6b", 6_000_000_000, 4096, 12),
        ("chatglm-6b", 6_000_000_000, 2048, 1),
        ("chatglm-6b", 8_000_000_000, 2048, 5),
        ("glm-4.7-flash", 8_000_000_000, 4096, 1),
        ("glm-4.7-flash", 16_000_000_000, 4096, 4),
    ],
)
def test_encoding_and_generating_stay_within_the_plan(model, limit, context, seqs):
    before = torch.cuda.mem_get_info()[0]
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, model, *map(str, (limit, context, seqs))],
        input=str(before),
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    found = json.loads(finished.stdout.splitlines()[-1])
    # Each at its own peak; torch gives memory back when it captures a graph, so that none of them is the last figure.
    outside, cache = (max(phase[what] for phase in found["phases"]) for what in ("outside", "cache"))
    used = outside + cache + found["torch"]
    shown = f"{used / 1e9:.3f} GB, {outside / 1e6:.0f} MB of them beside torch and the cache: {found}"
    print(shown)
    assert found["tokens"] == [64, 40]
    assert used <= limit, shown
    assert outside <= found["plan"]["parts"]["CUDA context and kernels"], shown
