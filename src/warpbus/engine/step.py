"""The state of all running sequences on the device, and the step over it: from tokens to the logits of the next ones.

On a GPU a step is a CUDA graph, captured once per number of rows and bound of the cache length, and launched as one; on
a remote GPU it is a recorded program, which the lender's side captures as a graph.
A row is one token: the last token of a sequence, a draft that follows it, or a token of a prompt. Knows nothing of
requests, sampling or text; `runner` chooses the rows.
"""

from collections import abc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from warpbus.cuda.capture import Graph, GraphMemory, capture
from warpbus.cuda.devices import running_on
from warpbus.cuda.remote import Recorded, RemoteBackend, remote_backend
from warpbus.engine.attention import DecodeAttention, PositionedAttention, PrefillAttention
from warpbus.engine.blocks import BLOCK, NULL_BLOCK
from warpbus.engine.kv_cache import KVCache
from warpbus.engine.logits import pinned, to_device
from warpbus.engine.positions import PositionState, RopeAngles, needs_position_state
from warpbus.engine.prompt_graphs import PromptGraphs, graph_rows
from warpbus.engine.speculation import MOST_MTP_DRAFTS
from warpbus.kernels.ops import sampling, workspace
from warpbus.models import Decoder
from warpbus.models.layers import FusedAttention, Selection

SHORTEST_BUCKET = 512
"""Tokens: sequences up to this length share a graph; each further graph is for lengths up to twice as large."""

_COARSE = ((16, 8), (64, 16), (512, 32))  # (rows up to, distance of buckets); up to 8 rows buckets are powers of two


def batch_bucket(rows: int) -> int:
    """The number of rows of the graph that runs `rows` rows."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = next((step for most, step in _COARSE if rows <= most), 64)
    return -(-rows // step) * step


def length_bucket(tokens: int, capacity: int) -> int:
    """The bound of the cache lengths of the graph that runs rows of sequences of up to `tokens` cache positions."""
    return min(max(SHORTEST_BUCKET, 1 << (tokens - 1).bit_length()), capacity)


MIXED_ROWS = 1024
"""The most rows of a graph of prompts and decoding sequences; with more rows, launching kernel by kernel costs
little."""

_CAPTURED_DRAFTING = (1, 2, 4)  # sequences for which graphs with drafts are captured ahead

FROM_DEVICE = -1
"""Stands for a token id that the host does not know yet: the last token of the row's sequence."""

_MIXED_BUCKETS = (32, 64, 128, 256, 384, 512, 768, MIXED_ROWS)
# Rows of a mixed step by the number of decoding sequences: each further row makes these wait longer for their tokens.
# Chosen by measured steps on an H100 (ChatGLM2-6B's shape in 4 bits): they wait about three times as long as without
# prompts.
_MIXED_ROWS_BY_DECODING = ((8, 128), (16, 256), (40, 384), (96, 512), (160, 768))
# Cache positions: in longer sequences each token of a prompt would read too much of the cache again.
_MIXED_LENGTH = 2048
# Bytes that all rows read of a layer's cache, for ChatGLM-6B: every head has keys of its own, 16 times those of its
# successors, so that a prompt of 180 tokens reads as much as theirs of 720.
_MIXED_READ = 2**29

GraphKey = tuple[int, int, str, bool]
"""Of a graph: rows; the bound of their cache lengths; the use: "decode" (one row per sequence, all inputs on the
device), "host" (rows from the host, all sampled) or "mixed" (rows from the host, some sampled), or of multi-token
prediction "predict decode" and "predict" (the rows of such a step) or "draft 1" to "draft 4" (so many draft tokens per
sequence); whether rows may have adapters."""


@dataclass
class StepRows:
    """The rows of a step, as the host describes them.

    Attributes:
        tokens: token ids, or `FROM_DEVICE`.
        positions: of the tokens in their sequences.
        slot_mapping: where their keys and values are stored: block * BLOCK + offset.
        slots: of their sequences.
        sampled: the indices of the rows after which a token is sampled.
        following: the token after each row, or `FROM_DEVICE` where it is sampled.
        cache_length: the most cache positions that a row attends to.
    """

    tokens: list[int] = field(default_factory=list)
    following: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slot_mapping: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    cache_length: int = 0


