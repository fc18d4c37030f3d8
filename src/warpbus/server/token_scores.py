"""Log probabilities of tokens as the APIs write them."""

from __future__ import annotations

from collections import abc

from warpbus.engine import TokenLogprob
from warpbus.models.tokenizers import Tokenizer
from warpbus.server.responses import Json

LOWEST = -9999.0
"""The log probability of probability 0, as OpenAI writes it: JSON has no infinity."""


def token_text(tokenizer: Tokenizer, token: int) -> tuple[str, bytes]:
    """A token's text, with U+FFFD for an incomplete character, and its bytes."""
    data = tokenizer.token_bytes(token)
    if not data:
        special = next((text for text, number in tokenizer.special_ids.items() if number == token), "")
        data = special.encode()
    return data.decode("utf-8", "replace"), data


def text_with_specials(tokenizer: Tokenizer, tokens: abc.Sequence[int]) -> str:
    """The text of tokens, special ones included; otherwise as `Tokenizer.decode`."""
    names = {number: text for text, number in tokenizer.special_ids.items()}
    found, rest = "", list[int]()
    for token in tokens:
        if token in names:
            found, rest = found + tokenizer.decode(rest) + names[token], []
        else:
            rest.append(token)
    return found + tokenizer.decode(rest)


def token_id_text(token: int) -> str:
    """A token in the place of its text, as vLLM writes it for `return_tokens_as_token_ids`."""
    return f"token_id:{token}"


def with_sampled(found: TokenLogprob, most: int) -> list[tuple[int, float]]:
    """The likeliest tokens, at most so many, best first; the sampled token takes the last place if it is not among
    them."""
    top = list(found.top[:most])
    if top and found.token not in [token for token, _ in top]:
        top[-1] = (found.token, found.logprob)
    return top


class TextScores:
    """The log probabilities of a text in the form of completions.

    Args:
        tokenizer: for the texts of tokens.
        most: the likeliest tokens of each position that are shown, besides its own.
        as_ids: tokens are shown by their ids.
    """

    def __init__(self, tokenizer: Tokenizer, most: int, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._most = most
        self._as_ids = as_ids
        self._offset = 0

    def json(self, tokens: abc.Iterable[tuple[int, TokenLogprob | None]]) -> Json:
        """The next tokens of the text, with their log probabilities; None where there is none."""
        found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, one in tokens:
            # The text leaves out special tokens, which have no bytes.
            text = token_text(self._tokenizer, token)[0] if self._tokenizer.token_bytes(token) else ""
            found["tokens"].append(self._shown(token))
            found["token_logprobs"].append(None if one is None else max(one.logprob, LOWEST))
            found["text_offset"].append(self._offset)
            found["top_logprobs"].append(None if one is None else self._top(one))
            self._offset += len(text)
        return found

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        likely: dict[str, float] = {}
        # The token itself comes first. Different tokens may have the same text, for instance parts of characters: the
        # likeliest is shown.
        for token, logprob in ((one.token, one.logprob), *one.top[: self._most]):
            text = self._shown(token)
            likely[text] = max(logprob, likely.get(text, LOWEST))
        return likely

    def _shown(self, token: int) -> str:
        return token_id_text(token) if self._as_ids else token_text(self._tokenizer, token)[0]


def prompt_scores(
    tokenizer: Tokenizer, found: abc.Sequence[TokenLogprob | None] | None, most: int | None
) -> list[Json | None] | None:
    """The log probabilities of a prompt as vLLM writes them: by token id, with ranks, the first token without.

    Args:
        most: the likeliest tokens of each position that are shown, besides its own; None: nothing is asked for.
    """
    if found is None or most is None:
        return None
    return [None if one is None else _ranked(tokenizer, one, most) for one in found]


def _ranked(tokenizer: Tokenizer, one: TokenLogprob, most: int) -> Json:
    ranked = {one.token: (one.logprob, one.rank)}
    for rank, (token, logprob) in enumerate(one.top[:most], 1):
        ranked.setdefault(token, (logprob, rank))
    return {
        str(token): {
            "logprob": max(logprob, LOWEST),
            "rank": rank,
            "decoded_token": token_text(tokenizer, token)[0],
        }
        for token, (logprob, rank) in ranked.items()
    }
