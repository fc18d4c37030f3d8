"""Constrained decoding: answers that match a JSON schema, a regular expression, a list of choices or a grammar.

The library llguidance computes the masks of allowed tokens: its Earley parser works on bytes, with any tokenizer. Knows
nothing of tensors: a mask is written to the caller's array.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from warpbus.engine.sampling_params import Grammar, GrammarKind
from warpbus.engine.structural_tags import structural_grammar
from warpbus.errors import UsageError
from warpbus.models.templates.json_schema import for_llguidance
from warpbus.models.tokenizers import Tokenizer
from warpbus.models.tokenizers.base import check_text

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_TEXT = 1 << 17
"""The most characters of a schema, an expression or a grammar."""

_CACHED = 256
_CACHED_TEXT = 1 << 18  # characters of all cached grammars: one of 65,000 takes 32 MB
_MOST_RULES = 500  # of EBNF: the time to convert them grows with their square
_MOST_DEPTH = 64  # of a schema: its parsers are recursive

# At most one space after a comma or a colon: small models may otherwise generate spaces without end.
_JSON = {"whitespace_pattern": "[ ]?"}

# Limits of the work per request, in the library's units: about 20 ms at the start, and 15 ms per token.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 20_000,
    "verbose_errors": False,
}


class GrammarMatcher:
    """The state of one answer in its grammar; created by `GrammarCompiler`.

    Attributes:
        failed: the next token of the grammar needs more work than the limits allow, or is not in the vocabulary. The
            answer then ends.
    """

    def __init__(self, matcher: LLMatcher, allowed: np.ndarray, stops: np.ndarray) -> None:
        self._matcher = matcher
        self._allowed = allowed
        self._stops = stops
        self.failed = False

    def accept(self, token: int) -> bool:
        """Advance by a token; False, and no change, if the grammar does not allow it."""
        return self._matcher.validate_tokens([token]) == 1 and self._matcher.consume_token(token)

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""
        if count:
            self._matcher.rollback(count)

    def fill(self, mask: np.ndarray) -> None:
        """Write the mask of allowed next tokens, int32 `[(vocabulary + 31) // 32]`: one bit per token, lowest first."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        np.bitwise_and(mask, self._allowed, out=mask)
        if self._matcher.is_error() or not mask.any():
            self.failed = True
            mask[:] = self._stops

    def mask(self) -> np.ndarray:
        """The mask of allowed next tokens, int32 `[(vocabulary + 31) // 32]`: one bit per token, lowest first."""
        mask = np.zeros_like(self._allowed)
        self.fill(mask)
        return mask

    @property
    def finished(self) -> bool:
        """Only stop tokens are allowed."""
        return self._matcher.is_stopped()


