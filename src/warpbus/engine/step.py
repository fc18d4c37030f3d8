"""What the device keeps of every sequence, and the step over it: from tokens to scores of the next ones.

On a GPU a step is a CUDA graph, captured once for a number of rows and a bound of their positions, and launched as one;
on a GPU that is lent from elsewhere a recorded program, which is a graph there.
A row is a token: the last one of a sequence, a guess that follows it, or one of a prompt. Knows nothing of requests,
sampling or text; `runner` says which rows there are.
"""

from collections import abc
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.cuda.capture import Graph, GraphMemory, capture
from warpbus.cuda.lent import LentDevice, Recorded
from warpbus.cuda.lent import lent as lent_device
from warpbus.cuda.streams import running_on
from warpbus.engine.attention import DecodeAttention, PositionedAttention
from warpbus.engine.blocks import BLOCK
from warpbus.engine.kv_cache import KVCache
from warpbus.engine.logits import pinned, to_device
from warpbus.engine.positions import PositionState, RopeAngles, needed
from warpbus.kernels.ops.workspace import MOST_OF_A_PRODUCT, lent
from warpbus.models import Decoder
from warpbus.models.layers import FusedAttention, Selection

SHORTEST_BUCKET = 512
"""Tokens: sequences up to here share a graph; beyond, a graph is for those of up to twice as many."""

_COARSE = ((16, 8), (64, 16), (512, 32))  # up to so many rows graphs are so many rows apart; few rows: powers of two


def batch_bucket(rows: int) -> int:
    """The rows that a graph is captured for, where `rows` are wanted."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = next((step for most, step in _COARSE if rows <= most), 64)
    return -(-rows // step) * step


def length_bucket(tokens: int, capacity: int) -> int:
    """The bound of the lengths that a graph is captured for, where the longest row has `tokens` of them."""
    return min(max(SHORTEST_BUCKET, 1 << (tokens - 1).bit_length()), capacity)


MIXED_ROWS = 1024
"""Tokens of prompts and of those that decode that one graph takes: more are worth their launches."""

FROM_DEVICE = -1
"""In place of a token that the host does not know yet: the last one of its sequence."""

_MIXED_BUCKETS = (32, 64, 128, 256, 384, 512, 768, MIXED_ROWS)
# How many rows a step with prompts has, by those that decode: each row more makes these wait longer for their tokens.
# By what steps took on an H100 (ChatGLM2-6B's shape in 4 bits) they wait about thrice as long as without prompts.
_ROWS_BESIDE = ((8, 128), (16, 256), (40, 384), (96, 512), (160, 768))
_MIXED_LENGTH = 2048  # tokens: of longer sequences each token of a prompt would read too much of the cache again
# Bytes that all rows read of a layer's cache, of ChatGLM-6B: every head has keys of its own, 16 times those of its
# successors, so that a prompt of 180 tokens reads as much as theirs of 720.
_MIXED_READ = 2**29

Key = tuple[int, int, str, bool]
"""Of a graph: rows, the bound of their positions, what it is for: "own", "said" or "mixed" rows, and whether rows may
have adapters."""


@dataclass
class StepRows:
    """Tokens that a step takes, one below the other.

    Attributes:
        tokens: ids, or `FROM_DEVICE`.
        positions: where they stand in their sequences.
        stored: where their keys and values go: block * BLOCK + offset.
        slots: of their sequences.
        chosen: those rows after which a token is chosen.
        places: that the longest of their sequences has in the cache, up to them.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    places: int = 0


