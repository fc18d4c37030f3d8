"""What tenants see of each other and of moves: their share of a GPU's time, and how long a move stops them."""

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


def tenant(address: str, memory: int, share: float, side: int, dtype: str, seconds: float) -> dict[str, Any]:
    """Multiply matrices without a pause, for each line on standard input; print how many a second, as a line of JSON.

    Args:
        side: of the matrices.
        seconds: for how long. What is done in the first and last tenth does not count: others may not be there yet.
    """
    with connect(address, memory=memory, share=share) as gpu:
        a = torch.ones(side, side, dtype=getattr(torch, dtype), device=gpu.device)
        out = torch.empty_like(a)

        def multiply() -> None:
            for _ in range(_WINDOW):
                torch.mm(a, a, out=out)
            gpu.synchronize()

        multiply()
        print("ready", flush=True)
        while sys.stdin.readline():
            print(json.dumps({"products": _products(multiply, seconds)}), flush=True)
    return {}


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
        sizes = [min(_PIECE, nbytes - at) for at in range(0, nbytes, _PIECE)]
        state = [torch.zeros(size, dtype=torch.uint8, device=gpu.device) for size in sizes]
        gpu.synchronize()
        for each in state:
            each.random_()  # zeros might be told from other bytes
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
            except BaseException as error:  # told by the thread that waits for this one
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
