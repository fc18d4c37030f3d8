"""Where rows stand, in engines in which one position does not say it all.

Elsewhere a token's position says three things: by which angles it turns, where its keys and values lie, and up to where
it attends. Here they are told apart. ChatGLM-6B turns each half of a head by a position of its own, and the tokens of a
prompt see each other in both directions; behind a prefix (P-Tuning v2; Liu et al., 2021) the first token turns as the
first one, but lies where the prefix ends.

`rope_and_cache` turns by positions and stores to slots; so does it here. `decode_attention` then reads positions as the
last place that a row attends to, beside a table that turns nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.engine.blocks import BLOCK
from warpbus.models import Decoder, ModelConfig


@dataclass(frozen=True)
class RopeAngles:
    """By which angles rows turn.

    Attributes:
        table: float32 `[n, rotary_dim]`: of each position the cosines, then the sines.
        positions: int32 `[rows]`: rows of the table.
        columns: int64 `[(heads + 2 kv_heads) head_dim]`: the columns of q | k | v in the order in which they turn;
            None: as they are.
    """

    table: Tensor
    positions: Tensor
    columns: Tensor | None = None

    def ordered(self, qkv: Tensor) -> Tensor:
        """Projections `[rows, (heads + 2 kv_heads) head_dim]` with their columns as they turn."""
        return qkv if self.columns is None else qkv.index_select(1, self.columns)


@dataclass(frozen=True)
class RowPositions:
    """What a step of single tokens needs to know of its rows.

    Attributes:
        turns: by which angles they turn.
        slots: int64 `[rows]`, where keys and values go: block * BLOCK + offset.
        reach: int32 `[rows]`: the last place of its sequence in the cache that a row attends to.
        still: float32 `[places, 2]`: a table that turns nothing, for as many places as there can be.
    """

    turns: RopeAngles
    slots: Tensor
    reach: Tensor
    still: Tensor


class PositionState:
    """What the device knows of sequences to place their rows.

    Args:
        model: whose rotary positions they are.
        slots: sequences at once; there is one slot more, which is nobody's.
        places: of a sequence in the cache, at most, those of a prefix included.
        table: the rotary table, for as many tokens as a sequence can have.

    Attributes:
        prompts: int32 `[slots + 1]`, how many tokens of each sequence see each other in both directions.
        given: int32 `[slots + 1]`, how many places its prefix takes.
    """

    def __init__(self, model: Decoder, slots: int, places: int, table: Tensor) -> None:
        device = table.device
        self._rotary = model.rotary
        self._table = table
        self._columns = rotary_columns(model.config).to(device) if model.config.rope.two_dimensional else None
        self._still = still(places, device)
        self._assigned = [(0, 0)] * (slots + 1)
        self.prompts = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self.given = torch.zeros(slots + 1, dtype=torch.int32, device=device)

    def assign(self, slot: int, prompt: int, given: int) -> None:
        """Say what the sequence of a slot has: tokens that see each other in both directions, places of a prefix."""
        if self._assigned[slot] != (prompt, given):
            self._assigned[slot] = prompt, given
            self.prompts[slot], self.given[slot] = prompt, given

    def turns(self, positions: Tensor, slots: Tensor) -> RopeAngles:
        """By which angles tokens turn.

        Args:
            positions: int32 `[rows]`, where they stand among the tokens of their sequences.
            slots: int64 `[rows]`, of the sequences.
        """
        if self._columns is None:
            return RopeAngles(self._table, positions)
        cos, sin = self._rotary(positions[None], torch.float32, self.prompts.index_select(0, slots)[None])
        # Each row has angles of its own.
        own = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
        return RopeAngles(torch.cat((cos, sin), dim=-1)[0, :, 0], own, self._columns)

    def places(self, positions: Tensor, slots: Tensor, blocks: Tensor, stored: Tensor | None) -> RowPositions:
        """The same and all else of a step's rows.

        Args:
            positions, slots: as of `turns`.
            blocks: int32 `[rows, n]`, of each row's sequence.
            stored: int64 `[rows]`, where keys and values go; None: to the places of the positions.
        """
        given = self.given.index_select(0, slots)
        if stored is None:
            place = positions + given
            block = blocks.gather(1, (place // BLOCK)[:, None].long())[:, 0]
            stored = block.long() * BLOCK + place % BLOCK
        reach = torch.maximum(positions, self.prompts.index_select(0, slots) - 1) + given
        return RowPositions(self.turns(positions, slots), stored, reach, self._still)


def needed(config: ModelConfig, given: int) -> bool:
    """Whether rows have to be placed so: the model's positions do not say it all, or there are prefixes.

    Args:
        given: places that the longest prefix takes.
    """
    return given > 0 or config.prompt_end is not None or config.rope.two_dimensional


def still(positions: int, device: torch.device) -> Tensor:
    """A rotary table that turns nothing, float32 `[positions, 2]`."""
    return torch.tensor([1.0, 0.0], device=device).repeat(positions, 1)


def rotary_order(config: ModelConfig) -> Tensor:
    """The dimensions of a head in the order in which they turn as halves of one plane, int64 `[head_dim]`.

    Each of two planes turns in halves by itself, (i, i + rotary_dim / 2). With the halves of both in front of the other
    halves it is one plane whose angles are those of both: what kernels can turn. Scores are the same, since queries and
    keys are reordered alike.
    """
    order = torch.arange(config.attention.head_dim)
    return order.view(2, 2, -1).transpose(0, 1).flatten() if config.rope.two_dimensional else order


def rotary_columns(config: ModelConfig) -> Tensor:
    """The columns of q | k | v with those of each query and key in `rotary_order`."""
    turning = config.attention.num_heads + config.attention.num_kv_heads
    columns = torch.arange(sum(config.attention.qkv_rows)).view(-1, config.attention.head_dim)
    columns[:turning] = columns[:turning, rotary_order(config)]
    return columns.flatten()
