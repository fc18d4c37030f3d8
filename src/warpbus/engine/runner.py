"""Model and cache to scores. Knows nothing of requests, text or sampling."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from warpbus.engine.kv_cache import KVCache, PromptAttention, StepAttention
from warpbus.errors import DeviceError
from warpbus.models import Decoder

PREFILL_TOKENS = 4096


class Runner:
    """Runs one batch through the model: the prompts first, then token by token.

    Args:
        model: in eval mode, on `device`.
        prompts: token ids of each row, none empty.
        limit: the longest that a row will get, in tokens.

    Raises (all methods):
        DeviceError: the device's memory is full.
    """

    def __init__(
        self, model: Decoder, prompts: Sequence[list[int]], limit: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._model = model
        self._device = device
        self._prompts = prompts
        self.lengths = [len(prompt) for prompt in prompts]
        self.cache = KVCache(model.config, len(prompts), limit, device=device, dtype=dtype)

    @torch.inference_mode()
    def prefill(self) -> Tensor:
        """Scores of each row's first new token, `[batch, vocabulary]`.

        Long prompts are read in pieces of at most `PREFILL_TOKENS` tokens, so that activations stay small.
        """
        longest = max(self.lengths)
        piece = max(1, PREFILL_TOKENS // len(self._prompts))
        padded = torch.zeros((len(self._prompts), longest), dtype=torch.long)
        for row, prompt in enumerate(self._prompts):
            padded[row, : len(prompt)] = torch.tensor(prompt)
        padded = padded.to(self._device)
        last: list[Tensor | None] = [None] * len(self._prompts)
        with self._memory_errors():
            self.cache.reserve(longest + 1)
            for start in range(0, longest, piece):
                tokens = padded[:, start : start + piece]
                end = start + tokens.shape[1]
                positions = torch.arange(start, end, device=self._device).expand_as(tokens)
                hidden = self._model.hidden(tokens, positions, PromptAttention(self.cache, start, end - start))
                for row, length in enumerate(self.lengths):
                    if start < length <= end:
                        last[row] = hidden[row, length - 1 - start]
            return self._model.logits(torch.stack([state for state in last if state is not None]))

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to each row; scores of the next, `[batch, vocabulary]`."""
        with self._memory_errors():
            self.cache.reserve(max(self.lengths) + 1)
            inputs = torch.tensor((tokens, self.lengths), device=self._device)[:, :, None]
            hidden = self._model.hidden(inputs[0], inputs[1], StepAttention(self.cache, self.lengths))
            self.lengths = [length + 1 for length in self.lengths]
            return self._model.logits(hidden[:, 0])

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        self.lengths = [self.lengths[row] for row in rows]
        self.cache.keep(rows)

    @contextmanager
    def _memory_errors(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"{self._device}: out of memory with {len(self.lengths)} sequences of up to {max(self.lengths):,} "
                "tokens: lower max_num_seqs or max_model_len, quantize the model, or use another device"
            ) from error
