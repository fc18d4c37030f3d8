"""Launches steps: pieces of prompts, and the next token of each of many sequences.

A step is launched and read apart, so that on a GPU the next one can run while the host deals with the last one's
tokens: all that a step needs of the one before it stays on the device. Knows nothing of text or of when an answer ends.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.dist import Group
from warpbus.engine.attention import PieceAttention, Stretch
from warpbus.engine.blocks import BLOCK
from warpbus.engine.kv_cache import KVCache
from warpbus.engine.logprobs import Logprobs
from warpbus.engine.sampler import Sampler
from warpbus.engine.scheduler import Piece, Request
from warpbus.engine.sequence import Sequence as Asked
from warpbus.engine.sequence import TokenLogprob
from warpbus.engine.step import Step
from warpbus.errors import DeviceError, NumericError
from warpbus.models import Decoder


@dataclass(eq=False)
class Row:
    """A sequence that runs.

    Attributes:
        sequence: what is asked, and what it got.
        request: the same, as the scheduler sees it.
        slot: its place in the state on the device.
        tabled: how many of its blocks the device knows, and since which preemption.
    """

    sequence: Asked
    request: Request
    slot: int
    tabled: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class Chosen:
    """The tokens that a part of a step chose, on their way to the host.

    Attributes:
        rows: whose they are, in the order of the step; a row with drafts has several.
        tokens: int64 `[rows]`, on the device.
    """

    rows: list[Row]
    tokens: Tensor
    _result: Tensor
    _logprobs: Logprobs | None
    _arrived: torch.cuda.Event | None

    def read(self) -> list[tuple[Row, int, TokenLogprob | None]]:
        """The tokens. Waits for the step.

        Raises:
            NumericError: the scores of a row are NaN or infinite.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, best = self._result[0].tolist(), self._result[1].view(torch.float32)[: len(self.rows)]
        finite = best.isfinite().tolist()
        if not all(finite):
            prompt = self.rows[finite.index(False)].sequence.index
            raise NumericError(
                f"prompt {prompt}: the model's scores hold NaN or infinity: the checkpoint is damaged, "
                "or its numbers do not fit the dtype (try dtype='bfloat16' or 'float32')"
            )
        logprobs = {} if self._logprobs is None else self._logprobs.read()
        return [(row, token, logprobs.get(at)) for at, (row, token) in enumerate(zip(self.rows, tokens, strict=True))]


