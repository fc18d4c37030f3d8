"""POST /v1/completions: continues texts or token ids."""

from __future__ import annotations

from collections import abc

from warpbus.engine import TextPiece, TokenLogprob
from warpbus.models.tokenizers import Tokenizer, encode_prompt
from warpbus.server.chunks import ChunkForm, UsageStyle
from warpbus.server.registry import Model
from warpbus.server.responses import Json
from warpbus.server.schema import CompletionRequest
from warpbus.server.token_scores import TextScores, prompt_scores

DEFAULT_TOKENS = 16
"""The default of `max_tokens`, as in OpenAI's API."""


def prompts_of(body: CompletionRequest, tokenizer: Tokenizer) -> list[list[int]]:
    """The prompts as token ids; texts get the tokenizer's special tokens, unless the request wants none."""
    prompt, added = body.prompt, body.add_special_tokens is not False
    if isinstance(prompt, str):
        return [encode_prompt(tokenizer, prompt, add_special_tokens=added)]
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [
        encode_prompt(tokenizer, one, add_special_tokens=added) if isinstance(one, str) else list(one)
        for one in prompt
        if not isinstance(one, int)
    ]


def prefix_length(body: CompletionRequest, tokenizer: Tokenizer) -> int:
    """How many special tokens `prompts_of` has put before each prompt."""
    first = body.prompt if isinstance(body.prompt, str) else body.prompt[0]
    return len(tokenizer.prompt_prefix) if isinstance(first, str) and body.add_special_tokens is not False else 0


def text_size(body: CompletionRequest) -> int:
    """The characters of all texts to be tokenized."""
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    return sum(len(prompt) for prompt in prompts if isinstance(prompt, str))


def scored_prompt(body: CompletionRequest) -> int | None:
    """How many likeliest tokens are wanted for each token of the prompt; None: its log probabilities are not."""
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((count for count in wanted if count is not None), default=None)


class TextForm(ChunkForm):
    """The format of completions.

    Args:
        model: which answers.
        tokenizer: of the model, for the texts of tokens.
        body: of the request.
        prompts: the token ids of the prompt of each answer.
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer, body: CompletionRequest, prompts: abc.Sequence[list[int]]
    ) -> None:
        kinds = ("text_completion", "text_completion")
        super().__init__("cmpl", model.name, kinds, UsageStyle.of(body.stream_options))
        self._tokenizer = tokenizer
        self._body = body
        self._prompts = prompts
        self._echoes = [tokenizer.decode(prompt) if body.echo else "" for prompt in prompts]
        self._sent_prompts: set[int] = set()  # the answers whose stream has sent the prompt's token ids
        most = body.logprobs
        self._scores = (
            None
            if most is None
            else [TextScores(tokenizer, most, as_ids=bool(body.return_tokens_as_token_ids)) for _ in prompts]
        )

    def first_choices(self) -> list[Json]:
        """See `ChunkForm.first_choices`: the prompts, if they are echoed. With logprobs they come when these do."""
        if self._scores is not None:
            return []
        return [self._part(index, text) for index, text in enumerate(self._echoes) if text]

    def text_choice(self, index: int, text: str) -> Json:
        """See `ChunkForm.text_choice`."""
        return {**self._part(index, text), "stop_reason": None}

    def choices(self, index: int, piece: TextPiece) -> list[Json | str]:
        """See `ChunkForm.choices`."""
        if self._scores is None and piece.finish_reason is None and not self._body.return_token_ids:
            return [piece.text] if piece.text else []
        found: list[Json | str] = []
        if self._scores is not None and self._echoes[index] and piece.prompt_logprobs is not None:
            scores = self._scores[index].json(self._prompt_entries(index, piece))
            found.append({**self._part(index, self._echoes[index]), "logprobs": scores})
        if piece.text or piece.logprobs or piece.finish_reason is not None or self._body.return_token_ids:
            choice = self._part(index, piece.text, piece.finish_reason)
            choice["stop_reason"] = self._stop_reason(piece, self._body.stop_token_ids)
            if self._scores is not None:
                choice["logprobs"] = self._scores[index].json(_entries([piece]))
            if self._body.return_token_ids:
                choice |= {
                    "token_ids": list(piece.token_ids),
                    "prompt_token_ids": None if index in self._sent_prompts else self._prompts[index],
                }
                self._sent_prompts.add(index)
            found.append(choice)
        return found

    def choice(self, index: int, pieces: abc.Sequence[TextPiece]) -> Json:
        """See `ChunkForm.choice`."""
        text = self._echoes[index] + "".join(piece.text for piece in pieces)
        choice = self._part(index, text, pieces[-1].finish_reason)
        choice["stop_reason"] = self._stop_reason(pieces[-1], self._body.stop_token_ids)
        before = next((piece for piece in pieces if piece.prompt_logprobs is not None), None)
        if self._scores is not None:
            echoed = self._prompt_entries(index, before) if before is not None and self._body.echo else []
            choice["logprobs"] = self._scores[index].json([*echoed, *_entries(pieces)])
        asked = bool(self._body.return_token_ids)
        found = None if before is None else before.prompt_logprobs
        return {
            **choice,
            "prompt_logprobs": prompt_scores(self._tokenizer, found, self._body.prompt_logprobs),
            "token_ids": [token for piece in pieces for token in piece.token_ids] if asked else None,
            "prompt_token_ids": self._prompts[index] if asked else None,
        }

    def _part(self, index: int, text: str, finish: str | None = None) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    def _prompt_entries(self, index: int, piece: TextPiece) -> list[tuple[int, TokenLogprob | None]]:
        return list(zip(self._prompts[index], piece.prompt_logprobs or (), strict=True))


def _entries(pieces: abc.Sequence[TextPiece]) -> list[tuple[int, TokenLogprob | None]]:
    return [(one.token, one) for piece in pieces for one in piece.logprobs or ()]
