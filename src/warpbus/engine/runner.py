"""Launches the steps that the scheduler plans: decodes running sequences and prefills chunks of prompts.

Launching a step and reading its tokens are separate, so that on a GPU the next step runs while the host processes the
tokens of the last one: all that a step needs from the previous one stays on the device. Knows nothing of text or of
when an answer ends.
"""

from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from warpbus.engine.attention import PrefillAttention
from warpbus.engine.blocks import BLOCK
from warpbus.engine.expert_placement import ExpertPlacement, offloading_layers
from warpbus.engine.joined_spans import ChunkSpan
from warpbus.engine.kv_cache import KVCache
from warpbus.engine.logits import to_device
from warpbus.engine.logprobs import Logprobs, PromptLogprobs
from warpbus.engine.mtp import ComputedRows, draft, predict
from warpbus.engine.pooling import PooledPrompt
from warpbus.engine.readback import Readback
from warpbus.engine.sampler import Sampler
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.scheduler import PromptChunk
from warpbus.engine.sequence import Sequence, TokenLogprob
from warpbus.engine.step import FROM_DEVICE, StepExecutor, StepRows
from warpbus.errors import DeviceError
from warpbus.models import Decoder

# Rows of logits that are computed at once for the log probabilities of prompts.
_MOST_SCORE_ROWS = 64


@dataclass(frozen=True)
class SampledTokens:
    """The tokens that a step sampled, on their way to the host.

    Attributes:
        sequences: of each token, in the order of the step; a sequence with n drafts occurs n + 1 times.
        tokens: int64 `[tokens]`, on the device.
    """

    sequences: list[Sequence]
    tokens: Tensor
    _readback: Readback
    _logprobs: Logprobs | None
    _prompts: tuple[PromptLogprobs | PooledPrompt, ...] = ()
    _drafts: bool = False  # the last tensor of the readback has the draft tokens of each sequence

    def read(self) -> list[tuple[Sequence, int | None, TokenLogprob | None]]:
        """The tokens; None where the logits hold NaN or infinity. Waits for the step.

        The sequences get the log probabilities and vectors of their prompts, and the draft tokens of multi-token
        prediction, `RunnerState.drafts`.

        Raises:
            DeviceError: a remote device had no memory for the step.
        """
        for prompt in self._prompts:
            prompt.read()
        chosen, best, *rest = self._readback.read()
        if self._drafts:
            for sequence, drafts in zip(dict.fromkeys(self.sequences), rest.pop().tolist(), strict=True):
                sequence.runner_state.drafts = drafts
        logprobs = {} if self._logprobs is None else self._logprobs.with_tensors(rest).read()
        found = zip(self.sequences, chosen.tolist(), best.isfinite().tolist(), strict=True)
        return [
            (sequence, token if finite else None, logprobs.get(at))
            for at, (sequence, token, finite) in enumerate(found)
        ]


