"""How long an engine does not answer while it moves from one GPU to another.

    python benchmarks/engine_move.py chatglm2-6b --scheme w4a16-g128 --context 9600

A model with random weights decodes after prompts of `--context` tokens, and moves meanwhile. Times are in seconds, seen
from the host, between the tokens of two steps:

- step, step_after: the median before anything was done, and on the other GPU;
- preparing: from the wish to move until the other GPU was ready;
- while_preparing, while_copying: the longest meanwhile, and while full blocks were copied;
- gap: from the decision to pause to the first token of the other GPU, with the steps that were under way;
- pause: of it what the move took.

weights, ahead and paused are bytes: of the model, and of the cache before and in the pause.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from warpbus.bench.decoders import random_prompt
from warpbus.cuda.devices import resolve_device
from warpbus.engine.engine import Engine, request
from warpbus.engine.moving import EngineMigration
from warpbus.errors import WarpbusError
from warpbus.models import SHAPES, ModelConfig, random_model
from warpbus.qtensor import Scheme

SETTLING = 64  # steps before anything is measured, and after the move
ANSWER = 16_384  # tokens: more than are decoded until the other GPU is ready


def move_engine(
    config: ModelConfig,
    scheme: Scheme | None,
    *,
    source: torch.device,
    target: torch.device,
    context: int,
    sequences: int,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Move an engine that decodes; see the module for the figures."""
    engine = Engine(random_model(config, scheme, source, dtype), max_model_len=context + ANSWER, max_num_seqs=sequences)
    engine.warm(rows=sequences, lengths=[context, context + ANSWER])
    asked = [request([first, *random_prompt(config, context - 1)], tokens=ANSWER) for first in range(sequences)]
    for each in asked:
        engine.add(each)
    while any(not each.token_ids for each in asked):
        engine.step()
    before = _times(engine, SETTLING)
    move = EngineMigration(engine, target)
    preparing = threading.Thread(target=move.prepare)
    preparing.start()
    meanwhile = _times(engine, None, until=lambda: not preparing.is_alive())
    copying = _times(engine, None, until=move.copy_ahead)
    last = time.perf_counter()
    _, moved = move.finish()
    while not engine.step():  # until the first token is there
        pass
    gap = time.perf_counter() - last
    length = context + len(asked[0].token_ids)
    after = _times(engine, SETTLING)
    for each in asked:
        engine.abort(each)
    move.release()
    return {
        "context": length,
        "sequences": sequences,
        "step": median(before),
        "preparing": moved.preparing,
        "while_preparing": max(meanwhile, default=0.0),
        "while_copying": max(copying, default=0.0),
        "gap": gap,
        "pause": moved.pause,
        "step_after": median(after),
        "weights": moved.weights,
        "ahead": moved.ahead,
        "paused": moved.paused,
    }


def _times(engine: Engine, steps: int | None, until: Callable[[], bool] = lambda: False) -> list[float]:
    """Seconds between results, for so many steps or until something is the case."""
    times: list[float] = []
    last = time.perf_counter()
    while not until() and (steps is None or len(times) < steps) and engine.has_work:
        if engine.step():
            now = time.perf_counter()
            times.append(now - last)
            last = now
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--scheme", help="of the weights; 16 bits without it")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--source", default="cuda:0")
    parser.add_argument("--target", default="cuda:1")
    given = parser.parse_args(arguments)
    try:
        source, target = resolve_device(given.source), resolve_device(given.target)
        figures = move_engine(
            SHAPES[given.shape],
            None if given.scheme is None else Scheme.parse(given.scheme),
            source=source,
            target=target,
            context=given.context,
            sequences=given.sequences,
            dtype=torch.float32 if source.type == "cpu" else torch.float16,
        )
    except WarpbusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
