"""The prompts of ChatGLM-6B, ChatGLM2, ChatGLM3 and GLM-4, for checkpoints that bring no template of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warpbus.errors import CheckpointError, UsageError
from warpbus.models.templates.base import (
    Message,
    PromptPlan,
    SpecialToken,
    Text,
    Variables,
    check_continued,
    check_messages,
    contents_of,
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
        return PromptPlan(tuple(items)).ids(self._tokenizer, contents_of(messages))

    def spans(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """See `Template.spans`. The stop token of an answer is the next role's token, `<|user|>` after the last."""
        check_messages(messages)
        items = self._items(messages)
        if messages[-1]["role"] == "assistant":
            items.append(SpecialToken(self._roles["user"], answer=True))
        return PromptPlan(tuple(items)).spans(self._tokenizer, contents_of(messages))

    def _items(self, messages: Sequence[Message]) -> list[SpecialToken | Text]:
        items: list[SpecialToken | Text] = list(self._prefix)
        answered = False
        for index, message in enumerate(messages):
            token = self._roles[message["role"]]
            items.append(SpecialToken(token, answer=answered and token in self.stop_ids))
            answered = message["role"] == "assistant"
            answers = ((0, 1),) if answered else ()
            items.append(Text((message.get("metadata", "") + "\n",), answers))
            items.append(Text((index,), answers))
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
        parts, answers = _rounds(messages, _CHATGLM2)
        if continue_final_message:
            check_continued(messages)
            last = answers[-1][0]
            texts = (Text(tuple(parts[:last])), Text(tuple(parts[last:])))
            return PromptPlan((*self._prefix, *texts)).ids(self._tokenizer, contents_of(messages))
        if add_generation_prompt:
            _check_question(messages, _CHATGLM2)
            parts.append(_CHATGLM2.answer)
        return PromptPlan((*self._prefix, Text(tuple(parts)))).ids(self._tokenizer, contents_of(messages))

    def spans(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """See `Template.spans`.

        Only the last answer has a stop token: the format puts none into the history. The last answer is encoded apart
        from what is before it, as the model meets it when it generates.
        """
        parts, answers = _rounds(messages, _CHATGLM2)
        items: list[SpecialToken | Text] = list(self._prefix)
        if messages[-1]["role"] == "assistant":
            last = answers.pop()
            items.append(Text(tuple(parts[: last[0]]), tuple(answers)))
            items.append(Text(tuple(parts[last[0] :]), ((0, 1),)))
            items.append(SpecialToken(self.stop_ids[0], answer=True))
        else:
            items.append(Text(tuple(parts), tuple(answers)))
        return PromptPlan(tuple(items)).spans(self._tokenizer, contents_of(messages))


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

        Without a generation prompt it is the text alone, which the model cannot go on with.
        """
        if continue_final_message:
            check_messages(messages)
            check_continued(messages)
            last = len(messages) - 1
            begun: list[SpecialToken | Text] = [self._question(messages[:-1]), *self._suffix, Text((last,))]
            return PromptPlan(tuple(begun)).ids(self._tokenizer, contents_of(messages))
        text = self._question(messages) if add_generation_prompt else Text(tuple(_parts(messages)[0]))
        suffix = self._suffix if add_generation_prompt else ()
        return PromptPlan((text, *suffix)).ids(self._tokenizer, contents_of(messages))

    def spans(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
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
            items += [Text((last,), ((0, 1),)), SpecialToken(self._end, answer=True)]
        else:
            items = [self._question(messages), *self._suffix]
        return PromptPlan(tuple(items)).spans(self._tokenizer, contents_of(messages))

    def _question(self, messages: Sequence[Message]) -> Text:
        """What is asked, with the history before it."""
        parts, with_history = _parts(messages)
        _check_question(messages, _CHATGLM)
        return Text((*parts, _CHATGLM.answer) if with_history else tuple(parts))


def _parts(messages: Sequence[Message]) -> tuple[list[str | int], bool]:
    """The parts of ChatGLM-6B's text of a conversation, and whether they are rounds: a first question is not."""
    parts, answers = _rounds(messages, _CHATGLM)
    if answers:
        return parts, True
    plain = [part for index in range(len(messages)) for part in (_CHATGLM.separator, index)]
    return plain[1:], False


@dataclass(frozen=True, slots=True)
class _RoundFormat:
    """How rounds are written: for whom, what stands between two parts, and the number of the first."""

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


def _rounds(messages: Sequence[Message], form: _RoundFormat) -> tuple[list[str | int], list[tuple[int, int]]]:
    """The parts of the one text of a conversation, and the ranges of them that are answers."""
    check_messages(messages)
    parts: list[str | int] = []
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
            parts += [form.answer, index]
            answers.append((len(parts) - 1, len(parts)))
        else:
            if parts:
                parts.append(form.separator)
            if role == "user":
                parts.append(form.question(rounds))
                rounds += 1
            parts.append(index)
        asked = role == "user"
    return parts, answers


def _check_question(messages: Sequence[Message], form: _RoundFormat) -> None:
    """Raises UsageError if there is nothing to answer."""
    if messages[-1]["role"] != "user":
        raise UsageError(f"messages: {form.name} answers a user, but the last message is not a user's; add one")
