"""The decode step: one token for each row, from the embedding to the choice, over tensors that stay where they are.

On a GPU a step is a CUDA graph, captured once for a number of rows and a bound of their lengths, and launched as one.
Knows nothing of requests or text; `runner` says which rows there are.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.engine.attention import FusedStep, StepAttention
from warpbus.engine.kv_cache import CacheRows, KVCache
from warpbus.engine.sampler import Sampler
from warpbus.models import Decoder

SHORTEST_BUCKET = 512
"""Tokens: sequences up to here share a graph; beyond, a graph is for those of up to twice as many."""


def batch_bucket(rows: int) -> int:
    """The rows that a graph is captured for, where `rows` are wanted: a power of two."""
    return 1 << (rows - 1).bit_length()


def length_bucket(tokens: int, capacity: int) -> int:
    """The bound of the lengths that a graph is captured for, where the longest row has `tokens` of them."""
    return min(max(SHORTEST_BUCKET, 1 << (tokens - 1).bit_length()), capacity)


@dataclass(frozen=True)
class Outcome:
    """The tokens of a step, on their way to the host.

    Attributes:
        rows: the rows of the step that are still wanted.
    """

    rows: list[int]
    _result: Tensor
    _arrived: torch.cuda.Event | None

    def read(self) -> tuple[list[int], list[bool]]:
        """The token of each wanted row, and whether the best score is a number. Waits for the step."""
        if self._arrived is not None:
            self._arrived.synchronize()
        index = torch.tensor(self.rows)
        tokens, best = self._result[0][index], self._result[1].view(torch.float32)[index]
        return tokens.tolist(), best.isfinite().tolist()


class Step:
    """The state of up to `rows` rows between two steps, and the graphs of the steps.

    Args:
        model: in eval mode.
        rows: the most there can be.
        length: the longest sequence there can be, in tokens.
        device, dtype: of the model and its activations.

    Attributes:
        sampler: chooses the tokens.
        tokens: int64 `[rows]`, the last token of each row: it enters the next step.
        positions: int32 `[rows]`, where it stands in its row.
        table: the rotary table (`Rotary.table`).
        host_embedding: the embedding lies on the CPU, and the host has to look the tokens up (`embed`).
    """

    def __init__(self, model: Decoder, rows: int, length: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model
        self.table = model.rotary.table(length, device)
        self.sampler = Sampler(rows, model.config.vocab_size, device)
        # One copy brings both to the host: the tokens, and below them the best scores.
        self._result = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self.tokens = self._result[0]
        self._best = self._result[1].view(torch.float32)[:rows]
        self.positions = torch.zeros(rows, dtype=torch.int32, device=device)
        self.host_embedding = model.embedding.weight.device != device
        self._embedded = torch.zeros(rows, 1, model.config.hidden_size, dtype=dtype, device=device)
        self._graphs = _Graphs(device) if device.type == "cuda" else None

    def begin(self, lengths: Sequence[int]) -> None:
        """Take up rows whose prompts have these lengths; `finish` gives them their first token."""
        self.tokens.zero_()
        self.positions.zero_()
        self.positions[: len(lengths)] = torch.tensor(lengths, dtype=torch.int32).to(self.positions.device) - 1

    def keep(self, rows: Sequence[int]) -> None:
        """Move these rows to the front; those behind become padding at position 0."""
        index = torch.tensor(rows, device=self.tokens.device)
        for state in (self.tokens, self.positions):
            kept = state[index]
            state.zero_()
            state[: len(rows)] = kept

    def embed(self, tokens: Sequence[int]) -> None:
        """Look up the tokens that enter the next step, where the embedding lies on the CPU."""
        rows = F.embedding(torch.tensor(tokens), self._model.embedding.weight)[:, None]
        if self._embedded.is_cuda:
            rows = rows.pin_memory()
        self._embedded[: len(tokens)].copy_(rows, non_blocking=True)

    def run(self, cache: KVCache | CacheRows, lengths: Sequence[int]) -> None:
        """Append each row's token to it and choose the next.

        Args:
            cache: has room for one more token a row.
            lengths: how many tokens each row has in the cache: its token's position.
        """
        if not isinstance(cache, CacheRows):
            context = StepAttention(cache, lengths)
            x = self._model.embed(self.tokens[: len(lengths), None])
            logits = self._model.scores(self._model.transform(x, self.positions[: len(lengths), None], context)[:, 0])
            self.finish(logits)
            return
        limit = length_bucket(max(lengths) + 1, min(cache.capacity, len(self.table)))
        if self._graphs is None:
            self.finish(self._fused_scores(cache, len(lengths), limit))
        else:
            self._replay(self._graphs, cache, batch_bucket(len(lengths)), limit)

    def finish(self, logits: Tensor) -> None:
        """Choose the rows' tokens by their scores `[batch, vocabulary]`."""
        tokens, best = self.sampler.choose(logits)
        batch = len(tokens)
        self.sampler.saw(tokens)
        self.tokens[:batch] = tokens
        self._best[:batch] = best
        self.positions[:batch] += 1

    def outcome(self, rows: int) -> Outcome:
        """The tokens of the last step's first `rows` rows, which a later step does not change."""
        if not self._result.is_cuda:
            return Outcome(list(range(rows)), self._result.clone(), None)
        result = torch.empty(self._result.shape, dtype=torch.int64, pin_memory=True)
        result.copy_(self._result, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Outcome(list(range(rows)), result, arrived)

    def _fused_scores(self, cache: CacheRows, batch: int, limit: int) -> Tensor:
        model = self._model
        context = FusedStep(model.config, self.table, cache, self.positions[:batch], limit)
        x = self._embedded[:batch] if self.host_embedding else model.embed(self.tokens[:batch, None])
        return model.scores(model.transform(x, None, context)[:, 0])

    def _replay(self, graphs: "_Graphs", cache: CacheRows, batch: int, limit: int) -> None:
        key = cache.rows, batch, limit
        if self.sampler.penalizes:
            # What was seen is of this batch alone: the choice stays outside of the graph.
            logits = graphs.run((*key, "scores"), lambda: self._fused_scores(cache, batch, limit), self._held)
            assert logits is not None
            self.finish(logits)
            return

        def whole() -> None:
            self.finish(self._fused_scores(cache, batch, limit))

        graphs.run((*key, "greedy" if self.sampler.greedy else "drawn"), whole, self._held)

    @property
    def _held(self) -> tuple[Tensor, ...]:
        """What a step changes besides the cache, where it writes what it wrote before if it is run again."""
        return self._result, self.positions


class _Graphs:
    """CUDA graphs by what they are for; captured when first asked for. They share the memory of what lies between."""

    def __init__(self, device: torch.device) -> None:
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor | None]] = {}
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def run(self, key: Hashable, work: Callable[[], Tensor | None], state: tuple[Tensor, ...]) -> Tensor | None:
        """Launch `work`, captured under `key`, and return its result, which the next launch overwrites.

        Args:
            state: tensors that `work` changes, which a run before the capture must not.
        """
        if key not in self._captured:
            self._captured[key] = self._capture(work, state)
        graph, result = self._captured[key]
        graph.replay()
        return result

    def _capture(
        self, work: Callable[[], Tensor | None], state: tuple[Tensor, ...]
    ) -> tuple[torch.cuda.CUDAGraph, Tensor | None]:
        before = [tensor.clone() for tensor in state]
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        # Kernels are compiled and loaded at their first launch, which a capture does not allow.
        with torch.cuda.stream(self._stream):
            work()
            for tensor, old in zip(state, before, strict=True):
                tensor.copy_(old)
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            result = work()
        return graph, result
