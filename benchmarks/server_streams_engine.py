"""The engine of `server_streams.py`: that of `warpbus serve` with a model that computes nothing, at a fixed rate."""

import os
import time
from pathlib import Path

import torch
from torch import Tensor

from warpbus.dist import Group
from warpbus.engine.engine import Engine
from warpbus.engine.options import ServiceOptions
from warpbus.engine.sequence import Sequence, TextPiece
from warpbus.formats import Checkpoint
from warpbus.models import Decoder, Progress, read_config
from warpbus.models.tokenizers import load_tokenizer

STEP_SECONDS = "STAND_IN_STEP_SECONDS"
"""The environment variable with the seconds of a step."""

TEXT = "~"
"""The text of every token."""


class NoModel(Decoder):
    """A decoder without layers, whose best token is always the same one."""

    def always(self, token: int, rows: int) -> None:
        """Choose the token."""
        self._best = torch.eye(token + 1)[token].repeat(rows, 1)

    def transform(self, x: Tensor, *others: object) -> Tensor:  # type: ignore[override]
        """Nothing."""
        del others
        return x

    def scores(self, x: Tensor) -> Tensor:
        """The same for each row. The tokens behind the best one are left out: the CPU would search them for long."""
        return self._best[: len(x)]


class PacedEngine(Engine):
    """An engine whose steps begin in equal distances, if the host keeps up with them."""

    seconds = 0.0
    _next = 0.0

    def step(self) -> list[tuple[Sequence, TextPiece]]:
        """See `Engine.step`."""
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + self.seconds
        return super().step()


def stand_in(model: Path, options: ServiceOptions, group: Group, progress: Progress) -> Engine:
    """Called in the engine's process."""
    del group, progress
    decoder = NoModel(read_config(Checkpoint(model, weights=False))).eval()
    tokenizer = load_tokenizer(model)
    token = next(at for at in range(decoder.config.vocab_size) if tokenizer.token_bytes(at) == TEXT.encode())
    decoder.always(token, options.max_num_seqs)
    engine = PacedEngine(decoder, max_num_seqs=options.max_num_seqs)
    engine.seconds = float(os.environ[STEP_SECONDS])
    return engine