class GrammarCompiler:
    """Compiles grammars for a model's tokenizer in a thread, with a cache of the last ones; thread-safe.

    Special tokens are no part of any grammar; at its end the stop tokens are allowed.

    Args:
        vocab_size: of the model's scores: ids beyond the tokenizer's are never allowed.
        stop_ids: the tokens that end an answer.

    Raises:
        UsageError: llguidance is not installed, or there is no stop token for a grammar to end with.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, stop_ids: Collection[int]) -> None:
        stops = sorted(stop for stop in stop_ids if stop < vocab_size)
        if not stops:
            raise UsageError("grammar: the model names no stop token, with which an answer could end: leave it out")
        self._library = _llguidance()
        tokens = _Vocabulary(tokenizer, vocab_size, stops[0])
        self._tokenizer = self._library.LLTokenizer(tokens, n_vocab=vocab_size, eos_token=stops)
        self._limits = self._library.LLParserLimits(**_LIMITS)
        self._stops = _packed(stops, vocab_size)
        self._allowed = _packed([*stops, *(token for token, data in enumerate(tokens.tokens) if data)], vocab_size)
        # A grammar that cannot be used is cached as well: finding that out takes as much time.
        self._compiled: OrderedDict[Grammar, LLMatcher | UsageError] = OrderedDict()
        self._characters = 0  # of the cached grammars
        self._begun: dict[Grammar, Future[LLMatcher | UsageError]] = {}
        self._lock = threading.Lock()
        # One: the library's objects are not made for several. It compiles without the GIL.
        self._thread = ThreadPoolExecutor(1, "compile-grammar")

    def begin(self, grammar: Grammar) -> Future[Any] | None:
        """Begin to compile a grammar in a thread.

        Returns:
            a future that is done when `compile` need not wait for this grammar; None if it need not wait now.
        """
        with self._lock:
            if grammar in self._compiled:
                return None
            return self._begin(grammar)

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the start of an answer. Waits until the grammar is compiled.

        Raises:
            UsageError: the text is not of its kind, uses what is not supported, or takes too much work.
        """
        with self._lock:
            cached = self._compiled.get(grammar)
            if cached is None:
                begun = self._begin(grammar)
            else:
                self._compiled.move_to_end(grammar)
        found = begun.result() if cached is None else cached
        if isinstance(found, UsageError):
            raise UsageError(str(found))
        with self._lock:
            return GrammarMatcher(found.deep_copy(), self._allowed, self._stops)

    def close(self) -> None:
        """Compile nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self, grammar: Grammar) -> Future[LLMatcher | UsageError]:
        """To be called with the lock."""
        begun = self._begun.get(grammar)
        if begun is None:
            begun = self._begun[grammar] = self._thread.submit(self._work, grammar)
        return begun

    def _work(self, grammar: Grammar) -> LLMatcher | UsageError:
        """Compile a grammar and put it into the cache; in a thread."""
        found: LLMatcher | UsageError | None = None
        try:
            found = self._parse(grammar)
        except UsageError as error:
            found = UsageError(str(error))  # without the frames of its traceback
        finally:
            with self._lock:
                del self._begun[grammar]
                if found is not None:
                    self._compiled[grammar] = found
                    self._characters += len(grammar.text)
                while len(self._compiled) > _CACHED or self._characters > _CACHED_TEXT:
                    self._characters -= len(self._compiled.popitem(last=False)[0].text)
        return found

    def _parse(self, grammar: Grammar) -> LLMatcher:
        if len(grammar.text) > MOST_TEXT:
            raise UsageError(f"{grammar.kind} has {len(grammar.text):,} characters: give at most {MOST_TEXT:,}")
        check_text(grammar.text)
        source = _SOURCES[grammar.kind](self._library.LLMatcher, grammar.text)
        matcher = self._library.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        # The first mask shows whether the lexer exceeds its limits.
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise UsageError(f"{grammar.kind} cannot be used: {_reason(matcher.get_error())}")
        return matcher


def _reason(error: str) -> str:
    """An error of the library in one line, without its internals."""
    reason = " ".join(error.split("<backtrace>")[0].replace("<non-verbose/>", "").split())[:300]
    # The library's name of the state in which no byte continues the grammar.
    if not reason or "NoExtensionBias" in reason:
        return "no text matches it: a rule or a $ref leads back to itself, or a class has no character"
    if "coerce_one_of" in reason:
        return (
            "the schemas of a oneOf have to exclude each other, such as objects that require a property with another "
            "const in each: give such schemas, or anyOf"
        )
    return reason


class _Vocabulary:
    """The tokenizer interface of the library: the bytes of every token, none for special tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        special = set(tokenizer.special_ids.values())
        self.tokens = [b"" if token in special else tokenizer.token_bytes(token) for token in range(vocab_size)]
        self._ids = {data: token for token, data in enumerate(self.tokens) if data}
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """The canonical tokens of a text within an answer: the only allowed ones if a grammar leaves no choice."""
        data = text.encode()
        tokens = self._tokenizer.encode(text)
        spelled = [self.tokens[token] for token in tokens]
        if self._tokenizer.drops_first_space and spelled:
            # A space that does not belong to the text is before it; what begins with it may not be a token without.
            first = spelled[0].removeprefix(b" ")
            head = [self._ids[first]] if first in self._ids else self._of_bytes(first)
            tokens = [*head, *tokens[1:]]
            spelled[0] = first
        # A tokenizer with Unicode normalization has no canonical tokens for some texts.
        return tokens if b"".join(spelled) == data else self._of_bytes(data)

    def _of_bytes(self, data: bytes) -> list[int]:
        each = [self._ids.get(bytes([byte])) for byte in data]
        return [token for token in each if token is not None]


