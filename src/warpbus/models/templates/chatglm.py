"""The prompts of ChatGLM-6B, ChatGLM2, ChatGLM3 and GLM-4, for checkpoints that bring no template of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warpbus.errors import CheckpointError, UsageError
from warpbus.models.templates.base import (
    Message,
    SpecialToken,
    Text,
    Variables,
    check_continued,
    check_messages,
    prompt_ids,
    prompt_spans,
    special_id,
)
from warpbus.models.tokenizers import Tokenizer

_ROLE_TOKENS = {
    "system": "<|system|>",
    "user": "<|user|>",
    "assistant": "<|assistant|>",
    "observation": "<|observation|>",
    "tool": "<|observation|>",
}


class RoleTokenTemplate:
    """ChatGLM3 and GLM-4: `[gMASK] sop`, then for each message its role's token, `metadata \\n` and the content.

    The two differ only in how `sop` is written. Metadata and content are encoded apart from each other, as in the
    published tokenizers; the model answers after a bare `<|assistant|>` and ends with the next role's token.

    Args:
        tokenizer: one with these special tokens; CheckpointError if it lacks one.
        sop: the spelling of the second prefix token, "sop" or "<sop>".
        stop_ids: the ids at which an answer ends.

    Attributes:
        sop: as given; it tells ChatGLM3 ("sop") from GLM-4 ("<sop>").
    """

    def __init__(self, tokenizer: Tokenizer, *, sop: str, stop_ids: tuple[int, ...]) -> None:
        self.sop = sop
        self._tokenizer = tokenizer
        self._prefix = tuple(SpecialToken(special_id(tokenizer, text)) for text in ("[gMASK]", sop))
        self._roles = {role: special_id(tokenizer, text) for role, text in _ROLE_TOKENS.items()}
        self.stop_ids = stop_ids

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Variables | None = None,
    ) -> list[int]:
        """See `Template.render`."""
        check_messages(messages)
        items = self._items(messages)
        if continue_final_message:
            check_continued(messages)
        elif add_generation_prompt:
            items.append(SpecialToken(self._roles["assistant"]))
        return prompt_ids(self._tokenizer, items)

    def spans(self, messages: Sequence[Message], *, variables: Variables | None = None) -> tuple[list[int], list[bool]]:
        """See `Template.spans`.

        The stop token of an answer is the next role's token: after the last one `<|user|>`, or `<|observation|>` if it
        calls a tool.
        """
        check_messages(messages)
        items = self._items(messages)
        if messages[-1]["role"] == "assistant":
            follows = "observation" if messages[-1].get("metadata") else "user"
            items.append(SpecialToken(self._roles[follows], answer=True))
        return prompt_spans(self._tokenizer, items)

    def _items(self, messages: Sequence[Message]) -> list[SpecialToken | Text]:
        items: list[SpecialToken | Text] = list(self._prefix)
        answered = False
        for message in messages:
            token = self._roles[message["role"]]
            # An answer of several messages, such as a text and a call, writes the role of the next one itself.
            follows = answered and (token in self.stop_ids or message["role"] == "assistant")
            items.append(SpecialToken(token, answer=follows))
            answered = message["role"] == "assistant"
            for text in (message.get("metadata", "") + "\n", message["content"]):
                items.append(_answer(text) if answered else Text(text))
        return items


class RoundTemplate:
    """ChatGLM2: `[gMASK] sop`, then `[Round n]`, the question after 问： and the answer after 答：, as one text.

    The format has no place for a system message; its text is put before the round that follows it. The model ends an
    answer with `</s>`.

    Args:
        tokenizer: one with [gMASK] and sop; CheckpointError if it lacks one.
        stop_ids: the ids at which an answer ends, the first of which `spans` appends; CheckpointError if there is none.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop_ids: tuple[int, ...]) -> None:
        if not stop_ids:
            raise CheckpointError("config.json has no eos_token_id, with which ChatGLM2 ends its answers; add it (2)")
        self._tokenizer = tokenizer
        self._prefix = tuple(SpecialToken(special_id(tokenizer, text)) for text in ("[gMASK]", "sop"))
        self.stop_ids = stop_ids

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Variables | None = None,
    ) -> list[int]:
        """See `Template.render`. UsageError unless user and assistant take turns."""
        text, answers = _rounds(messages, _CHATGLM2)
        if continue_final_message:
            check_continued(messages)
            last = answers[-1][0]
            return prompt_ids(self._tokenizer, (*self._prefix, Text(text[:last]), Text(text[last:])))
        if add_generation_prompt:
            _check_question(messages, _CHATGLM2)
            text += _CHATGLM2.answer
        return prompt_ids(self._tokenizer, (*self._prefix, Text(text)))

    def spans(self, messages: Sequence[Message], *, variables: Variables | None = None) -> tuple[list[int], list[bool]]:
        """See `Template.spans`.

        Only the last answer has a stop token: the format puts none into the history. The last answer is encoded apart
        from what is before it, as the model meets it when it generates.
        """
        text, answers = _rounds(messages, _CHATGLM2)
        items: list[SpecialToken | Text] = list(self._prefix)
        if messages[-1]["role"] == "assistant":
            last, _ = answers.pop()
            items.append(Text(text[:last], tuple(answers)))
            items.append(_answer(text[last:]))
            items.append(SpecialToken(self.stop_ids[0], answer=True))
        else:
            items.append(Text(text, tuple(answers)))
        return prompt_spans(self._tokenizer, items)


