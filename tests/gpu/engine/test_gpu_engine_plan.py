"""The memory contract by the driver's account, with ChatGLM2-6B's shape, in a process of its own."""

import json
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

PROGRAM = """
import json, sys
import torch
from warpbus.engine.engine import Engine
from warpbus.engine.plan import Stored, enforce, plan_memory
from warpbus.models import SHAPES, random_model
from warpbus.qtensor import Scheme

limit, context, seqs = map(int, sys.argv[1:])
config, scheme, device = SHAPES["chatglm2-6b"], Scheme.parse("w4a16-g128"), torch.device("cuda", 0)
plan = plan_memory(Stored.uniform(config, torch.float16, scheme), limit, max_model_len=context, max_num_seqs=seqs)
enforce(plan, device)
where = "cpu" if plan.embedding_on_cpu else None
model = random_model(config, scheme, device, torch.float16, head=plan.head, embedding=where)
engine = Engine.planned(model, plan, max_num_seqs=seqs)
engine.warm()
prompt = torch.randint(config.vocab_size, (2048,), generator=torch.Generator().manual_seed(0)).tolist()
answer = engine.decode([prompt], 64)[0]
long = engine.decode([[7 + at] * (context - 40) for at in range(seqs)], 40)[-1]
# What torch took it keeps: what is free now was free at the peak.
free = torch.cuda.mem_get_info(device)[0]
print(json.dumps({"free": free, "tokens": [len(answer), len(long)], "plan": plan.to_json(),
                  "torch": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.max_memory_allocated()}))
"""


@pytest.mark.parametrize(
    ("limit", "context", "seqs"), [(4_800_000_000, 8320, 1), (6_000_000_000, 32768, 1), (6_000_000_000, 4096, 12)]
)
def test_encoding_and_generating_stay_within_the_plan(limit, context, seqs):
    before = torch.cuda.mem_get_info()[0]
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, (limit, context, seqs))], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    found = json.loads(finished.stdout.splitlines()[-1])
    used = before - found["free"]
    print(f"{used / 1e9:.3f} GB by the driver, {found}")
    assert found["tokens"] == [64, 40]
    assert used <= limit
