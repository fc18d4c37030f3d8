"""How long an engine does not answer while it moves from one GPU to another: `pool`'s part that is about engines."""

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from warpbus.bench.decoders import random_prompt
from warpbus.engine.engine import Engine, request
from warpbus.engine.moving import EngineMigration, Moved
from warpbus.models import ModelConfig, random_model
from warpbus.qtensor import Scheme

_SETTLING = 64  # steps before anything is measured, and after the move
_ANSWER = 16_384  # tokens: more than are decoded until the other GPU is ready


@dataclass(frozen=True)
class EngineMove:
    """A move of an engine that decodes. Times are seconds, seen from the host: between the tokens of two steps.

    Attributes:
        context: tokens that each sequence had when it moved.
        sequences: that decoded.
        step: between tokens, the median before anything was done.
        preparing: from the wish to move until the other GPU was ready.
        while_preparing: the longest time between tokens meanwhile.
        while_copying: the same while full blocks were copied.
        gap: from the decision to pause to the first token of the other GPU, with the steps that were under way.
        pause: of it what the move took (`Moved.pause`).
        step_after: as `step`, on the other GPU.
        weights, ahead, paused: bytes of the model, and of the cache before and in the pause.
    """

    context: int
    sequences: int
    step: float
    preparing: float
    while_preparing: float
    while_copying: float
    gap: float
    pause: float
    step_after: float
    weights: int
    ahead: int
    paused: int


def move_engine(
    config: ModelConfig,
    scheme: Scheme | None,
    *,
    source: torch.device,
    target: torch.device,
    context: int = 8192,
    sequences: int = 1,
    dtype: torch.dtype = torch.float16,
) -> EngineMove:
    """Let a model with random weights decode after prompts of `context` tokens, and move it meanwhile."""
    engine = Engine(
        random_model(config, scheme, source, dtype), max_model_len=context + _ANSWER, max_num_seqs=sequences
    )
    engine.warm(rows=sequences, lengths=[context, context + _ANSWER])
    prompts = [random_prompt(config, context)] + [
        [each, *random_prompt(config, context - 1)] for each in range(1, sequences)
    ]
    asked = [request(prompt, tokens=_ANSWER) for prompt in prompts]
    for each in asked:
        engine.add(each)
    while any(not each.token_ids for each in asked):
        engine.step()
    before = _times(engine, _SETTLING)
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
    after = _times(engine, _SETTLING)
    for each in asked:
        engine.abort(each)
    move.release()
    return _described(moved, length, sequences, before, meanwhile, copying, gap, after)


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


def _described(
    moved: Moved,
    context: int,
    sequences: int,
    before: list[float],
    meanwhile: list[float],
    copying: list[float],
    gap: float,
    after: list[float],
) -> EngineMove:
    return EngineMove(
        context,
        sequences,
        step=statistics.median(before),
        preparing=moved.preparing,
        while_preparing=max(meanwhile, default=0.0),
        while_copying=max(copying, default=0.0),
        gap=gap,
        pause=moved.pause,
        step_after=statistics.median(after),
        weights=moved.weights,
        ahead=moved.ahead,
        paused=moved.paused,
    )