class Runner:
    """Runs steps of a model.

    Args:
        model: in eval mode.
        cache: has memory for the blocks of all that is launched.
        step: the state of the sequences.
        rows: tokens chosen at once, those after drafts included.
        group: the processes that share the model; the first one's tokens count.

    Raises (all methods):
        DeviceError: the device's memory is full.
    """

    def __init__(self, model: Decoder, cache: KVCache, step: Step, rows: int, group: Group | None = None) -> None:
        self._model = model
        self._cache = cache
        self._step = step
        self._group = group
        self._device = step.last.device
        vocabulary = model.config.vocab_size
        self._sampler = Sampler(rows, vocabulary, self._device)
        self._arranged: list[Asked] = []
        # A sequence's first token is chosen apart from the others' next ones: its scores come from elsewhere.
        self._first_sampler = Sampler(rows, vocabulary, self._device)

    @torch.inference_mode()
    def launch(
        self,
        decoding: Sequence[Row],
        pieces: Sequence[tuple[Row, Piece]],
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> list[Chosen]:
        """Launch a step: one token for each row that decodes, and for each whose prompt is read to its end.

        Args:
            drafts: for each row that decodes, tokens that may follow its last one: it gets a token after each.
        """
        with self._computing(len(decoding) + len(pieces)):
            self._tell_blocks([*decoding, *(row for row, _ in pieces)])
            chosen = []
            if drafts is not None and decoding:
                chosen = [self._check(decoding, drafts)]
            elif decoding:
                chosen = [self._decode(list(decoding))]
            else:
                self._arrange([])
            return chosen + self._read_pieces(pieces)

    def _tell_blocks(self, rows: Sequence[Row]) -> None:
        """Complete the device's block tables."""
        told: tuple[list[int], list[int], list[int]] = ([], [], [])
        for row in rows:
            blocks = row.request.blocks
            if row.preemptions != row.request.preemptions:
                row.preemptions, row.tabled = row.request.preemptions, 0
            for index in range(row.tabled, len(blocks)):
                for numbers, number in zip(told, (row.slot, index, blocks[index]), strict=True):
                    numbers.append(number)
            row.tabled = len(blocks)
        if told[0]:
            slots, columns, blocks_told = self._sent(torch.tensor(told))
            self._step.blocks[slots, columns] = blocks_told.int()

    def _arrange(self, sequences: list[Asked]) -> None:
        # Where all choices need their own parameters alone, nothing changes but who there is.
        if sequences != self._arranged or not self._sampler.plain:
            self._sampler.arrange(sequences)
            self._arranged = sequences

    def _decode(self, rows: list[Row]) -> Chosen:
        if self._step.host_embedding:
            return self._check(rows, [()] * len(rows))
        self._arrange([row.sequence for row in rows])
        self._sampler.draw()
        scores = self._step.scores([row.slot for row in rows], max(row.request.computed for row in rows))
        chosen = self._choose(rows, self._sampler, scores)
        slots = self._sent(torch.tensor([row.slot for row in rows]))
        self._step.positions.index_add_(0, slots, torch.ones_like(slots, dtype=torch.int32))
        self._step.last.index_copy_(0, slots, chosen.tokens)
        return chosen

    def _check(self, rows: Sequence[Row], drafts: Sequence[Sequence[int]]) -> Chosen:
        """A token after each row's last one and after each of its drafts, all of which the host says."""
        self._sampler.arrange([row.sequence for row in rows], drafts)
        self._sampler.draw()
        each: list[Row] = []
        tokens: list[int] = []
        positions: list[int] = []
        stored: list[int] = []
        for row, own in zip(rows, drafts, strict=True):
            request, first = row.request, row.request.computed - 1
            each += [row] * (len(own) + 1)
            tokens += [request.ids[-1], *own]
            positions += range(first, first + len(own) + 1)
            stored += _slots(request.blocks, first, first + len(own) + 1)
        scores = self._step.scores_of(tokens, positions, stored, [row.slot for row in each])
        return self._choose(each, self._sampler, scores)

    def _read_pieces(self, pieces: Sequence[tuple[Row, Piece]]) -> list[Chosen]:
        if not pieces:
            return []
        # Those that begin their sequences come first: they are computed together.
        pieces = sorted(pieces, key=lambda found: found[1].start > 0)
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        stretches: list[Stretch] = []
        last_tokens: list[int] = []
        for row, piece in pieces:
            begin = len(ids)
            ids += row.request.ids[piece.start : piece.end]
            positions += range(piece.start, piece.end)
            slots += _slots(row.request.blocks, piece.start, piece.end)
            blocks = self._step.blocks[row.slot, : -(-piece.end // BLOCK)] if piece.start else None
            stretches.append(Stretch(begin, len(ids), piece.start, blocks))
            if piece.is_last:
                last_tokens.append(len(ids) - 1)
        tokens, places, stored = self._sent(torch.tensor([ids, positions, slots]))
        context = PieceAttention(self._model.config, self._step.table, self._cache, places.int(), stored, stretches)
        hidden = self._model.transform(self._model.embed(tokens[None]), None, context)[0]
        last = [(row, piece) for row, piece in pieces if piece.is_last]
        if not last:
            return []
        scores = self._model.scores(hidden[self._sent(torch.tensor(last_tokens))])
        rows = [row for row, _ in last]
        self._first_sampler.arrange([])  # nothing is kept from an earlier turn
        self._first_sampler.arrange([row.sequence for row in rows])
        self._first_sampler.draw()
        chosen = self._choose(rows, self._first_sampler, scores)
        slot = self._sent(torch.tensor([row.slot for row in rows]))
        ends = self._sent(torch.tensor([piece.end for _, piece in last], dtype=torch.int32))
        self._step.positions.index_copy_(0, slot, ends)
        self._step.last.index_copy_(0, slot, chosen.tokens)
        return [chosen]

    def _choose(self, rows: list[Row], sampler: Sampler, scores: Tensor) -> Chosen:
        tokens, best = sampler.choose(scores)
        if self._group is not None and self._group.world > 1:
            self._group.broadcast(tokens)
        sampler.saw(tokens)
        logprobs = sampler.logprobs()
        # One copy brings both to the host: the tokens, and below them the best scores.
        both = torch.zeros(2, len(rows), dtype=torch.int64, device=self._device)
        both[0] = tokens
        both[1].view(torch.float32)[: len(rows)] = best
        if self._device.type != "cuda":
            return Chosen(rows, tokens, both, logprobs, None)
        result = torch.empty(both.shape, dtype=torch.int64, pin_memory=True)
        result.copy_(both, non_blocking=True)
        found = None if logprobs is None else logprobs.to_host()
        arrived = torch.cuda.Event()
        arrived.record()
        return Chosen(rows, tokens, result, found, arrived)

    def _sent(self, numbers: Tensor) -> Tensor:
        """Numbers on the device, on a GPU without waiting for it."""
        if self._device.type != "cuda":
            return numbers
        return numbers.pin_memory().to(self._device, non_blocking=True)

    @contextmanager
    def _computing(self, sequences: int) -> Iterator[None]:
        """On the model's device, whichever is the current one; full memory becomes an error of ours."""
        try:
            with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                yield
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"{self._device}: out of memory with {sequences} sequences: lower max_num_seqs or max_model_len, "
                "quantize the model, or use another device"
            ) from error


def _slots(blocks: Sequence[int], start: int, end: int) -> Iterator[int]:
    """Where the tokens `start` to `end - 1` of a sequence are stored: block * BLOCK + offset within it."""
    return (blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(start, end))