class QueryTemplate:
    """ChatGLM-6B: the question as it is, or behind a history `[Round n]`, 问： and 答： from round 0 on, then
    `[gMASK] <sop>`.

    The format has no place for a system message; its text is put before what follows it. The model ends an answer with
    `<eop>`.

    Args:
        tokenizer: one whose `prompt_suffix` is `[gMASK] <sop>`, and with <eop>; CheckpointError if it lacks that.
        stop_ids: the ids at which an answer ends; <eop> is one of them in any case.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._suffix = tuple(SpecialToken(token) for token in tokenizer.prompt_suffix)
        self._end = special_id(tokenizer, "<eop>")
        self.stop_ids = tuple(dict.fromkeys((self._end, *stop_ids)))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Variables | None = None,
    ) -> list[int]:
        """See `Template.render`. UsageError unless user and assistant take turns.

        Without a generation prompt it is the text alone, which the model cannot continue.
        """
        if continue_final_message:
            check_messages(messages)
            check_continued(messages)
            begun = Text(messages[-1]["content"])
            return prompt_ids(self._tokenizer, (self._question(messages[:-1]), *self._suffix, begun))
        if not add_generation_prompt:
            return prompt_ids(self._tokenizer, [Text(_text(messages)[0])])
        return prompt_ids(self._tokenizer, (self._question(messages), *self._suffix))

    def spans(self, messages: Sequence[Message], *, variables: Variables | None = None) -> tuple[list[int], list[bool]]:
        """The prompt for the last answer, that answer and <eop>, of which the answer and <eop> are to be produced.

        One answer is all there is: a sequence of ChatGLM-6B has one `[gMASK] <sop>`, before which nothing is generated,
        so earlier answers are part of the prompt, and what follows the last one is left out. To learn from every
        answer, give the conversation once for each, up to it. Without any answer it is the prompt alone. UsageError as
        in `render`.
        """
        check_messages(messages)
        answered = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        items: list[SpecialToken | Text]
        if answered:
            # The whole of it is checked, also what is left out.
            _rounds(messages, _CHATGLM)
            last = answered[-1]
            items = [self._question(messages[:last]), *self._suffix]
            items += [_answer(messages[last]["content"]), SpecialToken(self._end, answer=True)]
        else:
            items = [self._question(messages), *self._suffix]
        return prompt_spans(self._tokenizer, items)

    def _question(self, messages: Sequence[Message]) -> Text:
        """The question, with the history before it."""
        text, with_history = _text(messages)
        _check_question(messages, _CHATGLM)
        return Text(text + _CHATGLM.answer if with_history else text)


def _text(messages: Sequence[Message]) -> tuple[str, bool]:
    """ChatGLM-6B's text of a conversation, and whether it has rounds: a first question has none."""
    text, answers = _rounds(messages, _CHATGLM)
    if answers:
        return text, True
    return _CHATGLM.separator.join(message["content"] for message in messages), False


def _answer(text: str) -> Text:
    """Mark a whole text as an answer."""
    return Text(text, ((0, len(text)),))


@dataclass(frozen=True, slots=True)
class _RoundFormat:
    """The form of a model's rounds: its name in messages, the separator of two parts, and the first round's number."""

    name: str
    separator: str
    first: int

    @property
    def answer(self) -> str:
        return f"{self.separator}答："

    def question(self, number: int) -> str:
        return f"[Round {self.first + number}]{self.separator}问："


_CHATGLM = _RoundFormat("ChatGLM-6B", "\n", 0)
_CHATGLM2 = _RoundFormat("ChatGLM2", "\n\n", 1)


def _rounds(messages: Sequence[Message], form: _RoundFormat) -> tuple[str, list[tuple[int, int]]]:
    """The one text of a conversation, and the ranges of it that are answers."""
    check_messages(messages)
    text = ""
    answers: list[tuple[int, int]] = []
    asked = False
    rounds = 0
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in ("system", "user", "assistant") or (role == "assistant") != asked:
            raise UsageError(
                f"messages[{index}]: {form.name} expects user and assistant in turn, found {role}; rearrange the "
                "messages"
            )
        if role == "assistant":
            text += form.answer
            answers.append((len(text), len(text) + len(message["content"])))
        else:
            if index:
                text += form.separator
            if role == "user":
                text += form.question(rounds)
                rounds += 1
        text += message["content"]
        asked = role == "user"
    return text, answers


def _check_question(messages: Sequence[Message], form: _RoundFormat) -> None:
    """Raises UsageError if there is nothing to answer."""
    if messages[-1]["role"] != "user":
        raise UsageError(f"messages: {form.name} answers a user, but the last message is not a user's; add one")
