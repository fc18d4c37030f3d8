"""Launches steps: pieces of prompts, and the next token of each of many sequences.

A step is launched and read apart, so that on a GPU the next one can run while the host deals with the last one's
tokens: all that a step needs of the one before it stays on the device. Knows nothing of text or of when an answer ends.
"""

from collections import abc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.engine.attention import ChunkSpan, PrefillAttention
from warpbus.engine.blocks import BLOCK
from warpbus.engine.kv_cache import KVCache
from warpbus.engine.logits import to_device
from warpbus.engine.logprobs import Logprobs
from warpbus.engine.readback import Readback
from warpbus.engine.sampler import Sampler
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.scheduler import PromptChunk, Request
from warpbus.engine.sequence import Sequence, TokenLogprob
from warpbus.engine.step import FROM_DEVICE, StepExecutor, StepRows
from warpbus.errors import DeviceError
from warpbus.models import Decoder


@dataclass(eq=False)
class Row:
    """A sequence that runs.

    Attributes:
        sequence: what is asked, and what it got.
        request: the same, as the scheduler sees it.
        slot: its place in the state on the device.
        adapter: which LoRA it has, from 1 on; 0: none.
        tabled: how many of its blocks the device knows, and since which preemption.
    """

    sequence: Sequence
    request: Request
    slot: int
    adapter: int = 0
    tabled: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class SampledTokens:
    """The tokens that a part of a step chose, on their way to the host.

    Attributes:
        rows: whose they are, in the order of the step; a row with drafts has several.
        tokens: int64 `[rows]`, on the device.
    """

    rows: list[Row]
    tokens: Tensor
    _found: Readback
    _logprobs: Logprobs | None

    def read(self) -> list[tuple[Row, int | None, TokenLogprob | None]]:
        """The tokens; None for a row whose scores hold NaN or infinity. Waits for the step.

        Raises:
            DeviceError: a lent device had no memory for the step.
        """
        chosen, best, *rest = self._found.read()
        logprobs = {} if self._logprobs is None else self._logprobs.having(rest).read()
        found = zip(self.rows, chosen.tolist(), best.isfinite().tolist(), strict=True)
        return [(row, token if finite else None, logprobs.get(at)) for at, (row, token, finite) in enumerate(found)]


