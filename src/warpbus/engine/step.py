"""What the device keeps of every sequence, and the decode step over it: from the last token to scores of the next.

On a GPU a step is a CUDA graph, captured once for a number of rows and a bound of their lengths, and launched as one.
Knows nothing of requests, sampling or text; `runner` says which sequences there are.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.engine.attention import StepAttention
from warpbus.engine.blocks import BLOCK
from warpbus.engine.kv_cache import KVCache
from warpbus.models import Decoder

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


Key = tuple[int, int, bool]


class Step:
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

    Attributes:
        last: int64 `[slots + 1]`, the last token of each sequence, which enters its next step.
        positions: int32 `[slots + 1]`, where it stands.
        blocks: int32 `[slots + 1, n]`, the blocks of each sequence.
        table: the rotary table (`Rotary.table`).
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
    ) -> None:
        self._model = model
        self._cache = cache
        self._capacity = length
        self.table = model.rotary.table(length, device)
        self.last = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self.blocks = torch.zeros(slots + 1, -(-length // BLOCK), dtype=torch.int32, device=device)
        self.host_embedding = model.embedding.weight.device != device
        rows = batch_bucket(rows)
        self._slots = torch.full((rows,), slots, device=device)
        self._shown: list[int] = []
        # Of tokens that the host says: ids, positions, and where their keys and values go.
        self._said = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._embedded = torch.zeros(rows if self.host_embedding else 0, 1, model.config.hidden_size).to(device, dtype)
        self._scores = torch.empty(rows, model.config.vocab_size, dtype=dtype, device=device)
        self._graphs = _Graphs(device) if graphs else None

    def scores(self, slots: Sequence[int], longest: int) -> Tensor:
        """Append the last token of some sequences to them; the scores of the next, `[sequences, vocabulary]`.

        They are overwritten by the next call. `last` and `positions` stay as they are.

        Args:
            slots: of the sequences.
            longest: the tokens of the longest of them.
        """
        return self._run(slots, longest, said=False)

    def scores_of(
        self, tokens: Sequence[int], positions: Sequence[int], stored: Sequence[int], slots: Sequence[int]
    ) -> Tensor:
        """As `scores`, of tokens that the host says: several of a sequence may follow each other.

        Args:
            tokens, positions: the tokens, and where they stand in their sequences.
            stored: where their keys and values go: block * BLOCK + offset.
            slots: of their sequences.
        """
        count, said = len(tokens), torch.tensor([tokens, positions, stored])
        if self._said.is_cuda:
            said = said.pin_memory()
        # What fills up stands at position 0 of nobody's sequence, whose block is nobody's.
        self._said.zero_()
        self._said[:, :count].copy_(said, non_blocking=True)
        if self.host_embedding:
            self._embed(tokens)
        return self._run(slots, max(positions) + 1, said=True)

    def capture(self, rows: int, longest: int) -> None:
        """Capture the graph for so many rows ahead of its first use."""
        if self._graphs is not None:
            self._show([], batch_bucket(rows))
            self._replay(self._graphs, batch_bucket(rows), length_bucket(longest, self._capacity), said=False)

    def _run(self, slots: Sequence[int], longest: int, *, said: bool) -> Tensor:
        count = len(slots)
        if self._graphs is None:
            self._show(slots, count)
            return self._compute(count, longest, said)
        self._show(slots, batch_bucket(count))
        self._replay(self._graphs, batch_bucket(count), length_bucket(longest, self._capacity), said=said)
        return self._scores[:count]

    def _replay(self, graphs: "_Graphs", rows: int, limit: int, *, said: bool) -> None:
        graphs.run((rows, limit, said), lambda: self._scores[:rows].copy_(self._compute(rows, limit, said)))

    def _show(self, slots: Sequence[int], rows: int) -> None:
        """Tell the device which sequences there are, and fill up with the slot that is nobody's."""
        shown = [*slots, *[len(self.last) - 1] * (rows - len(slots))]
        if shown != self._shown:
            fresh = torch.tensor(shown, pin_memory=self._slots.is_cuda)
            self._slots[:rows].copy_(fresh, non_blocking=True)
            self._shown = shown

    def _embed(self, tokens: Sequence[int]) -> None:
        rows = F.embedding(torch.tensor(tokens), self._model.embedding.weight)[:, None].to(self._embedded.dtype)
        if self._embedded.is_cuda:
            rows = rows.pin_memory()
        self._embedded[: len(tokens)].copy_(rows, non_blocking=True)

    def _compute(self, rows: int, limit: int, said: bool) -> Tensor:
        model, slots = self._model, self._slots[:rows]
        blocks = self.blocks[:, : -(-limit // BLOCK)].index_select(0, slots)
        if said:
            tokens, positions, stored = self._said[0, :rows], self._said[1, :rows].int(), self._said[2, :rows]
        else:
            tokens, positions, stored = self.last.index_select(0, slots), self.positions.index_select(0, slots), None
        context = StepAttention(model.config, self.table, self._cache, positions, blocks, limit, stored)
        x = self._embedded[:rows] if self.host_embedding else model.embed(tokens[:, None])
        return model.scores(model.transform(x, None, context)[:, 0])


class _Graphs:
    """CUDA graphs by what they are for; captured when first asked for. They share the memory of what lies between."""

    def __init__(self, device: torch.device) -> None:
        self._captured: dict[Key, torch.cuda.CUDAGraph] = {}
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def run(self, key: Key, work: Callable[[], object]) -> None:
        """Launch `work`, captured under `key`. To run it twice is to run it once."""
        if key not in self._captured:
            self._captured[key] = self._capture(work)
        self._captured[key].replay()

    def _capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        # Kernels are compiled and loaded at their first launch, which a capture does not allow.
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph
