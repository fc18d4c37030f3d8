"""The state that the scheduler and the runner attach to a sequence. Knows no tensors and no text."""

import secrets
import time
from collections import abc
from dataclasses import dataclass, field
from typing import Literal

from warpbus.engine.blocks import BLOCK
from warpbus.engine.speculation import NgramIndex
from warpbus.errors import UsageError

SequenceStatus = Literal["new", "waiting", "running", "removed"]


@dataclass(eq=False)
class SchedulerState:
    """What the scheduler knows of a sequence: token ids, lengths and its block table.

    The tokens of a P-Tuning v2 prefix have no ids and are not counted as tokens of the sequence: token p of the
    sequence has position p, and its keys and values are at cache position `prefix_length + p`.

    Attributes:
        ids: the known token ids: the prompt, and the generated tokens that the host has read.
        limit: the maximum number of tokens, prompt included.
        salt: sequences share blocks only with sequences of the same salt.
        unsplit: the number of leading tokens that one prefill chunk must contain, because they attend to each other in
            both directions (the prompt up to the token that ends it). The blocks of such a sequence are never shared:
            their content depends on later tokens. 0: all attention is causal.
        uncached: compute all tokens, also those that the prefix cache has.
        prefix: the blocks of the prefix, which are read-only. Sequences with the same prefix have a salt of their own.
        prefix_length: cache positions of the prefix. If it does not fill its last block, that block is copied to the
            first block that the sequence owns.
        length: tokens, those of launched steps included, those of the prefix excluded.
        computed: tokens whose keys and values are in the cache after the launched steps.
        blocks: the block table, in order; it begins with the full blocks of the prefix.
        cached_tokens: tokens of the prompt found in the prefix cache when the sequence was first admitted.
        decoding: the prompt is prefilled and the sequence has a next token: all tokens but the last are computed.
        restoring: for how many steps of other sequences it waits for blocks from main memory.
        preemptions: how often the sequence was preempted.
        keys: the prefix-cache keys of its full blocks, as far as they were needed.
        published: how many of its own blocks are full and registered in the prefix cache (not registered if `unsplit`).
        arrived: when the engine took the sequence, in seconds of `time.perf_counter()`.
        status: "new" (never added), "waiting", "running" (it has blocks), or "removed".
    """

    ids: list[int]
    limit: int
    salt: bytes = b""
    unsplit: int = 0
    uncached: bool = False
    prefix: tuple[int, ...] = ()
    prefix_length: int = 0
    length: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    decoding: bool = False
    restoring: int = 0
    preemptions: int = 0
    keys: list[bytes] = field(default_factory=list)
    published: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    status: SequenceStatus = "new"

    def __post_init__(self) -> None:
        self.length = self.length or len(self.ids)
        if self.unsplit:
            self.salt += secrets.token_bytes(16)  # no other sequence's blocks have the same content

    @property
    def active(self) -> bool:
        """The sequence waits or runs."""
        return self.status in ("waiting", "running")

    @property
    def bidirectional(self) -> int:
        """How many leading tokens attend to each other in both directions: those before the end of the prompt."""
        return max(0, self.unsplit - 1)

    @property
    def cache_length(self) -> int:
        """Used cache positions: the prefix and all computed tokens."""
        return self.prefix_length + self.computed

    @property
    def full_prefix_blocks(self) -> int:
        """How many blocks at the front of `blocks` belong to the prefix."""
        return self.prefix_length // BLOCK

    @property
    def prefix_tail(self) -> int:
        """Positions at the front of the first own block that hold the copied end of the prefix."""
        return self.prefix_length % BLOCK

    @property
    def own_blocks(self) -> list[int]:
        """The blocks after those of the prefix."""
        return self.blocks[self.full_prefix_blocks :]


def unsplit_tokens(prompt: abc.Sequence[int], end: int | None) -> int:
    """How many tokens of a prompt one chunk must contain: see `SchedulerState.unsplit`.

    Args:
        end: the token behind which the model answers; None: all attention is causal.

    Raises:
        UsageError: the prompt lacks it.
    """
    if end is None:
        return 0
    if end not in prompt:
        raise UsageError(
            f"the prompt lacks the token {end} (<sop>), behind which the model answers: end it with [gMASK] <sop>, "
            "as chats and prompts of text do by themselves"
        )
    return prompt.index(end) + 1


@dataclass(eq=False)
class RunnerState:
    """What the runner knows of a sequence, from its first step to its end; it survives preemption.

    Attributes:
        slot: the row of the sequence in the tensors of `StepExecutor`; -1 before the first step.
        adapter: the number of its LoRA, from 1 on; 0: none.
        table_length: how many entries of the block table on the device are valid.
        preemptions: the value of `SchedulerState.preemptions` for which they are.
        ngrams: proposes draft tokens; used with n-gram speculation only.
        drafts: the draft tokens after the last token that multi-token prediction has proposed.
    """

    slot: int = -1
    adapter: int = 0
    table_length: int = 0
    preemptions: int = 0
    ngrams: NgramIndex = field(default_factory=NgramIndex)
    drafts: list[int] = field(default_factory=list)
