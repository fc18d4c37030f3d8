"""How tenants affect each other, and how moves affect them: shares of a GPU's time, and how long a move stops them."""

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from warpbus.pool import connect

_WINDOW = 8  # products between two looks at the clock
_PIECE = 16 << 20  # bytes of one of the tensors of a state


def holder(address: str, memory: int, share: float, priority: int, nbytes: int) -> dict[str, Any]:
    """Hold a state, and for each line on standard input let an operator work on it and read a number; print, as a line
    of JSON, the seconds until it is there and, of these, those in which the state was copied to the GPU.

    Args:
        memory: of the lease, in bytes.
        share: of the GPU.
        priority: of the lease.
        nbytes: of the state.
    """
    with connect(address, memory=memory, share=share, priority=priority) as gpu:
        state = _state(nbytes, gpu.device)
        gpu.synchronize()
        print("ready", flush=True)
        while sys.stdin.readline():
            before, started = gpu.swaps.back, time.perf_counter()
            state[0][:4096].add_(1)
            state[0][0].item()
            seconds = time.perf_counter() - started
            copied = gpu.swaps.last_copy if gpu.swaps.back > before else 0.0
            print(json.dumps({"seconds": seconds, "copy": copied}), flush=True)
    return {}


def _state(nbytes: int, device: torch.device) -> list[torch.Tensor]:
    """Random bytes, as zeros might be treated differently."""
    sizes = [min(_PIECE, nbytes - at) for at in range(0, nbytes, _PIECE)]
    return [torch.zeros(size, dtype=torch.uint8, device=device).random_() for size in sizes]


def tenant(
    address: str, memory: int, share: float, side: int, dtype: str, seconds: float, nbytes: int = 0
) -> dict[str, Any]:
    """Multiply matrices without a pause, for each line on standard input; print how many a second, as a line of JSON.

    Args:
        side: of the matrices.
        seconds: for how long. What is done in the first and last tenth does not count: others may not be there yet.
        nbytes: of what the lease holds beside the matrices. If it holds something, all of the time counts: what
            others do to it comes in pieces of seconds.
    """
    with connect(address, memory=memory, share=share) as gpu:
        state = _state(nbytes, gpu.device)
        a = torch.ones(side, side, dtype=getattr(torch, dtype), device=gpu.device)
        out = torch.empty_like(a)

        def multiply() -> None:
            for _ in range(_WINDOW):
                torch.mm(a, a, out=out)
            gpu.synchronize()

        multiply()
        print("ready", flush=True)
        while sys.stdin.readline():
            rate = _products_until(multiply, seconds) if nbytes else _products(multiply, seconds)
            print(json.dumps({"products": rate}), flush=True)
        del state
    return {}


def _products_until(multiply: Callable[[], None], seconds: float) -> float:
    """Products a second, of those that are there after so many seconds."""
    started, done = time.perf_counter(), 0
    while True:
        multiply()
        if time.perf_counter() > started + seconds:
            return done / seconds
        done += _WINDOW


def _products(multiply: Callable[[], None], seconds: float) -> float:
    """Products a second, in the middle of so many seconds."""
    started = time.perf_counter()
    first: tuple[float, int] | None = None
    last = (started, 0)
    done = 0
    while (now := time.perf_counter()) < started + seconds or last[1] == 0:
        if now >= started + 0.1 * seconds and first is None:
            first = (now, done)
        if now <= started + 0.9 * seconds or last[1] == 0:
            last = (now, done)
        multiply()
        done += _WINDOW
    if first is None or last[1] <= first[1]:  # a device so slow that the middle has no two looks at the clock
        first, last = (started, 0), (time.perf_counter(), done)
    return (last[1] - first[1]) / (last[0] - first[0])


def migration(address: str, targets: list[str], nbytes: int, rounds: int, writing: bool) -> dict[str, Any]:
    """Move a state to and fro while the client works on; what the pool says of it, and the client's longest wait.

    Args:
        targets: GPUs to move to, in turns.
        nbytes: of the state.
        writing: all of it is written all the time, as training does; else a small part of it, as decoding does.
    """
    moves: list[dict[str, float]] = []
    with connect(address, memory=nbytes + 200 * 10**6, on=targets[-1]) as gpu:
        state = _state(nbytes, gpu.device)
        gpu.synchronize()
        counter = torch.zeros((), device=gpu.device)
        waits: list[float] = []
        over = threading.Event()

        failures: list[BaseException] = []

        def work() -> None:
            turn = 0
            try:
                while not over.is_set():
                    started = time.perf_counter()
                    (state[turn % len(state)] if writing else state[0][:4096]).add_(1)
                    counter.add_(1)
                    counter.item()
                    waits.append(time.perf_counter() - started)
                    turn += 1
            except BaseException as error:  # raised by the thread that waits for this one
                failures.append(error)

        for number in range(rounds):
            over.clear()
            waits.clear()
            worker = threading.Thread(target=work)
            worker.start()
            time.sleep(0.3)
            answer = gpu.migrate(targets[number % len(targets)])
            time.sleep(0.3)
            over.set()
            worker.join()
            if failures:
                raise failures[0]
            moves.append(
                {
                    "pause": answer["pause"],
                    "seconds": answer["seconds"],
                    "bytes": answer["bytes"],
                    "wait": max(waits),
                    "usual": sorted(waits)[len(waits) // 2],
                }
            )
    return {"moves": moves}
