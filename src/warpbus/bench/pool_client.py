"""A client of a pool that is measured, in a process of its own: a process has one remote GPU at a time.

    python -m warpbus.bench.pool_client JOB '{"address": "warpbus://127.0.0.1:7700", ...}'

It prints what came of the job as a line of JSON. The clock is that of the process: what it measures is what a program
would see.
"""

import json
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.bench import pool_tenants, pool_training
from warpbus.errors import WarpbusError
from warpbus.pool import connect

Answer = dict[str, Any]

_SIDE = 64  # of the tensors of which operators are timed: what they compute takes no time
_BURST = 1000  # operators between two looks at the clock


def operator_calls(device: torch.device) -> dict[str, Callable[[], object]]:
    """Operators of the kinds that programs consist of."""
    x, y = torch.ones(_SIDE, _SIDE, device=device), torch.ones(_SIDE, _SIDE, device=device)
    weight = torch.ones(_SIDE, device=device)
    return {
        "add": lambda: x + y,
        "mul by a number": lambda: x * 1.5,
        "add in place": lambda: x.add_(y),
        "matmul": lambda: x @ y,
        "layer norm": lambda: F.layer_norm(x, (_SIDE,), weight, weight),
    }


def operators(address: str, device: str, rounds: int) -> Answer:
    """Seconds an operator that is not read, as the client sees it and locally; and of a read."""
    remote: dict[str, list[float]] = {}
    local: dict[str, list[float]] = {}
    with connect(address, memory="200MB") as gpu:
        sides = [
            (operator_calls(gpu.device), gpu.synchronize, remote),
            (operator_calls(torch.device(device)), waiter(device), local),
        ]
        for name in sides[0][0]:
            for turn in range(rounds + 1):
                for calls, synchronize, found in sides:
                    taken = _burst(calls[name], synchronize)
                    if turn:  # the first defines what is called
                        found.setdefault(name, []).append(taken)
        value = torch.ones((), device=gpu.device)
        reads = [_timed(value.item) for _ in range(50 * rounds)]
    return {"remote": remote, "local": local, "read": reads[len(reads) // 10 :]}


def _burst(call: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """Seconds a call of this thread's CPU time, in which the tenant and whatever else uses the cores has no part."""
    synchronize()
    started = time.thread_time()
    for _ in range(_BURST):
        call()
    taken = time.thread_time() - started
    synchronize()
    return taken / _BURST


def transfers(address: str, nbytes: int, rounds: int, echo: int | None) -> Answer:
    """Seconds for uploads of what is new, of what the pool has had before, and for downloads; and over a plain socket.

    Args:
        nbytes: of each.
        echo: port of `echo_server` on this machine.
    """
    found: dict[str, list[float]] = {name: [] for name in ("upload", "upload again", "download", "socket", "echo")}
    with connect(address, memory=4 * nbytes + 10**8) as gpu:
        generator = torch.Generator().manual_seed(time.time_ns() % 2**31)
        for turn in range(rounds + 1):
            data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
            taken = {name: _timed(partial(_upload, data, gpu)) for name in ("upload", "upload again")}
            there = data.to(gpu.device)
            gpu.synchronize()
            taken["download"] = _timed(there.cpu)
            del there
            if turn:
                for name, seconds in taken.items():
                    found[name].append(seconds)
    if echo is not None:
        with socket.create_connection(("127.0.0.1", echo)) as plain:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            payload = data.numpy().data
            found["socket"] = [_timed(lambda: _echoed(plain, payload)) for _ in range(rounds)]
            found["echo"] = [_timed(lambda: _echoed(plain, payload[:8])) for _ in range(50 * rounds)]
    return found


def _upload(data: Tensor, gpu: Any) -> None:
    data.to(gpu.device)
    gpu.synchronize()


def _echoed(plain: socket.socket, payload: memoryview) -> None:
    plain.sendall(len(payload).to_bytes(8, "little"))
    plain.sendall(payload)
    plain.recv(1)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def waiter(device: str) -> Callable[[], object]:
    """A function that waits until a local device has done its work."""
    return (lambda: torch.cuda.synchronize(device)) if device.startswith("cuda") else (lambda: None)


def echo_server() -> None:
    """Take bytes over a socket and answer with one, until nobody holds standard input open: what a network alone costs.

    A message is its length, 8 bytes, and as many bytes.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(json.dumps({"port": listening.getsockname()[1]}), flush=True)
        client, _ = listening.accept()
    buffer = memoryview(bytearray(1 << 22))
    with client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while head := client.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(head, "little")
            while left:
                got = client.recv_into(buffer[: min(left, len(buffer))])
                if not got:
                    return
                left -= got
            client.sendall(b"!")


JOBS: dict[str, Callable[..., Answer]] = {
    "operators": operators,
    "transfers": transfers,
    "training": pool_training.training,
    "decode": pool_training.decode,
    "tenant": pool_tenants.tenant,
    "holder": pool_tenants.holder,
    "migration": pool_tenants.migration,
}


def main() -> None:
    """Do the job that the command line names."""
    name = sys.argv[1]
    if name == "echo":
        echo_server()
        return
    try:
        print(json.dumps(JOBS[name](**json.loads(sys.argv[2]))), flush=True)
    except WarpbusError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