def _packed(tokens: Collection[int], vocab_size: int) -> np.ndarray:
    bits = np.zeros((vocab_size + 31) // 32 * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _llguidance() -> Any:
    # Imported at the first grammar: the library is an optional extra.
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise UsageError("a grammar needs llguidance: pip install 'warpbus[serve]'") from error


def _json(kind: GrammarKind, text: str) -> Any:
    try:
        found = json.loads(text)
        deep = _depth(found)
        written = json.dumps(found, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{kind} is not JSON ({error}): give valid JSON") from None
    if deep > _MOST_DEPTH:
        raise UsageError(f"{kind} is nested {deep} deep: give at most {_MOST_DEPTH} levels")
    check_text(written)  # an escape may be a lone surrogate
    return found


def _depth(value: Any) -> int:
    if not isinstance(value, (dict, list)):
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)


def _of_schema(library: Any, text: str) -> str:
    schema = _json("json_schema", text)
    if not isinstance(schema, (dict, bool)):
        raise UsageError(f"json_schema is a JSON {type(schema).__name__}: give an object")
    # A boolean is a valid schema (JSON Schema, 2020-12, 4.3.2), but the library does not accept it.
    if schema is False:
        raise UsageError("json_schema is false, which allows no answer: give an object")
    text = "{}" if schema is True else json.dumps(for_llguidance(schema))
    return library.grammar_from_json_schema(text, overrides=_JSON)


def _of_object(library: Any, text: str) -> str:
    return library.grammar_from_json_schema('{"type": "object"}', overrides=_JSON)


def _of_regex(library: Any, text: str) -> str:
    return library.grammar_from_regex(text)


def _of_choice(library: Any, text: str) -> str:
    choices = _json("choice", text)
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise UsageError("choice is no list of texts: give a JSON list of strings, at least one and none empty")
    # Any character other than a letter or a digit may be a metacharacter.
    spelled = ("".join(c if c.isalnum() else f"\\x{{{ord(c):X}}}" for c in one) for one in choices)
    return library.grammar_from_regex("|".join(spelled))


def _of_lark(library: Any, text: str) -> str:
    return library.grammar_from_lark(text)


def _of_ebnf(library: Any, text: str) -> str:
    return _of_lark(library, _lark_of(text))


def _of_structural_tag(library: Any, text: str) -> str:
    return _of_lark(library, structural_grammar(_json("structural_tag", text), _lark_of))


def _lark_of(text: str) -> str:
    """EBNF as Lark; Lark as it is."""
    if "::=" not in text:
        return text
    rules = text.count("::=")
    if rules > _MOST_RULES:
        raise UsageError(f"ebnf has {rules:,} rules: give at most {_MOST_RULES}")
    try:
        return str(importlib.import_module("llguidance.gbnf_to_lark").any_to_lark(text))
    # The library raises plain exceptions.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"ebnf cannot be used: {reason or type(error).__name__}") from None


_SOURCES: dict[GrammarKind, Callable[[Any, str], str]] = {
    "json_schema": _of_schema,
    "json_object": _of_object,
    "regex": _of_regex,
    "choice": _of_choice,
    "lark": _of_lark,
    "ebnf": _of_ebnf,
    "structural_tag": _of_structural_tag,
}