class StepExecutor:
    """The state of up to `slots` sequences on the device, and the graphs of the steps.

    A sequence keeps its slot while it runs. One more slot is for padding rows, which only fill up a graph.

    Args:
        model: in eval mode.
        cache: of keys and values.
        slots: the most sequences at once.
        rows: the most sampled rows per step, drafts included: at least `slots`.
        length: the most tokens of a sequence.
        device, dtype: of the activations.
        graphs: whether steps are captured.
        mixed_rows: the most rows of a graph with prompts.
        most_graphs: how many graphs are kept, the last used ones; None: all.
        selection: of the model's adapters; None if it has none.
        prefix_length: cache positions of the longest prefix.
        drafts: the most tokens that multi-token prediction drafts per sequence (`draft`). If there are any, its layer
            computes the rows of each step, too (`predict`).

    Attributes:
        last: int64 `[slots + 1]`, the last token of each sequence: the input of its next step.
        positions: int32 `[slots + 1]`, the position of that token.
        blocks: int32 `[slots + 1, n]`, the block table of each sequence.
        adapters: int64 `[slots + 1]`, the LoRA of each sequence, from 1 on; 0: none.
        table: the rotary table (`Rotary.table`).
        positioning: further state of positions; None for a model that needs only the token positions.
        host_embedding: the embedding is on the CPU, and the host has to provide all token ids.
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
        prefix_length: int = 0,
        drafts: int = 0,
    ) -> None:
        self._model = model
        self._selection = selection or Selection(())
        self._cache = cache
        self._capacity = length + prefix_length
        self._mixed_rows = mixed_rows
        self.table = model.rotary.table(length, device)
        self.last = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self.blocks = torch.zeros(slots + 1, -(-self._capacity // BLOCK), dtype=torch.int32, device=device)
        read = model.config.attention.cache_entry.size * cache.layers[0][0].element_size()
        self._read = read if model.config.prompt_end is not None else 0
        needed = needs_position_state(model.config, prefix_length)
        self.positioning = PositionState(model, slots, self._capacity, self.table) if needed else None
        self.adapters = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._assigned = [0] * (slots + 1)
        self.host_embedding = model.embedding_device != device
        sampled = batch_bucket(rows)
        rows = max(sampled, MIXED_ROWS)
        self._slots = torch.full((rows,), slots, device=device)
        self._loaded_slots: list[int] = []
        self._advanced: list[int] = []
        self._advanced_index = self._slots[:0]
        self._ones = torch.ones(sampled, dtype=torch.int32, device=device)
        # The host's values of the rows: token ids, positions, slot mapping, indices of the sampled rows.
        self._host_rows = torch.zeros(4, rows, dtype=torch.int64, device=device)
        self._embedded = torch.zeros(rows if self.host_embedding else 0, 1, model.config.hidden_size).to(device, dtype)
        self._scores = torch.empty(sampled, model.config.vocab_size, dtype=dtype, device=device)
        self._drafts = drafts
        self._mtp = MTPBuffers.of(rows if drafts else 0, slots, model.config.hidden_size, device=device, dtype=dtype)
        self._computed: GraphKey | None = None  # the last step, whose rows `predict` computes
        # Graphs run one after another: their kernels share counters.
        counted = max(rows * model.config.attention.num_kv_heads, workspace.MOST_OF_A_PRODUCT)
        self._counters = torch.zeros(counted, dtype=torch.int32, device=device)
        remote = remote_backend(device)
        self._graphs: _GraphCache | _ProgramCache | None = None
        if graphs:
            self._graphs = _GraphCache(device, most_graphs) if remote is None else _ProgramCache(remote, most_graphs)
        # Memory that is planned has no room for a second set of intermediate results.
        most = graph_rows(model, device) if graphs and most_graphs is None else 0
        self._prompts: PromptGraphs | None = None
        if most and isinstance(self._graphs, _GraphCache):
            self._prompts = PromptGraphs(model, most, self._graphs.memory, dtype, self._counters)

    def scores(self, slots: abc.Sequence[int], longest: int) -> Tensor:
        """Decode: compute the last token of some sequences; the logits of the next ones, `[sequences, vocabulary]`.

        The next call overwrites them. `last` and `positions` do not change.

        Args:
            slots: of the sequences.
            longest: cache positions of the longest sequence.
        """
        count = len(slots)
        if self._graphs is None:
            self._load_slots(slots, count)
            return self._compute((count, self._whole_blocks(longest), "decode", self._any_adapter(slots)))
        key = batch_bucket(count), length_bucket(longest, self._capacity), "decode", self._any_adapter(slots)
        self._load_slots(slots, key[0])
        self._replay(self._graphs, key)
        self._computed = key
        return self._scores[:count]

    def fits_graph(self, rows: int, longest: int) -> bool:
        """Whether one graph runs so many rows, prompts included, of sequences of up to `longest` cache positions."""
        few = rows <= self._mixed_rows and longest <= _MIXED_LENGTH and rows * longest * self._read <= _MIXED_READ
        return self._graphs is not None and few

    def scores_of(self, rows: StepRows, *, prompts: bool) -> Tensor:
        """As `scores`, for rows that the host describes; a sequence may have several consecutive rows.

        Args:
            prompts: some rows are not sampled.

        Returns:
            `[sampled rows, vocabulary]`.
        """
        count, sampled = len(rows.tokens), len(rows.sampled)
        fresh = torch.tensor([rows.tokens, rows.positions, rows.slot_mapping, rows.sampled + [0] * (count - sampled)])
        if self._host_rows.is_cuda:
            fresh = pinned(fresh)
        # Padding rows use position 0 of the padding slot, whose block is the null block.
        self._host_rows.zero_()
        self._host_rows[:, :count].copy_(fresh, non_blocking=True)
        if self.host_embedding:
            self._embed(rows.tokens)
        longest, use, adapted = rows.cache_length, "mixed" if prompts else "host", self._any_adapter(rows.slots)
        if self._graphs is None:
            self._load_slots(rows.slots, count)
            return self._compute((count, self._whole_blocks(longest), use, adapted))[:sampled]
        bucket = next(size for size in _MIXED_BUCKETS if size >= count) if prompts else batch_bucket(count)
        self._load_slots(rows.slots, bucket)
        key = bucket, length_bucket(longest, self._capacity), use, adapted
        self._replay(self._graphs, key)
        self._computed = key
        return self._scores[:sampled]

    def predict(self, following: Tensor) -> Tensor:
        """Multi-token prediction for the rows of the last call of `scores` or `scores_of`: stores keys and values.

        Args:
            following: int64 `[rows]`, the token after each row.

        Returns:
            the hidden states of these tokens as `Decoder.predict` gives them, `[rows, hidden]`; the next call
            overwrites them.
        """
        assert self._computed is not None
        count, limit, use, _ = self._computed
        self._mtp.following[: len(following)].copy_(following)
        self._run_mtp((count, limit, "predict decode" if use == "decode" else "predict", False))
        return self._mtp.predicted[: len(following)]

    def draft(
        self, hidden: Tensor, positions: Tensor, slots: abc.Sequence[int], ends: Tensor, longest: int, count: int
    ) -> Tensor:
        """Draft tokens of some sequences, each from the hidden state that the one before gives.

        Args:
            hidden: `[sequences, hidden]`, from `predict`, of the last token of each sequence.
            positions: int32 `[sequences]`, of the token before it.
            slots: of the sequences.
            ends: int32 `[sequences]`: the cache positions for which each sequence has blocks. Keys and values of draft
                tokens beyond are stored in the null block: these drafts are poor.
            longest: cache positions of the longest sequence.
            count: draft tokens per sequence, 1 to 4.

        Returns:
            int64 `[sequences, count]`; the next call overwrites them.
        """
        rows, longest = len(slots), min(longest + count, self._capacity)
        padded, limit = rows, self._whole_blocks(longest)
        if self._graphs is not None:
            padded, limit = batch_bucket(rows), length_bucket(longest, self._capacity)
        self._load_slots(slots, padded)
        buffers = self._mtp
        buffers.hidden[:rows].copy_(hidden)
        for buffer, values in ((buffers.positions, positions), (buffers.ends, ends)):
            buffer[:padded].zero_()
            buffer[:rows].copy_(values)
        self._run_mtp((padded, limit, f"draft {count}", False))
        return buffers.drafts[:rows, :count]

    def advance(self, slots: list[int], tokens: Tensor, positions: abc.Sequence[int] | None) -> None:
        """Set the tokens `[sequences]` sampled for some sequences as their last ones.

        Args:
            slots: of the sequences.
            positions: of the tokens; None: one after the position of the previous last token.
        """
        device = self.last.device
        if slots != self._advanced:
            self._advanced, self._advanced_index = slots, to_device(slots, torch.int64, device)
        self.last.index_copy_(0, self._advanced_index, tokens)
        if positions is None:
            self.positions.index_add_(0, self._advanced_index, self._ones[: len(slots)])
        else:
            self.positions.index_copy_(0, self._advanced_index, to_device(positions, torch.int32, device))

    def load(self, states: abc.Sequence[tuple[int, int, int]]) -> None:
        """Load sequences that ran on another device: the slot, the last token and its position of each."""
        slots, tokens, positions = ([state[at] for state in states] for at in range(3))
        self.advance(slots, to_device(tokens, torch.int64, self.last.device), positions)

    def use_selection(self, selection: Selection) -> None:
        """Use other adapters from now on. Graphs of steps with adapters read the former ones, and are dropped."""
        self._selection = selection
        if self._graphs is not None:
            self._graphs.drop_adapted()

    def assign(self, slot: int, adapter: int) -> None:
        """Set the LoRA of a slot's sequence: its number, or 0 for none."""
        if self._assigned[slot] != adapter:
            self._assigned[slot] = adapter
            self.adapters[slot] = adapter

    def rope_angles(self, positions: Tensor, slots: abc.Sequence[int]) -> RopeAngles:
        """The rotary angles of tokens at `positions`, int32 `[tokens]`, of the sequences of these slots."""
        if self.positioning is None:
            return RopeAngles(self.table, positions)
        return self.positioning.rope_angles(positions, to_device(slots, torch.int64, positions.device))

    def transform(self, tokens: Tensor, context: PrefillAttention, slots: abc.Sequence[int]) -> Tensor:
        """The output of the last layer for chunks of prompts, `[tokens, hidden]`.

        Args:
            tokens: int64 `[tokens]`.
            context: that stores and attends.
            slots: of the sequence of each token.
        """
        x = self._model.embed(tokens[None])
        if self._prompts is not None and len(tokens) <= self._prompts.most and not self._any_adapter(slots):
            return self._prompts.transform(x, context)[0]
        with self._with_adapters(slots):
            return self._model.transform(x, None, context)[0]

    def _with_adapters(self, slots: abc.Sequence[int]) -> AbstractContextManager[None]:
        """For model calls in the block, with rows of these slots: each row uses the adapter of its sequence."""
        numbers = [self._assigned[slot] for slot in slots]
        if not any(numbers):
            return nullcontext()
        return self._selection.rows(to_device(numbers, torch.int64, self.last.device))

    def capture(self, rows: int, longest: int) -> None:
        """Capture graphs ahead of use: for up to `rows` sequences of `longest` tokens, and for mixed steps."""
        if self._graphs is None:
            return
        limit = length_bucket(longest, self._capacity)
        uses = [(bucket, "mixed") for bucket in _MIXED_BUCKETS if bucket <= self._mixed_rows]
        uses += [(bucket, "decode") for bucket in {batch_bucket(count) for count in range(1, rows + 1)}]
        kinds = (False, True) if self._selection.source else (False,)
        keys: list[GraphKey] = [(bucket, limit, use, adapted) for bucket, use in uses for adapted in kinds]
        self._host_rows.zero_()
        self._load_slots([], len(self._slots))
        # The largest first: the intermediate results of the others fit into its memory.
        for key in sorted(keys, reverse=True):
            self._replay(self._graphs, key)
        if self._drafts:
            self._capture_drafts(rows, limit)

    def _capture_drafts(self, rows: int, limit: int) -> None:
        """Capture the graphs of multi-token prediction: for prompts, and for all drafts of few sequences."""
        assert self._graphs is not None
        few = [count for count in _CAPTURED_DRAFTING if count <= rows]
        verified = {batch_bucket(count * (self._drafts + 1)) for count in few}
        for bucket in sorted(verified, reverse=True):
            self._replay(self._graphs, (bucket, limit, "host", False))
        prompts = {bucket for bucket in _MIXED_BUCKETS if bucket <= self._mixed_rows}
        for bucket in sorted(verified | prompts, reverse=True):
            self._run_mtp((bucket, limit, "predict", False))
        for count in few:
            self._run_mtp((batch_bucket(count), limit, f"draft {self._drafts}", False))

    def _replay(self, graphs: "_GraphCache | _ProgramCache", key: GraphKey) -> None:
        def work() -> None:
            with workspace.use_counters(self._counters):
                scores = self._compute(key)
            self._scores[: len(scores)].copy_(scores)

        graphs.run(key, work)

    def _run_mtp(self, key: GraphKey) -> None:
        """Run a use of multi-token prediction; without a graph if the host has to look embeddings up."""
        compute = self._compute_drafts if key[2].startswith("draft") else self._compute_predictions
        if self._graphs is None or self.host_embedding:
            compute(key)
            return

        def work() -> None:
            with workspace.use_counters(self._counters):
                compute(key)

        self._graphs.run(key, work)

    def _any_adapter(self, slots: abc.Sequence[int]) -> bool:
        return any(self._assigned[slot] for slot in slots)

    def _load_slots(self, slots: abc.Sequence[int], rows: int) -> None:
        """Copy the slots of the rows to the device, padded with the padding slot."""
        padded = [*slots, *[len(self.last) - 1] * (rows - len(slots))]
        if padded != self._loaded_slots:
            fresh = torch.tensor(padded, pin_memory=self._slots.is_cuda)
            self._slots[:rows].copy_(fresh, non_blocking=True)
            self._loaded_slots = padded

    def _whole_blocks(self, longest: int) -> int:
        """A bound of the cache length without a graph: attention reads whole blocks anyway, and a remote device has to
        learn each new kind of call, which changes with the bound."""
        return min(-(-longest // BLOCK) * BLOCK, self._capacity)

    def _embed(self, tokens: abc.Sequence[int]) -> None:
        rows = self._model.embedding(torch.tensor(tokens))[:, None].to(self._embedded.dtype)
        if self._embedded.is_cuda:
            rows = pinned(rows)
        self._embedded[: len(tokens)].copy_(rows, non_blocking=True)

    def _compute(self, key: GraphKey) -> Tensor:
        self._computed = key
        rows, limit, use, adapted = key
        model, slots = self._model, self._slots[:rows]
        positions, slot_mapping, blocks = self._attended(rows, limit, decode=use == "decode")
        # After positions and block tables, which attention takes as complete when it starts (`inputs_ready`): this
        # kernel starts only when those that compute them have ended.
        tokens = self.last.index_select(0, slots)
        if use != "decode":
            known = self._host_rows[0, :rows]
            tokens = torch.where(known == FROM_DEVICE, tokens, known)
        context: FusedAttention
        if self.positioning is None:
            context = DecodeAttention(model.config, self.table, self._cache, positions, blocks, limit, slot_mapping)
        else:
            row_positions = self.positioning.row_positions(positions, slots, blocks, slot_mapping)
            context = PositionedAttention(model.config, row_positions, self._cache, blocks, limit)
        x = self._embedded[:rows] if self.host_embedding else model.embed(tokens[:, None])
        with self._selection.rows(self.adapters.index_select(0, slots)) if adapted else nullcontext():
            hidden = model.transform(x, None, context)[:, 0]
        if len(self._mtp.hidden):
            self._mtp.hidden[:rows].copy_(model.final_norm(hidden))
        if use == "mixed":
            hidden = hidden.index_select(0, self._host_rows[3, : min(rows, len(self._scores))])
        return model.scores(hidden)

    def _attended(self, rows: int, limit: int, *, decode: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """The positions, the slot mapping (None: as the positions say) and the block tables of a step's rows."""
        blocks = self.blocks[:, : -(-limit // BLOCK)].index_select(0, self._slots[:rows])
        if decode:
            return self.positions.index_select(0, self._slots[:rows]), None, blocks
        return self._host_rows[1, :rows].int(), self._host_rows[2, :rows], blocks

    def _compute_predictions(self, key: GraphKey) -> None:
        rows, limit, use, _ = key
        model, buffers = self._model, self._mtp
        positions, slot_mapping, blocks = self._attended(rows, limit, decode=use == "predict decode")
        context = DecodeAttention(model.config, self.table, self._cache, positions, blocks, limit, slot_mapping)
        predicted = model.predict(buffers.following[:rows, None], buffers.hidden[:rows, None], context=context)
        buffers.predicted[:rows].copy_(predicted[:, 0])

    def _compute_drafts(self, key: GraphKey) -> None:
        rows, limit, use, _ = key
        model, buffers, count = self._model, self._mtp, int(use.removeprefix("draft "))
        blocks = self.blocks[:, : -(-limit // BLOCK)].index_select(0, self._slots[:rows])
        hidden, ends = buffers.hidden[:rows], buffers.ends[:rows]
        for at in range(count):
            tokens, _ = sampling.argmax(model.logits(hidden))
            buffers.drafts[:rows, at] = tokens
            if at + 1 == count:
                return
            wanted = buffers.positions[:rows] + at + 1
            positions = torch.minimum(wanted, (ends - 1).clamp_min(0))
            block = blocks.gather(1, (positions // BLOCK)[:, None].long())[:, 0].long()
            slot_mapping = torch.where(wanted < ends, block * BLOCK, NULL_BLOCK * BLOCK) + wanted % BLOCK
            context = DecodeAttention(model.config, self.table, self._cache, positions, blocks, limit, slot_mapping)
            hidden = model.predict(tokens[:, None], hidden[:, None], context=context)[:, 0]


@dataclass(frozen=True)
class MTPBuffers:
    """Inputs and outputs of multi-token prediction, at fixed addresses; without rows if there is none.

    Attributes:
        hidden: `[rows, hidden]`, the normed hidden states of the last step's rows, or those that are drafted from.
        following: int64 `[rows]`, the token after each row.
        predicted: `[rows, hidden]`, the results of `Decoder.predict`.
        positions, ends, drafts: of `StepExecutor.draft`, int32 `[sequences]` twice and int64 `[sequences, 4]`.
    """

    hidden: Tensor
    following: Tensor
    predicted: Tensor
    positions: Tensor
    ends: Tensor
    drafts: Tensor

    @classmethod
    def of(cls, rows: int, slots: int, hidden: int, *, device: torch.device, dtype: torch.dtype) -> "MTPBuffers":
        """Buffers for `rows` rows of a step of `slots` sequences."""
        sequences = batch_bucket(slots) if rows else 0
        return cls(
            hidden=torch.zeros(rows, hidden, dtype=dtype, device=device),
            following=torch.zeros(rows, dtype=torch.int64, device=device),
            predicted=torch.zeros(rows, hidden, dtype=dtype, device=device),
            positions=torch.zeros(sequences, dtype=torch.int32, device=device),
            ends=torch.zeros(sequences, dtype=torch.int32, device=device),
            drafts=torch.zeros(sequences, MOST_MTP_DRAFTS, dtype=torch.int64, device=device),
        )


def mixed_step_rows(decoding: int) -> int:
    """How many rows a mixed step of prompts and so many decoding sequences should have."""
    return next((rows for most, rows in _MIXED_ROWS_BY_DECODING if decoding <= most), MIXED_ROWS)


class _GraphCache:
    """CUDA graphs by key, captured at their first use.

    Args:
        most: graphs that are kept, at least two: one may still run when it is dropped. None: all.

    Attributes:
        memory: of intermediate results, which the graphs share.
    """

    def __init__(self, device: torch.device, most: int | None) -> None:
        self._captured: dict[GraphKey, Graph] = {}  # least recently used first
        self._most = most
        self.memory = GraphMemory(device)

    def run(self, key: GraphKey, work: Callable[[], object]) -> None:
        """Launch `work`, captured under `key`. `work` must be idempotent: the capture runs it more than once."""
        graph = self._captured.pop(key, None)
        if graph is None:
            if self._most is not None and len(self._captured) >= self._most:
                del self._captured[next(iter(self._captured))]
            graph = self._capture(work)
        self._captured[key] = graph
        graph.replay()

    def drop_adapted(self) -> None:
        """Drop the graphs of steps with adapters."""
        self._captured = {key: graph for key, graph in self._captured.items() if not key[3]}

    def _capture(self, work: Callable[[], object]) -> Graph:
        # Kernels are compiled and loaded at their first launch, which a capture does not allow.
        with running_on(self.memory.stream):
            work()
        with capture(self.memory) as graph:
            work()
        return graph


class _ProgramCache:
    """Keeps the recorded programs of steps on a remote device: one short message runs a program, and the pool
    makes a CUDA graph of it.

    Args:
        most: programs that are kept; None: all.
    """

    def __init__(self, device: RemoteBackend, most: int | None) -> None:
        self._recorded: dict[GraphKey, Recorded] = {}  # least recently used first
        self._device = device
        self._most = most

    def drop_adapted(self) -> None:
        """Drop the programs of steps with adapters."""
        for key in [key for key in self._recorded if key[3]]:
            self._recorded.pop(key).drop()

    def run(self, key: GraphKey, work: Callable[[], object]) -> None:
        """Run `work`, recorded under `key`. `work` must be idempotent."""
        program = self._recorded.pop(key, None)
        if program is not None:
            program.run()
        else:
            if self._most is not None and len(self._recorded) >= self._most:
                self._recorded.pop(next(iter(self._recorded))).drop()
            work()  # makes all queries about its operators, which are not possible while recording
            with self._device.record() as program:
                work()
            # The first run of a program is an ordinary one, and the second captures: have both done by now.
            program.run()
            program.run()
        self._recorded[key] = program