class Runner:
    """Runs steps of a model.

    Args:
        model: in eval mode.
        cache: has memory for the blocks of all that is launched.
        step: the state of the sequences.
        rows: tokens chosen at once, those after drafts included.

    Raises (all methods):
        DeviceError: the device's memory is full.
    """

    def __init__(self, model: Decoder, cache: KVCache, step: StepExecutor, rows: int) -> None:
        self._model = model
        self._cache = cache
        self._step = step
        self._device = step.last.device
        vocabulary = model.config.vocab_size
        self._sampler = Sampler(rows, vocabulary, self._device)
        self._arranged: list[Sequence] | None = []
        self._group = None if model.group is None or model.group.world == 1 else model.group
        self._alike = self._group is None or self._group.alike()

    @torch.inference_mode()
    def launch(
        self,
        decoding: abc.Sequence[Row],
        pieces: abc.Sequence[tuple[Row, PromptChunk]],
        drafts: abc.Sequence[abc.Sequence[int]] | None = None,
    ) -> SampledTokens:
        """Launch a step: one token for each row that decodes, and for each whose prompt is read to its end.

        Args:
            drafts: for each row that decodes, tokens that may follow its last one: it gets a token after each. Then
                the host knows all last tokens.
        """
        with self._computing(len(decoding) + len(pieces)):
            self._tell([*decoding, *(row for row, _ in pieces)])
            self._complete_prefixes(pieces)
            guesses = drafts if drafts is not None else [()] * len(decoding)
            scores = self._scores(decoding, guesses, pieces, drafts is not None or self._step.host_embedding)
            ended = [(row, piece.end) for row, piece in pieces if piece.is_last]
            rows = [row for row, own in zip(decoding, guesses, strict=True) for _ in range(len(own) + 1)]
            rows += [row for row, _ in ended]
            self._arrange(
                [*decoding, *(row for row, _ in ended)], None if drafts is None else [*drafts, *[()] * len(ended)]
            )
            chosen = self._choose(rows, scores)
            if rows and drafts is None:
                positions = [*(row.request.computed for row in decoding), *(end for _, end in ended)]
                self._step.advance([row.slot for row in rows], chosen.tokens, positions if pieces else None)
            return chosen

    def restart(self) -> None:
        """Nobody knows how far the steps that were launched came."""
        self._arranged = None

    def _tell(self, rows: abc.Sequence[Row]) -> None:
        """Complete the device's block tables, and what it knows of adapters."""
        told: tuple[list[int], list[int], list[int]] = ([], [], [])
        for row in rows:
            self._step.assign(row.slot, row.adapter)
            if self._step.placing is not None:
                self._step.placing.assign(row.slot, row.request.prompt, row.request.given)
            blocks = row.request.blocks
            if row.preemptions != row.request.preemptions:
                row.preemptions, row.tabled = row.request.preemptions, 0
            for index in range(row.tabled, len(blocks)):
                for numbers, number in zip(told, (row.slot, index, blocks[index]), strict=True):
                    numbers.append(number)
            row.tabled = len(blocks)
        if told[0]:
            slots, columns, blocks_told = to_device(told, torch.int64, self._device)
            self._step.blocks[slots, columns] = blocks_told.int()

    def _complete_prefixes(self, pieces: abc.Sequence[tuple[Row, PromptChunk]]) -> None:
        """Where a prefix does not fill its last block, the first tokens go into a copy of that."""
        for row, piece in pieces:
            request = row.request
            if piece.start == 0 and request.lead:
                self._cache.copy(request.prefix[-1], request.blocks[request.lent])

    def _arrange(self, rows: list[Row], drafts: abc.Sequence[abc.Sequence[int]] | None) -> None:
        sequences = [row.sequence for row in rows]
        if self._arranged is None:
            self._sampler.arrange([])  # nothing that it counted is kept
        # Where all choices need their own parameters alone, nothing changes but who there is.
        if drafts is not None or sequences != self._arranged or not self._sampler.plain:
            self._sampler.arrange(sequences, drafts)
            self._arranged = sequences

    def _scores(
        self,
        decoding: abc.Sequence[Row],
        guesses: abc.Sequence[abc.Sequence[int]],
        pieces: abc.Sequence[tuple[Row, PromptChunk]],
        known: bool,
    ) -> Tensor | None:
        """Scores after the last token of each row and each of its guesses, and after each prompt that ends.

        Args:
            known: the host knows all last tokens.
        """
        step = self._step
        count = sum(len(own) + 1 for own in guesses) + sum(piece.end - piece.start for _, piece in pieces)
        longest = max(row.request.places for row in (*decoding, *(row for row, _ in pieces)))
        if pieces and step.takes(count, longest):
            return step.scores_of(_together(decoding, guesses, pieces, known), prompts=True)
        parts: list[Tensor] = []
        if decoding and known:
            parts.append(step.scores_of(_together(decoding, guesses, (), known), prompts=False))
        elif decoding:
            parts.append(step.scores([row.slot for row in decoding], max(row.request.places for row in decoding)))
        if pieces:
            parts += self._prompt_scores(pieces)
        return torch.cat(parts) if len(parts) > 1 else next(iter(parts), None)

    def _prompt_scores(self, pieces: abc.Sequence[tuple[Row, PromptChunk]]) -> list[Tensor]:
        """Read pieces of prompts without a graph; scores after those that end, if there are any."""
        rows = _together((), (), pieces, known=True)
        spans: list[ChunkSpan] = []
        begin = 0
        for row, piece in pieces:
            end = begin + piece.end - piece.start
            request, blocks = row.request, None
            if piece.start or request.given:
                blocks = self._step.blocks[row.slot, : -(-(request.given + piece.end) // BLOCK)]
            spans.append(ChunkSpan(begin, end, piece.start, blocks, request.prompt, request.given))
            begin = end
        tokens, positions, stored = to_device([rows.tokens, rows.positions, rows.stored], torch.int64, self._device)
        turns = self._step.turns(positions.int(), rows.slots)
        context = PrefillAttention(self._model.config, turns, self._cache, stored, spans)
        with self._step.adapting(rows.slots):
            hidden = self._model.transform(self._model.embed(tokens[None]), None, context)[0]
        if not rows.chosen:
            return []
        return [self._model.scores(hidden.index_select(0, to_device(rows.chosen, torch.int64, self._device)))]

    def _choose(self, rows: list[Row], scores: Tensor | None) -> SampledTokens:
        if scores is None:
            tokens, best = torch.zeros(0, dtype=torch.int64, device=self._device), torch.zeros(0, device=self._device)
            logprobs = None
        else:
            self._sampler.draw()
            tokens, best = self._sampler.choose(scores)
            if self._group is not None and not all(self._agreed(row.sequence.params) for row in rows):
                self._group.broadcast(tokens)
            self._sampler.saw(tokens)
            logprobs = self._sampler.logprobs()
        found = Readback([tokens, best, *(() if logprobs is None else logprobs.tensors)])
        return SampledTokens(rows, tokens, found, logprobs)

    def _agreed(self, params: SamplingParams) -> bool:
        """All processes that share the model choose the same token: their scores are gathered, so the same bits."""
        return params.greedy or (self._alike and params.seed is not None)

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


def _together(
    decoding: abc.Sequence[Row],
    guesses: abc.Sequence[abc.Sequence[int]],
    pieces: abc.Sequence[tuple[Row, PromptChunk]],
    known: bool,
) -> StepRows:
    """The rows of a step: last tokens with the guesses that follow them, then pieces of prompts."""
    rows = StepRows()
    for row, own in zip(decoding, guesses, strict=True):
        request, first = row.request, row.request.computed - 1
        rows.chosen += range(len(rows.tokens), len(rows.tokens) + len(own) + 1)
        rows.tokens += [request.ids[-1] if known else FROM_DEVICE, *own]
        _append(rows, row, first, first + len(own) + 1)
    for row, piece in pieces:
        rows.tokens += row.request.ids[piece.start : piece.end]
        _append(rows, row, piece.start, piece.end)
        if piece.is_last:
            rows.chosen.append(len(rows.tokens) - 1)
    return rows


def _append(rows: StepRows, row: Row, start: int, end: int) -> None:
    """Say where the tokens `start` to `end - 1` of a sequence stand, and where they are stored."""
    blocks, given = row.request.blocks, row.request.given
    rows.positions += range(start, end)
    places = range(given + start, given + end)
    rows.stored += [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in places]
    rows.places = max(rows.places, places.stop)
    rows.slots += [row.slot] * (end - start)