class StepExecutor:
    """The state of up to `slots` sequences on the device, and the graphs of the steps.

    A sequence keeps its slot while it runs. There is one slot more, for rows that only fill up a graph.

    Args:
        model: in eval mode.
        cache: where keys and values are.
        slots: sequences at once.
        rows: tokens at once, drafts included: at least `slots`.
        length: the longest sequence there can be, in tokens.
        device, dtype: of the activations.
        graphs: whether steps are captured.
        mixed_rows: the most that a graph with prompts takes.
        most_graphs: that are kept, those used last; None: all.
        selection: of the model's adapters; None where it has none.
        given: places of the cache that the longest prefix takes.

    Attributes:
        last: int64 `[slots + 1]`, the last token of each sequence, which enters its next step.
        positions: int32 `[slots + 1]`, where it stands.
        blocks: int32 `[slots + 1, n]`, the blocks of each sequence.
        adapters: int64 `[slots + 1]`, which LoRA each sequence has, from 1 on; 0: none.
        table: the rotary table (`Rotary.table`).
        placing: what else the device has to know of sequences; None where positions say it all.
        host_embedding: the embedding lies on the CPU, and the host has to say the tokens.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        slots: int,
        rows: int,
        length: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        graphs: bool,
        mixed_rows: int = MIXED_ROWS,
        most_graphs: int | None = None,
        selection: Selection | None = None,
        given: int = 0,
    ) -> None:
        self._model = model
        self._selection = selection or Selection(())
        self._cache = cache
        self._capacity = length + given
        self._mixed_rows = mixed_rows
        self.table = model.rotary.table(length, device)
        self.last = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self.blocks = torch.zeros(slots + 1, -(-self._capacity // BLOCK), dtype=torch.int32, device=device)
        width = model.config.attention.kv_width
        self._read = 2 * width * cache.layers[0][0].element_size() if model.config.prompt_end is not None else 0
        placed = needed(model.config, given)
        self.placing = PositionState(model, slots, self._capacity, self.table) if placed else None
        self.adapters = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._assigned = [0] * (slots + 1)
        self.host_embedding = model.embedding.weight.device != device
        chosen = batch_bucket(rows)
        rows = max(chosen, MIXED_ROWS)
        self._slots = torch.full((rows,), slots, device=device)
        self._shown: list[int] = []
        self._advanced: list[int] = []
        self._where = self._slots[:0]
        self._ones = torch.ones(chosen, dtype=torch.int32, device=device)
        # What the host says of rows: tokens, positions, where their keys and values go, which rows are chosen after.
        self._said = torch.zeros(4, rows, dtype=torch.int64, device=device)
        self._embedded = torch.zeros(rows if self.host_embedding else 0, 1, model.config.hidden_size).to(device, dtype)
        self._scores = torch.empty(chosen, model.config.vocab_size, dtype=dtype, device=device)
        # Graphs run one after another: their kernels share counters.
        counted = max(rows * model.config.attention.num_kv_heads, MOST_OF_A_PRODUCT)
        self._counters = torch.zeros(counted, dtype=torch.int32, device=device)
        behind = lent_device(device)
        self._graphs: _GraphCache | _ProgramCache | None = None
        if graphs:
            self._graphs = _GraphCache(device, most_graphs) if behind is None else _ProgramCache(behind, most_graphs)

    def scores(self, slots: abc.Sequence[int], longest: int) -> Tensor:
        """Append the last token of some sequences to them; the scores of the next, `[sequences, vocabulary]`.

        They are overwritten by the next call. `last` and `positions` stay as they are.

        Args:
            slots: of the sequences.
            longest: places in the cache of the longest of them.
        """
        count = len(slots)
        if self._graphs is None:
            self._show(slots, count)
            return self._compute((count, self._blockwise(longest), "own", self._adapted(slots)))
        key = batch_bucket(count), length_bucket(longest, self._capacity), "own", self._adapted(slots)
        self._show(slots, key[0])
        self._replay(self._graphs, key)
        return self._scores[:count]

    def takes(self, rows: int, longest: int) -> bool:
        """Whether so many rows, prompts among them, of sequences of at most `longest` places are one graph."""
        few = rows <= self._mixed_rows and longest <= _MIXED_LENGTH and rows * longest * self._read <= _MIXED_READ
        return self._graphs is not None and few

    def scores_of(self, rows: StepRows, *, prompts: bool) -> Tensor:
        """As `scores`, of rows that the host says: several of a sequence may follow each other.

        Args:
            prompts: not all rows are chosen after.

        Returns:
            `[chosen rows, vocabulary]`.
        """
        count, chosen = len(rows.tokens), len(rows.chosen)
        said = torch.tensor([rows.tokens, rows.positions, rows.stored, rows.chosen + [0] * (count - chosen)])
        if self._said.is_cuda:
            said = pinned(said)
        # What fills up stands at position 0 of nobody's sequence, whose block is nobody's.
        self._said.zero_()
        self._said[:, :count].copy_(said, non_blocking=True)
        if self.host_embedding:
            self._embed(rows.tokens)
        longest, use, adapted = rows.places, "mixed" if prompts else "said", self._adapted(rows.slots)
        if self._graphs is None:
            self._show(rows.slots, count)
            return self._compute((count, self._blockwise(longest), use, adapted))[:chosen]
        bucket = next(size for size in _MIXED_BUCKETS if size >= count) if prompts else batch_bucket(count)
        self._show(rows.slots, bucket)
        self._replay(self._graphs, (bucket, length_bucket(longest, self._capacity), use, adapted))
        return self._scores[:chosen]

    def advance(self, slots: list[int], tokens: Tensor, positions: abc.Sequence[int] | None) -> None:
        """Take the tokens `[sequences]` chosen for some sequences as their last ones.

        Args:
            slots: of the sequences.
            positions: where the tokens stand; None: one after those that were the last ones.
        """
        device = self.last.device
        if slots != self._advanced:
            self._advanced, self._where = slots, to_device(slots, torch.int64, device)
        self.last.index_copy_(0, self._where, tokens)
        if positions is None:
            self.positions.index_add_(0, self._where, self._ones[: len(slots)])
        else:
            self.positions.index_copy_(0, self._where, to_device(positions, torch.int32, device))

    def place(self, lasts: abc.Sequence[tuple[int, int, int]]) -> None:
        """Take up sequences that ran elsewhere: slot, last token and its position of each."""
        slots, tokens, positions = ([each[at] for each in lasts] for at in range(3))
        self.advance(slots, to_device(tokens, torch.int64, self.last.device), positions)

    def assign(self, slot: int, adapter: int) -> None:
        """Give the sequence of a slot a LoRA: its number, or 0 for none."""
        if self._assigned[slot] != adapter:
            self._assigned[slot] = adapter
            self.adapters[slot] = adapter

    def turns(self, positions: Tensor, slots: abc.Sequence[int]) -> RopeAngles:
        """By which angles tokens turn that stand at `positions`, int32 `[tokens]`, of the sequences of these slots."""
        if self.placing is None:
            return RopeAngles(self.table, positions)
        return self.placing.turns(positions, to_device(slots, torch.int64, positions.device))

    def adapting(self, slots: abc.Sequence[int]) -> AbstractContextManager[None]:
        """For calls of the model within, with rows of these slots: each has the adapter of its sequence."""
        numbers = [self._assigned[slot] for slot in slots]
        return self._selection.rows(to_device(numbers, torch.int64, self.last.device) if any(numbers) else None)

    def capture(self, rows: int, longest: int) -> None:
        """Capture the graphs for up to so many sequences of `longest` tokens, and for prompts, before they are used."""
        if self._graphs is None:
            return
        limit = length_bucket(longest, self._capacity)
        uses = [(bucket, "mixed") for bucket in _MIXED_BUCKETS if bucket <= self._mixed_rows]
        uses += [(bucket, "own") for bucket in {batch_bucket(count) for count in range(1, rows + 1)}]
        kinds = (False, True) if self._selection.source else (False,)
        keys: list[Key] = [(bucket, limit, use, adapted) for bucket, use in uses for adapted in kinds]
        self._said.zero_()
        self._show([], len(self._slots))
        # The largest first: what lies between finds room in their memory.
        for key in sorted(keys, reverse=True):
            self._replay(self._graphs, key)

    def _replay(self, graphs: "_GraphCache | _ProgramCache", key: Key) -> None:
        def work() -> None:
            with lent(self._counters):
                scores = self._compute(key)
            self._scores[: len(scores)].copy_(scores)

        graphs.run(key, work)

    def _adapted(self, slots: abc.Sequence[int]) -> bool:
        return any(self._assigned[slot] for slot in slots)

    def _show(self, slots: abc.Sequence[int], rows: int) -> None:
        """Tell the device which sequences there are, and fill up with the slot that is nobody's."""
        shown = [*slots, *[len(self.last) - 1] * (rows - len(slots))]
        if shown != self._shown:
            fresh = torch.tensor(shown, pin_memory=self._slots.is_cuda)
            self._slots[:rows].copy_(fresh, non_blocking=True)
            self._shown = shown

    def _blockwise(self, longest: int) -> int:
        """A bound of the positions without a graph: whole blocks are read anyway, and a remote device learns of calls
        of another kind where it changes."""
        return min(-(-longest // BLOCK) * BLOCK, self._capacity)

    def _embed(self, tokens: abc.Sequence[int]) -> None:
        rows = F.embedding(torch.tensor(tokens), self._model.embedding.weight)[:, None].to(self._embedded.dtype)
        if self._embedded.is_cuda:
            rows = pinned(rows)
        self._embedded[: len(tokens)].copy_(rows, non_blocking=True)

    def _compute(self, key: Key) -> Tensor:
        rows, limit, use, adapted = key
        model, slots = self._model, self._slots[:rows]
        blocks = self.blocks[:, : -(-limit // BLOCK)].index_select(0, slots)
        own = use == "own"
        positions = self.positions.index_select(0, slots) if own else self._said[1, :rows].int()
        stored = None if own else self._said[2, :rows]
        # Behind what attention takes as settled: this kernel begins when those have ended.
        tokens = self.last.index_select(0, slots)
        if not own:
            said = self._said[0, :rows]
            tokens = torch.where(said == FROM_DEVICE, tokens, said)
        context: FusedAttention
        if self.placing is None:
            context = DecodeAttention(model.config, self.table, self._cache, positions, blocks, limit, stored)
        else:
            places = self.placing.places(positions, slots, blocks, stored)
            context = PositionedAttention(model.config, places, self._cache, blocks, limit)
        x = self._embedded[:rows] if self.host_embedding else model.embed(tokens[:, None])
        with self._selection.rows(self.adapters.index_select(0, slots) if adapted else None):
            hidden = model.transform(x, None, context)[:, 0]
        if use == "mixed":
            hidden = hidden.index_select(0, self._said[3, : min(rows, len(self._scores))])
        return model.scores(hidden)


def rows_beside(decoding: int) -> int:
    """How many rows a step should have in which so many sequences decode and prompts are read."""
    return next((rows for most, rows in _ROWS_BESIDE if decoding <= most), MIXED_ROWS)


class _GraphCache:
    """CUDA graphs by what they are for; captured when first asked for. They share the memory of what lies between.

    Args:
        most: graphs that are kept, at least two: one may still run when it goes. None: all.
    """

    def __init__(self, device: torch.device, most: int | None) -> None:
        self._captured: dict[Key, Graph] = {}  # what was used last comes last
        self._most = most
        self._memory = GraphMemory(device)

    def run(self, key: Key, work: Callable[[], object]) -> None:
        """Launch `work`, captured under `key`. To run it twice is to run it once."""
        graph = self._captured.pop(key, None)
        if graph is None:
            if self._most is not None and len(self._captured) >= self._most:
                del self._captured[next(iter(self._captured))]
            graph = self._capture(work)
        self._captured[key] = graph
        graph.replay()

    def _capture(self, work: Callable[[], object]) -> Graph:
        # Kernels are compiled and loaded at their first launch, which a capture does not allow.
        with running_on(self._memory.stream):
            work()
        with capture(self._memory) as graph:
            work()
        return graph


class _ProgramCache:
    """The same on a lent device, by programs: a run is one short message, and the pool's side makes a graph of it.

    Args:
        most: programs that are kept; None: all.
    """

    def __init__(self, device: LentDevice, most: int | None) -> None:
        self._recorded: dict[Key, Recorded] = {}  # what was used last comes last
        self._device = device
        self._most = most

    def run(self, key: Key, work: Callable[[], object]) -> None:
        """Run `work`, recorded under `key`. To run it twice is to run it once."""
        program = self._recorded.pop(key, None)
        if program is not None:
            program.run()
        else:
            if self._most is not None and len(self._recorded) >= self._most:
                self._recorded.pop(next(iter(self._recorded))).drop()
            work()  # asks whatever has to be asked about its operators: in a program nothing can be
            with self._device.record() as program:
                work()
            # The first run there is an ordinary one, and the second captures: let it be done by now.
            program.run()
            program.run()
        self._recorded[key] = program
