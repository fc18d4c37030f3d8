"""An epoch of DistributedDataParallel over two leases of two GPUs and without a pool: seconds, and the losses.

    python benchmarks/pool_ddp.py                # two GPUs, beside NCCL
    python benchmarks/pool_ddp.py --gpu-links    # the same, with gradients from GPU to GPU
    python benchmarks/pool_ddp.py --device cpu   # beside gloo

Each rank is a process. Over the pool it has a lease; without, a GPU of this machine. The first epoch is not counted.
"per_step" says where the time of a step over the pool goes: the clients' operators, batches of them, round trips, and
seconds of the main thread in forward, backward, optimizer and the wait for the loss; of the leases' processes the steps
of collective operations (an all-reduce of a bucket is one), their bytes, the seconds in which the thread launches
nothing else, and the part of it for which it waits for the other rank's process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import warpbus
from warpbus.bench.pool_processes import daemon
from warpbus.bench.pool_training import SMALL_GPT, Gpt, GptShape

RANKS = 2
SHAPE = GptShape(vocabulary=8192, width=512, layers=8, heads=8, context=256, batch=16, autocast=False)


class Phases:
    """Seconds of the program's thread in each phase of a step.

    Args:
        usage: the counters of the lease; None without a pool.
    """

    def __init__(self, usage: Callable[[], dict[str, float]] | None) -> None:
        self._usage = usage
        self._seconds: Counter[str] = Counter()
        self.begin()

    def begin(self) -> None:
        """Count from here on."""
        self._seconds.clear()
        self._before = {} if self._usage is None else self._usage()
        self._last = time.perf_counter()

    def end(self, phase: str) -> None:
        """A phase of a step has ended."""
        now = time.perf_counter()
        self._seconds[phase] += now - self._last
        self._last = now

    def per_step(self, steps: int) -> dict[str, float]:
        """Of so many steps since `begin`."""
        found = {} if self._usage is None else self._usage()
        counted = {name: (found[name] - self._before[name]) / steps for name in found}
        return {**{f"{name}_seconds": value / steps for name, value in self._seconds.items()}, **counted}


def counters(gpu: Any) -> dict[str, float]:
    """The counters of a lease and of its client."""
    client = asdict(gpu.statistics)
    lease = {f"lease_{name}": value for name, value in gpu.usage()["groups"].items()}
    return {name: client[name] for name in ("operators", "batches", "round_trips")} | lease


def epochs(device: torch.device, shape: GptShape, rank: int, steps: int, count: int, phases: Phases) -> dict[str, Any]:
    """Seconds of each epoch but the first, the loss at the end of each, and what `Phases` says of the last."""
    model = DistributedDataParallel(Gpt(shape).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(rank)
    size = (shape.batch, shape.context + 1)
    batches = [torch.randint(0, shape.vocabulary, size, generator=generator) for _ in range(steps)]
    seconds, losses = [], []
    for _ in range(count + 1):
        dist.barrier()
        phases.begin()
        started = time.perf_counter()
        for batch in batches:
            tokens = batch.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            phases.end("forward")
            loss.backward()
            phases.end("backward")
            optimizer.step()
            phases.end("optimizer")
        losses.append(loss.item())
        phases.end("wait")
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds[1:], "losses": losses, "per_step": phases.per_step(steps)}


def run_rank(job: dict[str, Any]) -> None:
    """One rank of a run; prints what `epochs` gives."""
    rank, shape = job["rank"], GptShape(**job["shape"])
    store = dist.FileStore(job["store"], RANKS)
    usage = None
    if job["address"]:
        # A whole GPU, as without a pool. On a CPU both leases are on the same device.
        share = 1.0 if job["device"] == "cuda" else 0.5
        gpu = warpbus.pool.connect(job["address"], memory=job["memory"], share=share, on=job["on"])
        backend, device, usage = "warpbus", gpu.device, lambda: counters(gpu)
    elif job["device"] == "cuda":
        torch.cuda.set_device(rank)
        backend, device = "nccl", torch.device("cuda", rank)
    else:
        backend, device = "gloo", torch.device("cpu")
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS)
    print(json.dumps(epochs(device, shape, rank, job["steps"], job["epochs"], Phases(usage))), flush=True)
    dist.destroy_process_group()


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run all ranks of a job; what each gives."""
    with tempfile.TemporaryDirectory() as directory:
        processes = []
        for rank in range(RANKS):
            on = f"{job['host']}/{rank}" if job["device"] == "cuda" else None
            each = {**job, "rank": rank, "on": on, "store": f"{directory}/store"}
            command = [sys.executable, __file__, "--rank", json.dumps(each)]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        found = []
        for process in processes:
            said, _ = process.communicate(timeout=600)
            if process.returncode:
                raise SystemExit(f"a rank ended with {process.returncode}")
            found.append(json.loads(said.splitlines()[-1]))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=20, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=3, help="that are counted")
    parser.add_argument("--no-sandbox", action="store_true", help="passed on to `pool serve`")
    parser.add_argument("--gpu-links", action="store_true", help="passed on to `pool serve`")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(json.loads(options.rank))
        return
    on_gpus = options.device == "cuda"
    shape = SHAPE if on_gpus else replace(SMALL_GPT, context=32)
    job = {
        "device": options.device,
        "steps": options.steps,
        "epochs": options.epochs,
        "shape": asdict(shape),
        "address": None,
        "host": "here",
        "memory": 8 * 10**9 if on_gpus else 10**9,
    }
    local = run(job)
    flags = ["--name", "here", *(() if on_gpus else ("--cpu-memory", "4GB"))]
    passed_on = {"--no-sandbox": options.no_sandbox, "--gpu-links": options.gpu_links}
    flags += [flag for flag, given in passed_on.items() if given]
    with daemon(*flags) as address:
        remote = run({**job, "address": address})
    figures = {
        "pool_seconds": [max(each) for each in zip(*(rank["seconds"] for rank in remote), strict=True)],
        "local_seconds": [max(each) for each in zip(*(rank["seconds"] for rank in local), strict=True)],
        "pool_losses": [rank["losses"] for rank in remote],
        "local_losses": [rank["losses"] for rank in local],
        "per_step": {"pool": remote[0]["per_step"], "local": local[0]["per_step"]},
        "gpu_links": options.gpu_links,
        "losses_equal": [rank["losses"] for rank in remote] == [rank["losses"] for rank in local],
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
