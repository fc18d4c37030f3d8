"""POST /v1/completions: continues texts or token ids."""

from __future__ import annotations

from collections import abc

from warpbus.engine import TextPiece
from warpbus.models.tokenizers import Tokenizer, encode_prompt
from warpbus.server.chat import LOWEST, token_text
from warpbus.server.chunks import ChunkForm, UsageStyle
from warpbus.server.registry import Model
from warpbus.server.responses import Json
from warpbus.server.schema import CompletionRequest

DEFAULT_TOKENS = 16
"""The default of `max_tokens`, as in OpenAI's API."""


def prompts_of(body: CompletionRequest, tokenizer: Tokenizer) -> list[list[int]]:
    """The prompts as token ids; texts get no special tokens except for the tokenizer's `prompt_suffix`."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [encode_prompt(tokenizer, prompt)]
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [
        encode_prompt(tokenizer, one) if isinstance(one, str) else list(one)
        for one in prompt
        if not isinstance(one, int)
    ]


class TextForm(ChunkForm):
    """The format of completions.

    Args:
        model: which answers.
        tokenizer: of the model, for the texts of tokens.
        echoes: the text before each answer's text: its prompt, or nothing.
        logprobs: are wanted.
        style: which chunks have the usage.
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer, echoes: abc.Sequence[str], *, logprobs: bool, style: UsageStyle
    ) -> None:
        super().__init__("cmpl", model.name, ("text_completion", "text_completion"), style)
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._logprobs = logprobs
        self._offsets = [0] * len(echoes)

    def first_choices(self) -> list[Json]:
        """See `ChunkForm.first_choices`: the prompts, if they are echoed."""
        return [self._choice(index, text, []) for index, text in enumerate(self._echoes) if text]

    def choices(self, index: int, piece: TextPiece) -> list[Json]:
        """See `ChunkForm.choices`."""
        if not piece.text and not piece.logprobs and piece.finish_reason is None:
            return []
        return [self._choice(index, piece.text, [piece])]

    def choice(self, index: int, pieces: abc.Sequence[TextPiece]) -> Json:
        """See `ChunkForm.choice`."""
        return self._choice(index, self._echoes[index] + "".join(piece.text for piece in pieces), pieces)

    def _choice(self, index: int, text: str, pieces: abc.Sequence[TextPiece]) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": self._scores(index, pieces) if self._logprobs else None,
            "finish_reason": pieces[-1].finish_reason if pieces else None,
        }

    def _scores(self, index: int, pieces: abc.Sequence[TextPiece]) -> Json:
        found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in [one for piece in pieces for one in piece.logprobs or ()]:
            text, _ = token_text(self._tokenizer, one.token)
            found["tokens"].append(text)
            found["token_logprobs"].append(max(one.logprob, LOWEST))
            found["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(text)
            likely: dict[str, float] = {}
            # Different tokens may have the same text, for instance parts of characters: the likeliest is shown.
            for token, logprob in one.top:
                likely.setdefault(token_text(self._tokenizer, token)[0], max(logprob, LOWEST))
            found["top_logprobs"].append(likely)
        return found
