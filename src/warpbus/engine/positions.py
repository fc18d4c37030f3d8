"""Positions of rows, for engines in which a token's position does not determine all three uses of it.

Usually the position of a token gives its rotary angles, where its keys and values are stored, and how far it attends.
Here the three differ. ChatGLM-6B rotates each half of a head by a position of its own, and the tokens of a prompt
attend to each other in both directions; after a prefix (P-Tuning v2; Liu et al., 2021) the first token has the rotary
angles of position 0, but is stored where the prefix ends.

`rope_and_cache` takes rotary positions and a slot mapping. `decode_attention` then takes as positions the last cache
position that a row attends to, and a rotary table that rotates nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.engine.blocks import BLOCK
from warpbus.models import Decoder, ModelConfig


@dataclass(frozen=True)
class RopeAngles:
    """The rotary angles of rows.

    Attributes:
        table: float32 `[n, rotary_dim]`: of each position the cosines, then the sines.
        positions: int32 `[rows]`: rows of the table.
        columns: int64 `[(heads + 2 kv_heads) head_dim]`: the columns of q | k | v in the order in which they are
            rotated; None: as they are.
    """

    table: Tensor
    positions: Tensor
    columns: Tensor | None = None

    def ordered(self, qkv: Tensor) -> Tensor:
        """Projections `[rows, (heads + 2 kv_heads) head_dim]` with their columns in the order of the rotation."""
        return qkv if self.columns is None else qkv.index_select(1, self.columns)


@dataclass(frozen=True)
class RowPositions:
    """All that attention needs to know of the positions of a step's rows.

    Attributes:
        angles: their rotary angles.
        slot_mapping: int64 `[rows]`, where keys and values are stored: block * BLOCK + offset.
        last_visible: int32 `[rows]`: the last cache position of its sequence that a row attends to.
        identity: float32 `[cache positions, 2]`: a rotary table that rotates nothing, for every possible position.
    """

    angles: RopeAngles
    slot_mapping: Tensor
    last_visible: Tensor
    identity: Tensor


class PositionState:
    """The device's data of sequences, from which it computes `RowPositions`.

    Args:
        model: provides the rotary positions.
        slots: sequences at once; one more slot is for padding rows.
        capacity: the most cache positions of a sequence, prefix included.
        table: the rotary table, for as many tokens as a sequence can have.

    Attributes:
        bidirectional: int32 `[slots + 1]`, how many tokens of each sequence attend to each other in both directions.
        prefix_lengths: int32 `[slots + 1]`, cache positions of each sequence's prefix.
    """

    def __init__(self, model: Decoder, slots: int, capacity: int, table: Tensor) -> None:
        device = table.device
        self._rotary = model.rotary
        self._table = table
        self._columns = rotary_columns(model.config).to(device) if model.config.rope.two_dimensional else None
        self._identity = identity_rope(capacity, device)
        self._assigned = [(0, 0)] * (slots + 1)
        self.bidirectional = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self.prefix_lengths = torch.zeros(slots + 1, dtype=torch.int32, device=device)

    def assign(self, slot: int, bidirectional: int, prefix_length: int) -> None:
        """Set the number of bidirectional tokens and the prefix length of a slot's sequence."""
        if self._assigned[slot] != (bidirectional, prefix_length):
            self._assigned[slot] = bidirectional, prefix_length
            self.bidirectional[slot], self.prefix_lengths[slot] = bidirectional, prefix_length

    def rope_angles(self, positions: Tensor, slots: Tensor) -> RopeAngles:
        """The rotary angles of tokens.

        Args:
            positions: int32 `[rows]`, among the tokens of their sequences.
            slots: int64 `[rows]`, of the sequences.
        """
        if self._columns is None:
            return RopeAngles(self._table, positions)
        cos, sin = self._rotary(positions[None], torch.float32, self.bidirectional.index_select(0, slots)[None])
        # The table has one row per token.
        own = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
        return RopeAngles(torch.cat((cos, sin), dim=-1)[0, :, 0], own, self._columns)

    def row_positions(
        self, positions: Tensor, slots: Tensor, blocks: Tensor, slot_mapping: Tensor | None
    ) -> RowPositions:
        """The positions of a step's rows.

        Args:
            positions, slots: as of `rope_angles`.
            blocks: int32 `[rows, n]`, the block table of each row's sequence.
            slot_mapping: int64 `[rows]`; None: computed from the positions.
        """
        prefix_length = self.prefix_lengths.index_select(0, slots)
        if slot_mapping is None:
            at = positions + prefix_length
            block = blocks.gather(1, (at // BLOCK)[:, None].long())[:, 0]
            slot_mapping = block.long() * BLOCK + at % BLOCK
        last_visible = torch.maximum(positions, self.bidirectional.index_select(0, slots) - 1) + prefix_length
        return RowPositions(self.rope_angles(positions, slots), slot_mapping, last_visible, self._identity)


def needs_position_state(config: ModelConfig, prefix_length: int) -> bool:
    """Whether an engine needs `PositionState`: the model's token positions do not determine everything, or there are
    prefixes.

    Args:
        prefix_length: cache positions of the longest prefix.
    """
    return prefix_length > 0 or config.prompt_end is not None or config.rope.two_dimensional


def identity_rope(positions: int, device: torch.device) -> Tensor:
    """A rotary table that rotates nothing, float32 `[positions, 2]`."""
    return torch.tensor([1.0, 0.0], device=device).repeat(positions, 1)


def rotary_order(config: ModelConfig) -> Tensor:
    """The dimensions of a head in an order in which one rotation of halves rotates all of them, int64 `[head_dim]`.

    Each of two planes is rotated in halves by itself, (i, i + rotary_dim / 2). With the first halves of both planes
    before the second halves of both, they are one plane with the angles of both, which the kernels can rotate.
    Attention scores do not change, since queries and keys have the same order.
    """
    order = torch.arange(config.attention.head_dim)
    return order.view(2, 2, -1).transpose(0, 1).flatten() if config.rope.two_dimensional else order


def rotary_columns(config: ModelConfig) -> Tensor:
    """The columns of q | k | v with those of each query and key in `rotary_order`."""
    rotated = config.attention.num_heads + config.attention.num_kv_heads
    columns = torch.arange(sum(config.grouped_attention.qkv_rows)).view(-1, config.attention.head_dim)
    columns[:rotated] = columns[:rotated, rotary_order(config)]
    return columns.flatten()
