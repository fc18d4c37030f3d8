"""One batch: its prompts first, then token by token. Knows nothing of text or of when an answer ends."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from warpbus.engine.attention import FusedPrompt, PromptAttention
from warpbus.engine.kv_cache import CacheRows, KVCache
from warpbus.engine.sequence import Sequence as Request
from warpbus.engine.step import Outcome, Step
from warpbus.errors import DeviceError, NumericError
from warpbus.models import Decoder
from warpbus.models.layers import FusedAttention

PREFILL_TOKENS = 4096


class Runner:
    """Runs one batch through the model.

    A step is launched and its tokens are read apart, so that on a GPU the next step can run while the host deals with
    the tokens of the last:

        runner.start()
        while ...:
            if runner.ahead: runner.launch()
            tokens = runner.read()
            if not runner.ahead: runner.launch()

    Args:
        model: in eval mode.
        step: has room for the batch's rows, and is not used by another batch.
        cache: has as many rows, or more, and room for each sequence.
        sequences: what is to be generated; only their prompts, parameters and random numbers are used.
        prefill_tokens: long prompts are read in pieces of at most so many tokens, all rows together, so that
            activations stay small.

    Attributes:
        ahead: a step can be launched before the tokens of the last are read.
        lengths: how many tokens of each row the cache holds.

    Raises (all methods):
        DeviceError: the device's memory is full.
    """

    def __init__(
        self,
        model: Decoder,
        step: Step,
        cache: KVCache | CacheRows,
        sequences: Sequence[Request],
        *,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        self._model = model
        self._step = step
        self._cache = cache
        self._sequences = list(sequences)
        self._prefill_tokens = prefill_tokens
        self._launched: deque[Outcome] = deque()
        self._device = step.tokens.device
        self._last_tokens: list[int] = []
        self.ahead = self._device.type == "cuda" and not step.host_embedding
        self.lengths = [len(sequence.prompt) for sequence in sequences]

    @torch.inference_mode()
    def start(self) -> None:
        """Read the prompts and choose each row's first token."""
        self._step.begin(self.lengths)
        self._step.sampler.begin(self._sequences)
        logits = self.prefill()
        with self._computing():
            self._step.sampler.draw()
            self._step.finish(logits)
            self._launched.append(self._step.outcome(len(self.lengths)))

    @torch.inference_mode()
    def prefill(self) -> Tensor:
        """Read the prompts: scores of each row's first token, `[batch, vocabulary]`."""
        longest = max(self.lengths)
        piece = max(1, self._prefill_tokens // len(self.lengths))
        padded = torch.zeros((len(self.lengths), longest), dtype=torch.long)
        for row, sequence in enumerate(self._sequences):
            padded[row, : len(sequence.prompt)] = torch.tensor(sequence.prompt)
        padded = padded.to(self._device)
        last: list[Tensor | None] = [None] * len(self.lengths)
        with self._computing():
            if isinstance(self._cache, KVCache):
                self._cache.reserve(longest + 1)
            for start in range(0, longest, piece):
                tokens = padded[:, start : start + piece]
                end = start + tokens.shape[1]
                positions = torch.arange(start, end, device=self._device).expand_as(tokens)
                hidden = self._model.transform(self._model.embed(tokens), positions, self._prompt(start, end))
                for row, length in enumerate(self.lengths):
                    if start < length <= end:
                        last[row] = hidden[row, length - 1 - start].clone()
                del hidden
            return self._model.scores(torch.stack([state for state in last if state is not None]))

    @torch.inference_mode()
    def launch(self) -> None:
        """Append each row's last token and choose the next one."""
        with self._computing():
            if isinstance(self._cache, KVCache):
                self._cache.reserve(max(self.lengths) + 1)
            if self._step.host_embedding:
                self._step.embed(self._last_tokens)
            self._step.sampler.draw()
            self._step.run(self._cache, self.lengths)
            self._launched.append(self._step.outcome(len(self.lengths)))
        self.lengths = [length + 1 for length in self.lengths]

    def read(self) -> list[int]:
        """The tokens of the earliest step that has not been read.

        Raises:
            NumericError: the scores of a row are NaN or infinite.
        """
        tokens, finite = self._launched.popleft().read()
        if not all(finite):
            prompt = self._sequences[finite.index(False)].index
            raise NumericError(
                f"prompt {prompt}: the model's scores hold NaN or infinity: the checkpoint is damaged, "
                "or its numbers do not fit the dtype (try dtype='bfloat16' or 'float32')"
            )
        self._last_tokens = tokens
        return tokens

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, in ascending order, also from steps that have been launched."""
        self._sequences = [self._sequences[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
        self._last_tokens = [self._last_tokens[row] for row in rows]
        for outcome in self._launched:
            outcome.rows[:] = [outcome.rows[row] for row in rows]
        self._step.keep(rows)
        self._step.sampler.keep(rows)
        self._cache.keep(rows)

    def _prompt(self, start: int, end: int) -> PromptAttention | FusedAttention:
        if isinstance(self._cache, KVCache):
            return PromptAttention(self._cache, start, end - start)
        return FusedPrompt(self._model.config, self._step.table, self._cache, start, end - start)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """On the model's device, whichever is the current one; full memory becomes an error of ours."""
        try:
            with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                yield
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"{self._device}: out of memory with {len(self.lengths)} sequences of up to {max(self.lengths):,} "
                "tokens: lower max_num_seqs or max_model_len, quantize the model, or use another device"
            ) from error