class Runner:
    """Runs the steps of a model. Each sequence has a slot in its `RunnerState`.

    Args:
        model: in eval mode.
        cache: its memory is committed for all blocks of launched sequences.
        step: the state of the sequences on the device.
        rows: the most tokens sampled in a step, those after drafts included.
        mtp: the layer of multi-token prediction computes each step, too.

    Attributes:
        experts: places the experts that do not all fit on the GPU; None if all do.

    Raises (all methods):
        DeviceError: the device's memory is full.
    """

    def __init__(self, model: Decoder, cache: KVCache, step: StepExecutor, rows: int, *, mtp: bool = False) -> None:
        self._model = model
        self._mtp = mtp
        self._cache = cache
        self._step = step
        self._device = step.last.device
        vocabulary = model.config.vocab_size
        self.experts = ExpertPlacement(model) if offloading_layers(model) else None
        self._sampler = Sampler(rows, vocabulary, self._device)
        self._arranged: list[Sequence] | None = []
        self._computed: list[ComputedRows] = []  # by the step that is launched
        self._prompts: list[PromptLogprobs | PooledPrompt] = []  # of the step that is launched
        self._score_rows = min(rows, _MOST_SCORE_ROWS)
        self._outdated = False  # the last tokens on the device are those of a step before the last one
        self._group = None if model.group is None or model.group.world == 1 else model.group
        self._same_devices = self._group is None or self._group.alike()

    @torch.inference_mode()
    def launch(
        self,
        decoding: abc.Sequence[Sequence],
        chunks: abc.Sequence[PromptChunk],
        drafts: abc.Sequence[abc.Sequence[int]] | None = None,
        propose: int = 0,
    ) -> SampledTokens:
        """Launch a step; it samples a token for each decoding sequence and for each prompt's last chunk.

        Args:
            drafts: for each decoding sequence the draft tokens to verify: a token is sampled after each of them too.
                The host then knows the last token of every sequence.
            propose: how many tokens per sequence multi-token prediction drafts for the next step. If it does, the host
                knows the last tokens (`drafts`).
        """
        with self._computing(len(decoding) + len(chunks)):
            if self.experts is not None:
                self.experts.step()
            self._update_tables([*decoding, *(chunk.sequence for chunk in chunks)])
            self._copy_prefix_tails(chunks)
            if self._outdated and drafts is None:
                states = [(each.runner_state.slot, each.scheduler_state) for each in decoding]
                self._step.load([(slot, state.ids[-1], state.computed - 1) for slot, state in states])
            self._outdated = drafts is not None
            guesses = drafts if drafts is not None else [()] * len(decoding)
            scores = self._scores(decoding, guesses, chunks, drafts is not None or self._step.host_embedding)
            ending = [chunk for chunk in chunks if chunk.is_last]
            sampling = [*decoding, *(chunk.sequence for chunk in ending)]
            verified = [*guesses, *[()] * len(ending)]  # the drafts of each
            self._arrange(sampling, None if drafts is None else verified)
            rows = [sequence for sequence, own in zip(sampling, verified, strict=True) for _ in range(len(own) + 1)]
            sampled = self._sample(rows, scores, sampling, verified, propose)
            if rows and drafts is None:
                positions = [each.scheduler_state.computed for each in decoding] + [chunk.end for chunk in ending]
                slots = [sequence.runner_state.slot for sequence in rows]
                self._step.advance(slots, sampled.tokens, positions if chunks else None)
            return sampled

    def restart(self) -> None:
        """Forget launched steps, whose results are unknown after an error."""
        self._arranged = None
        self._computed.clear()
        self._prompts.clear()

    def _update_tables(self, sequences: abc.Sequence[Sequence]) -> None:
        """Append new blocks to the block tables on the device, and set adapters and prefix lengths of new sequences."""
        entries: tuple[list[int], list[int], list[int]] = ([], [], [])  # slot, index in the table, block
        for sequence in sequences:
            state, scheduled = sequence.runner_state, sequence.scheduler_state
            self._step.assign(state.slot, state.adapter)
            if self._step.positioning is not None:
                self._step.positioning.assign(state.slot, scheduled.bidirectional, scheduled.prefix_length)
            if state.preemptions != scheduled.preemptions:
                state.preemptions, state.table_length = scheduled.preemptions, 0
            for index in range(state.table_length, len(scheduled.blocks)):
                for column, value in zip(entries, (state.slot, index, scheduled.blocks[index]), strict=True):
                    column.append(value)
            state.table_length = len(scheduled.blocks)
        if entries[0]:
            slots, indices, blocks = to_device(entries, torch.int64, self._device)
            self._step.blocks[slots, indices] = blocks.int()

    def _copy_prefix_tails(self, chunks: abc.Sequence[PromptChunk]) -> None:
        """Copy the last block of a prefix that ends within it to the first own block of a new sequence."""
        for chunk in chunks:
            state = chunk.sequence.scheduler_state
            if chunk.start == 0 and state.prefix_tail:
                self._cache.copy(state.prefix[-1], state.blocks[state.full_prefix_blocks])

    def _arrange(self, sequences: list[Sequence], drafts: abc.Sequence[abc.Sequence[int]] | None) -> None:
        if self._arranged is None:
            self._sampler.arrange([])  # drops its token counts
        # If the sampler needs only static parameters, it changes only with the set of sequences.
        if drafts is not None or sequences != self._arranged or not self._sampler.plain:
            self._sampler.arrange(sequences, drafts)
            self._arranged = sequences if drafts is None else []

    def _scores(
        self,
        decoding: abc.Sequence[Sequence],
        guesses: abc.Sequence[abc.Sequence[int]],
        chunks: abc.Sequence[PromptChunk],
        known: bool,
    ) -> Tensor | None:
        """The logits after each last token, each draft, and each prompt that ends, `[rows, vocabulary]`.

        Args:
            known: the host knows all last tokens.
        """
        step = self._step
        count = sum(len(own) + 1 for own in guesses) + sum(chunk.end - chunk.start for chunk in chunks)
        longest = max(
            sequence.scheduler_state.cache_length for sequence in (*decoding, *(chunk.sequence for chunk in chunks))
        )
        if chunks and step.fits_graph(count, longest) and not any(map(_wants_states, chunks)):
            return self._scores_of(_step_rows(decoding, guesses, chunks, known), prompts=True)
        parts: list[Tensor] = []
        if decoding and known:
            parts.append(self._scores_of(_step_rows(decoding, guesses, (), known), prompts=False))
        elif decoding:
            slots = [sequence.runner_state.slot for sequence in decoding]
            parts.append(step.scores(slots, max(each.scheduler_state.cache_length for each in decoding)))
            self._keep(range(len(slots)), None, step.predict)
        if chunks:
            parts += self._prefill(chunks)
        return torch.cat(parts) if len(parts) > 1 else next(iter(parts), None)

    def _scores_of(self, rows: StepRows, *, prompts: bool) -> Tensor:
        """As `StepExecutor.scores_of`."""
        self._keep(rows.sampled, rows.following, self._step.predict)
        return self._step.scores_of(rows, prompts=prompts)

    def _prefill(self, chunks: abc.Sequence[PromptChunk]) -> list[Tensor]:
        """Prefill chunks of prompts without a graph; the logits after the last chunks, if there are any."""
        rows = _step_rows((), (), chunks, known=True)
        spans: list[ChunkSpan] = []
        begin = 0
        for chunk in chunks:
            end = begin + chunk.end - chunk.start
            state, blocks = chunk.sequence.scheduler_state, None
            if chunk.start or state.prefix_length:
                table = self._step.blocks[chunk.sequence.runner_state.slot]
                blocks = table[: -(-(state.prefix_length + chunk.end) // BLOCK)]
            spans.append(ChunkSpan(begin, end, chunk.start, blocks, state.bidirectional, state.prefix_length))
            begin = end
        tokens, positions, slot_mapping = to_device(
            [rows.tokens, rows.positions, rows.slot_mapping], torch.int64, self._device
        )
        angles = self._step.rope_angles(positions.int(), rows.slots)
        context = PrefillAttention(self._model.config, angles, self._cache, slot_mapping, spans)
        hidden = self._step.transform(tokens, context, rows.slots)
        self._keep(rows.sampled, rows.following, partial(self._predict_prompts, hidden, context))
        for chunk, span in zip(chunks, spans, strict=True):
            if _wants_logprobs(chunk):
                own = hidden[span.begin : span.end]
                found = PromptLogprobs.of(self._model.scores, own, chunk.sequence, chunk.start, self._score_rows)
                self._prompts += [] if found is None else [found]
            if _wants_vector(chunk):
                norm, scores = self._model.final_norm, self._model.scores
                pooled = PooledPrompt.of(hidden[span.begin : span.end], chunk, final_norm=norm, scores=scores)
                self._prompts += [] if pooled is None else [pooled]
        if not rows.sampled:
            return []
        return [self._model.scores(hidden.index_select(0, to_device(rows.sampled, torch.int64, self._device)))]

    def _keep(
        self, sampled: abc.Sequence[int], following: abc.Sequence[int] | None, compute: Callable[[Tensor], Tensor]
    ) -> None:
        """Keep computed rows for multi-token prediction; arguments as of `ComputedRows`."""
        if self._mtp:
            self._computed.append(ComputedRows(sampled, following, compute))

    def _predict_prompts(self, hidden: Tensor, context: PrefillAttention, following: Tensor) -> Tensor:
        """Multi-token prediction for the rows of `_prefill`, which gave the states `hidden`; see `ComputedRows`."""
        model = self._model
        return model.predict(following[None], model.final_norm(hidden)[None], context=context)[0]

    def _sample(
        self,
        rows: list[Sequence],
        scores: Tensor | None,
        sequences: abc.Sequence[Sequence],
        drafts: abc.Sequence[abc.Sequence[int]],
        propose: int,
    ) -> SampledTokens:
        """Sample the tokens of rows, compute the layer of multi-token prediction, and propose draft tokens.

        Args:
            sequences, drafts: to which the rows belong: one for each sequence, and one for each of its drafts.
        """
        if scores is None:
            tokens, best = torch.zeros(0, dtype=torch.int64, device=self._device), torch.zeros(0, device=self._device)
            logprobs = None
        else:
            self._sampler.draw()
            tokens, best = self._sampler.choose(scores)
            if self._group is not None and not all(self._deterministic(sequence.params) for sequence in rows):
                self._group.broadcast(tokens)
            self._sampler.saw(tokens)
            logprobs = self._sampler.logprobs()
        results = [tokens, best, *(() if logprobs is None else logprobs.tensors)]
        hidden = predict(self._computed, tokens) if propose else None
        if hidden is not None:
            results.append(draft(self._step, hidden, tokens, sequences, drafts, propose))
        readback = Readback(results)
        if self._computed and not propose:  # nothing waits for it
            predict(self._computed, tokens)
        self._computed.clear()
        prompts = tuple(self._prompts)
        self._prompts.clear()
        return SampledTokens(rows, tokens, readback, logprobs, prompts, hidden is not None)

    def _deterministic(self, params: SamplingParams) -> bool:
        """All processes that share the model sample the same token: they have gathered the same logits, bit by bit."""
        return params.greedy or (self._same_devices and params.seed is not None)

    @contextmanager
    def _computing(self, sequences: int) -> Iterator[None]:
        """Make the model's device the current one, and turn torch's out-of-memory error into a `DeviceError`."""
        try:
            with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                yield
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"{self._device}: out of memory with {sequences} sequences: lower max_num_seqs or max_model_len, "
                "quantize the model, or use another device"
            ) from error


def _step_rows(
    decoding: abc.Sequence[Sequence],
    guesses: abc.Sequence[abc.Sequence[int]],
    chunks: abc.Sequence[PromptChunk],
    known: bool,
) -> StepRows:
    """The rows of a step: last tokens, each followed by its drafts, then chunks of prompts."""
    rows = StepRows()
    for sequence, own in zip(decoding, guesses, strict=True):
        state = sequence.scheduler_state
        first = state.computed - 1
        rows.sampled += range(len(rows.tokens), len(rows.tokens) + len(own) + 1)
        rows.tokens += [state.ids[-1] if known else FROM_DEVICE, *own]
        rows.following += [FROM_DEVICE] * (len(own) + 1)
        _append_positions(rows, sequence, first, first + len(own) + 1)
    for chunk in chunks:
        rows.tokens += chunk.sequence.scheduler_state.ids[chunk.start : chunk.end]
        rows.following += chunk.sequence.scheduler_state.ids[chunk.start + 1 : chunk.end + 1]
        rows.following += [FROM_DEVICE] * (len(rows.tokens) - len(rows.following))
        _append_positions(rows, chunk.sequence, chunk.start, chunk.end)
        if chunk.is_last:
            rows.sampled.append(len(rows.tokens) - 1)
    return rows


def _wants_logprobs(chunk: PromptChunk) -> bool:
    """The log probabilities of the prompt are asked for, and not known already."""
    return chunk.sequence.prompt_logprobs is not None and not chunk.sequence.token_ids


def _wants_vector(chunk: PromptChunk) -> bool:
    """The vector of the prompt is asked for, and not known already."""
    return chunk.sequence.params.pooling is not None and not chunk.sequence.token_ids


def _wants_states(chunk: PromptChunk) -> bool:
    """More than the logits after the prompt is asked for."""
    return _wants_logprobs(chunk) or _wants_vector(chunk)


def _append_positions(rows: StepRows, sequence: Sequence, start: int, end: int) -> None:
    """Append the positions and the slot mapping of the tokens `start` to `end - 1` of a sequence."""
    state = sequence.scheduler_state
    cached = range(state.prefix_length + start, state.prefix_length + end)
    rows.positions += range(start, end)
    rows.slot_mapping += [state.blocks[at // BLOCK] * BLOCK + at % BLOCK for at in cached]
    rows.cache_length = max(rows.cache_length, cached.stop)
    rows.slots += [sequence.runner_state.slot] * (end - start)
