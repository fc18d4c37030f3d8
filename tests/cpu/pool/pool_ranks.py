"""A rank of a distributed training: python pool_ranks.py ADDRESS STORE RANK SIZE PROGRAM.

`train` trains over leases and over gloo, by DistributedDataParallel and by fully_shard, and compares the bits; `direct`
is the same where bytes go from GPU to GPU. `wait` waits for a rank that never comes.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import warpbus


def trained(device: torch.device, wrap, rank: int) -> list[str]:
    """Losses, and the sum of all parameters at the end, in all their bits."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 160), nn.GELU(), nn.Linear(160, 96), nn.LayerNorm(96), nn.Dropout(0.0), nn.Linear(96, 4)]
    model = wrap(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    found = []
    for _ in range(3):
        x, y = torch.randn(8, 32), torch.randn(8, 4)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        found.append(loss.item().hex())
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [*found, *(p.detach().double().sum().item().hex() for p in whole)]


def sharded(model: nn.Sequential) -> nn.Sequential:
    device = next(model.parameters()).device
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def both(device: torch.device, rank: int) -> list[list[str]]:
    dist.barrier()
    found = [trained(device, wrap, rank) for wrap in (DistributedDataParallel, sharded)]
    objects: list = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.barrier()
    dist.destroy_process_group()
    return found


def main(address: str, path: str, rank: int, size: int, program: str) -> None:
    # Sums over several threads have other bits. A lease with so small a share has one thread, as the local ranks then.
    gpu = warpbus.pool.connect(address, memory="100MB", share=0.001)
    torch.set_num_threads(1)
    options = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=120)}
    dist.init_process_group("warpbus", store=dist.FileStore(path, size), **options)
    if program == "wait":
        print("joined", flush=True)
        if rank:
            sys.stdin.read()  # until it is killed
        x = torch.ones(100_000, device=gpu.device)
        dist.all_reduce(x)
        try:
            x.cpu()
        except RuntimeError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        return
    before = gpu.statistics.bytes_received
    remote = both(gpu.device, rank)
    steps = gpu.usage()["groups"]
    assert steps["launched"] == (steps["steps"] if program == "direct" else 0)
    assert gpu.statistics.bytes_received - before < 10_000
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}-local", size), **options)
    local = both(torch.device("cpu"), rank)
    assert remote == local, f"{remote}\n{local}"
    assert remote[0] == remote[1], f"{remote}"
    gpu.close()
    print("equal", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
