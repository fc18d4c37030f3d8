"""The parameters of a request: sampling, grammar and stop conditions.

Plain values: picklable, checked in the constructor, without tensors or models.
"""

import math
from collections import abc
from dataclasses import dataclass, field
from typing import Literal, get_args

from warpbus.errors import UsageError

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "ebnf", "structural_tag"]

MOST_LOGPROBS = 20
"""The most alternatives per sampled token, as in OpenAI's API."""

MOST_LOGPROB_TOKENS = 1024
"""The most tokens of `logprob_tokens`."""

MOST_PROMPT_LOGPROBS = 1 << 20
"""The most log probabilities of one prompt: its tokens times one more than `prompt_logprobs` and `logprob_tokens`."""

_LEAST_TEMPERATURE = 1e-6  # below it, logits divided by the temperature may overflow float32
MOST_BIASES = 1024
MOST_STOPS = 64


@dataclass(frozen=True)
class Grammar:
    """A constraint on the text of an answer.

    Attributes:
        kind: "json_schema" (JSON that a schema describes), "json_object" (any JSON object), "regex" (a regular
            expression that the whole answer matches), "choice" (one of the texts of a JSON list), "lark", "ebnf"
            (rules with `::=`, of which `root` is the first, as in llama.cpp; text without them is "lark"), or
            "structural_tag" (free text, tags and grammars, by the JSON of XGrammar and vLLM).
        text: the schema, expression, list or grammar; empty for "json_object".

    Raises:
        UsageError: an unknown kind, or a text that is missing or superfluous.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise UsageError(f"grammar: kind is {self.kind!r}: give one of {', '.join(get_args(GrammarKind))}")
        if not isinstance(self.text, str):
            raise UsageError(f"grammar: text is of type {type(self.text).__name__}: give a string")
        if bool(self.text) == (self.kind == "json_object"):
            wanted = "no text for" if self.kind == "json_object" else "a text for"
            raise UsageError(f"grammar: text is {self.text[:40]!r}: give {wanted} {self.kind}")


@dataclass(frozen=True)
class Thinking:
    """The thinking with which an answer may begin, between two tokens.

    Attributes:
        opening, closing: the ids of the tokens, such as `<think>` and `</think>`.
        opened: the prompt ends within the thinking; otherwise the answer may begin with `opening`.
        budget: the most tokens between the two, after which `closing` is the only one allowed. None: any number.

    Raises:
        UsageError: a value is out of range.
    """

    opening: int
    closing: int
    opened: bool
    budget: int | None = None

    def __post_init__(self) -> None:
        _check("thinking: opening", self.opening, "a token id", low=0, whole=True)
        _check("thinking: closing", self.closing, "a token id", low=0, whole=True)
        if self.budget is not None:
            _check("thinking_token_budget", self.budget, "a whole number, 0 or more", low=0, whole=True)


@dataclass(frozen=True)
class PromptPooling:
    """The vector of a prompt that a request asks for.

    Attributes:
        mode: the mean of the hidden states of its tokens, after the final norm, or the last one; or the logits of some
            tokens after the prompt, or their probabilities among all tokens. The mean is computed without the prefix
            cache.
        tokens: the ids of these tokens.
    """

    mode: Literal["mean", "last", "logits", "probabilities"]
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled, and when to stop.

    Logits are changed in this order: `repetition_penalty`, `presence_penalty` and `frequency_penalty`, `logit_bias`,
    then the masks of `grammar` and `min_tokens`; then `temperature`, `top_k`, `top_p` and `min_p` define the
    distribution.

    Attributes:
        repetition_penalty: positive logits of tokens in the prompt or the answer are divided by it, negative ones
            multiplied (CTRL; Keskar et al., 2019), 0.01 to 100. 1: no penalty.
        presence_penalty: subtracted from the logits of tokens in the answer (OpenAI's API), -2 to 2.
        frequency_penalty: subtracted once per occurrence of the token in the answer (OpenAI's API), -2 to 2.
        logit_bias: added to the logits of these token ids, -100 to 100.
        grammar: the answer matches it, unless `max_tokens` cuts it off.
        thinking: the answer may begin with thinking, behind which the grammar applies. None: there is no thinking, or
            it needs no limit.
        temperature: logits are divided by it, 0 to 100. Below 1e-6 the most likely token is taken (greedy).
        top_k: sample from the `top_k` most likely tokens only. 0: from all.
        top_p: sample from the most likely tokens that together reach this probability only (nucleus sampling; Holtzman
            et al., 2020). 1: from all.
        min_p: sample from tokens with at least this fraction of the highest probability only (Nguyen et al., 2024). 0:
            from all.
        max_tokens: the most tokens to generate, limited by what the prompt leaves of the context.
        min_tokens: stop tokens, those of `stop_token_ids` included, are not allowed before so many other tokens, unless
            a grammar has ended or allows stop tokens only: grammars have precedence. Stop strings are not affected.
        stop: generation ends before the first of these strings, which is not part of the text.
        include_stop_str_in_output: the text ends with the stop string instead of before it.
        stop_token_ids: generation also ends with one of these tokens, whose text is not shown.
        seed: the same seed samples the same tokens, whatever else is in the batch. None: different in every call.
        ignore_eos: continue after the model's stop tokens, to `max_tokens` or a stop string: for benchmarks.
        continues_text: the answer goes on with the prompt's text, so that a space at its beginning is kept. Otherwise
            it is a text of its own, whose first space tokenizers such as Llama 2's have put there. `LLM.generate` sets
            it for prompts that are texts.
        priority: requests with lower values leave the queue first; equal ones, first come, first served.
        logprobs: return the log probability of each sampled token, and so many most likely tokens with theirs (0 to
            20). None: no logprobs.
        prompt_logprobs: the same for the tokens of the prompt, which is then computed without the prefix cache.
        logprob_tokens: the ids of at most 1,024 tokens, whose log probabilities `logprobs` and `prompt_logprobs` return
            at every position, too.
        pooling: return a vector of the prompt with the first token.

    Raises:
        UsageError: a value is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_tokens: tuple[int, ...] = ()
    pooling: PromptPooling | None = None
    logit_bias: abc.Mapping[int, float] = field(default_factory=dict, hash=False)
    grammar: Grammar | None = None
    thinking: Thinking | None = None
    include_stop_str_in_output: bool = False
    continues_text: bool = False
    priority: int = 0

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, abc.Sequence) or not all(isinstance(text, str) and text for text in stop):
            raise UsageError(f"stop is {self.stop!r}: give strings that are not empty")
        object.__setattr__(self, "stop", tuple(stop))
        _check("temperature", self.temperature, "a number from 0 to 100 (0 is greedy)", low=0.0, high=100.0)
        _check("top_p", self.top_p, "above 0 and at most 1", low=0.0, high=1.0, open_low=True)
        _check("top_k", self.top_k, "a whole number, 0 or more (0 allows every token)", low=0, whole=True)
        _check("min_p", self.min_p, "a number from 0 to 1 (0 allows every token)", low=0.0, high=1.0)
        wanted = "a number from 0.01 to 100 (1 changes nothing)"
        _check("repetition_penalty", self.repetition_penalty, wanted, low=0.01, high=100.0)
        for name in ("presence_penalty", "frequency_penalty"):
            _check(name, getattr(self, name), "a number from -2 to 2 (0 changes nothing)", low=-2.0, high=2.0)
        _check("max_tokens", self.max_tokens, "a whole number, 1 or more", low=1, whole=True)
        _check("min_tokens", self.min_tokens, "a whole number, 0 or more", low=0, whole=True)
        if self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens is {self.min_tokens}: give at most max_tokens, which is {self.max_tokens}")
        if self.seed is not None:
            _check("seed", self.seed, "a whole number, 0 or more", low=0, whole=True)
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, f"a whole number from 0 to {MOST_LOGPROBS}", 0, MOST_LOGPROBS, whole=True)
        if self.prompt_logprobs is not None:
            wanted = f"a whole number from 0 to {MOST_LOGPROBS}"
            _check("prompt_logprobs", self.prompt_logprobs, wanted, 0, MOST_LOGPROBS, whole=True)
        for name in ("ignore_eos", "include_stop_str_in_output", "continues_text"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} is {getattr(self, name)!r}: give True or False")
        _check("priority", self.priority, "a whole number", low=-math.inf, whole=True)
        self._check_ids("stop_token_ids", MOST_STOPS)
        self._check_ids("logprob_tokens", MOST_LOGPROB_TOKENS)
        self._check_biases()
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise UsageError(f"grammar is of type {type(self.grammar).__name__}: give a Grammar")
        if self.grammar is not None and self.ignore_eos:
            raise UsageError("ignore_eos is True, but a grammar ends with a stop token: leave one of them out")

    @property
    def constrained(self) -> bool:
        """A grammar or a budget of thinking limits the tokens."""
        return self.grammar is not None or self.thinking is not None

    @property
    def greedy(self) -> bool:
        """No random numbers are needed."""
        return self.temperature < _LEAST_TEMPERATURE or self.top_k == 1

    @property
    def penalized(self) -> bool:
        """Tokens that occurred before are less, or more, likely."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def needs_whole_prompt(self) -> bool:
        """The prompt is computed without the prefix cache."""
        return self.prompt_logprobs is not None or (self.pooling is not None and self.pooling.mode == "mean")

    def check_ids(self, vocab_size: int) -> None:
        """Raises UsageError if the parameters name a token outside the vocabulary."""
        tags = () if self.thinking is None else (self.thinking.opening, self.thinking.closing)
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("logprob_tokens", self.logprob_tokens),
            ("pooling", () if self.pooling is None else self.pooling.tokens),
            ("thinking", tags),
        ):
            strange = [token for token in ids if token >= vocab_size]
            if strange:
                raise UsageError(f"{name} has the token id {strange[0]}: give ids below {vocab_size}, the vocabulary")

    def _check_ids(self, name: str, most: int) -> None:
        ids = getattr(self, name)
        if not isinstance(ids, abc.Sequence) or isinstance(ids, str) or len(ids) > most:
            raise UsageError(f"{name} is {str(ids)[:80]}: give a list of at most {most:,} token ids")
        object.__setattr__(self, name, tuple(ids))
        for token in ids:
            _check(f"a token id of {name}", token, "a whole number, 0 or more", low=0, whole=True)

    def _check_biases(self) -> None:
        biases = self.logit_bias
        if not isinstance(biases, abc.Mapping) or len(biases) > MOST_BIASES:
            found = f"has {len(biases)} entries" if isinstance(biases, abc.Mapping) else f"is {str(biases)[:80]}"
            raise UsageError(f"logit_bias {found}: give a mapping from token ids to numbers, at most {MOST_BIASES}")
        for token, bias in biases.items():
            _check("a token id of logit_bias", token, "a whole number, 0 or more", low=0, whole=True)
            _check(f"logit_bias of token {token}", bias, "a number from -100 to 100", low=-100.0, high=100.0)
        object.__setattr__(self, "logit_bias", dict(biases))


def _check(
    name: str,
    value: float,
    expected: str,
    low: float,
    high: float = math.inf,
    *,
    open_low: bool = False,
    whole: bool = False,
) -> None:
    right_type = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    # The bounds first: an int may be too large for a float.
    if not right_type or not low <= value <= high or value == math.inf or (open_low and value == low):
        raise UsageError(f"{name} is {value!r}: give {expected}")
