"""Conversations with tools in data files: their tokens are those that a server's prompt would have."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_templates_dialects import GLM_SOURCE, LLAMA_SOURCE, QWEN_SOURCE, TIME, WEATHER
from tokenizer_files import write_byte_level

from warpbus.errors import DataError
from warpbus.models.documents import encode_line
from warpbus.models.templates import Template, find_template
from warpbus.models.templates.tools import ToolCall, Turn, find_dialect
from warpbus.models.tokenizers import Tokenizer, load_tokenizer

# As glm-4-9b-chat's, but for its texts: tools of a system message, and each call a message with metadata.
GLM4_SOURCE = (
    "[gMASK]<sop>{%- for m in messages %}{%- if m['tools'] %}<|system|>\n# 可用工具{% for tool in m['tools'] %}\n"
    "{{ tool | tojson }}{% endfor %}{%- else %}<|{{ m['role'] }}|>{{ m['metadata'] }}\n{{ m['content'] }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{%- endif %}"
)
OFFERED = [{"type": "function", "function": tool} for tool in (WEATHER, TIME)]


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "How is "}, {"type": "text", "text": "北京?"}]},
    {"role": "assistant", "content": None, "tool_calls": [call("get_weather", '{"city": "北京"}')]},
    {"role": "tool", "tool_call_id": "call_1", "content": "晴"},
    {"role": "assistant", "content": "It is sunny.", "tool_calls": None},
    {"role": "user", "content": "And the time?"},
    {"role": "assistant", "content": "One moment.", "tool_calls": [call("get_time", {})]},
]
TURNS = [
    Turn("user", "How is 北京?"),
    Turn("assistant", "", (ToolCall("get_weather", '{"city": "北京"}'),)),
    Turn("tool", "晴"),
    Turn("assistant", "It is sunny."),
    Turn("user", "And the time?"),
    Turn("assistant", "One moment.", (ToolCall("get_time", "{}"),)),
]


def template_of(directory: Path, source: str | None) -> tuple[Tokenizer, Template]:
    """With a byte-level vocabulary; without a source, the template of a GLM-4 that brings none."""
    directory = write_byte_level(directory)
    tokenizer = load_tokenizer(directory)
    config = {"eos_token": "<|endoftext|>"} | ({} if source is None else {"chat_template": source})
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    found = find_template(directory, {"model_type": "chatglm"}, tokenizer)
    assert found is not None
    return tokenizer, found


def encoded(template: Template, tokenizer: Tokenizer, messages: Sequence[object], **others: object) -> list[list[int]]:
    """What is before each answer and in it, in turn."""
    line = json.dumps({"messages": messages, **others})
    document = encode_line("a.jsonl:1", line, tokenizer, template)
    parts: list[list[int]] = [[]]
    for token, answer in zip(document.ids, document.answers, strict=True):
        if answer != (len(parts) % 2 == 0):
            parts.append([])
        parts[-1].append(token)
    return parts


@pytest.mark.parametrize("source", [QWEN_SOURCE, GLM_SOURCE, LLAMA_SOURCE, GLM4_SOURCE, None])
def test_prompts_of_a_conversation_with_tools_are_those_of_the_server(source: str | None, tmp_path: Path) -> None:
    tokenizer, template = template_of(tmp_path, source)
    dialect = find_dialect(template)
    assert dialect is not None
    tools = [WEATHER, TIME]
    messages = MESSAGES
    if source == LLAMA_SOURCE:  # its answers are calls or text
        messages = [*MESSAGES[:-1], {**MESSAGES[-1], "content": None}]
    parts = encoded(template, tokenizer, messages, tools=OFFERED)
    assert len(parts) == 6
    before = 0
    for asked, answered in ((1, 2), (3, 4), (5, 6)):
        prompt = template.render(dialect.render_tools(TURNS[:asked], tools), variables=dialect.variables(tools))
        before = 2 * (asked // 2) + 1
        found = [token for part in parts[:before] for token in part]
        assert found == prompt
        # A call hands over to the tool, a text to the user.
        end = "<|observation|>" if answered != 4 else "<|user|>"
        assert parts[before][-1] == tokenizer.special_ids[end]


@pytest.mark.parametrize("source", [GLM4_SOURCE, None])
def test_an_answer_of_a_text_and_a_call_has_the_role_between_them(source: str | None, tmp_path: Path) -> None:
    tokenizer, template = template_of(tmp_path, source)
    last = encoded(template, tokenizer, MESSAGES, tools=OFFERED)[-1]
    assert last[last.index(tokenizer.special_ids["<|assistant|>"]) + 1 :][:4] == tokenizer.encode("get_")
    assert tokenizer.decode(last).strip() == "One moment.get_time\n{}"


def test_tools_without_calls_are_declared(tmp_path: Path) -> None:
    tokenizer, template = template_of(tmp_path, None)
    (prompt, _), (bare, _) = (
        encoded(template, tokenizer, [TALK[0], TALK[1]], **others) for others in ({"tools": OFFERED}, {"tools": None})
    )
    assert "get_weather" in tokenizer.decode(prompt)
    assert "get_weather" not in tokenizer.decode(bare)


def test_thinking_has_two_names(tmp_path: Path) -> None:
    tokenizer, template = template_of(tmp_path, QWEN_SOURCE)
    thoughts = [
        encoded(template, tokenizer, [TALK[0], {**TALK[1], **named}])[1]
        for named in ({"reasoning_content": "mo mo"}, {"reasoning": "mo mo"}, {"reasoning_content": None})
    ]
    assert thoughts[0] == thoughts[1]
    assert tokenizer.decode(thoughts[0]) == "<think>mo mo</think>moo"
    assert tokenizer.decode(thoughts[2]) == "moo"


TALK = [{"role": "user", "content": "mo"}, {"role": "assistant", "content": "moo"}]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tools": 3}, "tools: expected a list, found int"),
        ({"tools": "get_time"}, "tools: expected a list, or a text that is one in JSON, found 'get_time'"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\]: expected {'type': 'function'"),
        ({"tools": [{"name": "a", "parameters": 3}]}, r"tools\[0\]: expected a JSON schema as parameters of a"),
        ({"messages": [TALK[0], {**TALK[1], "tool_calls": {"name": "a"}}]}, r"messages\[1\]: expected a list as tool"),
        ({"messages": [TALK[0], {**TALK[1], "tool_calls": ["a"]}]}, r"messages\[1\]: tool_calls: expected"),
        ({"messages": [{**TALK[0], "tool_calls": [call("a", "{}")]}, TALK[1]]}, "only messages of the role assistant"),
        ({"messages": [TALK[0], {**TALK[1], "tool_calls": [call("a", "[]")]}]}, "a: expected arguments that are"),
        ({"messages": [TALK[0], {**TALK[1], "weight": 0}]}, r"messages\[1\]: weight is 0: every answer is learned"),
        ({"messages": [TALK[0], {"role": "assistant", "content": None}]}, "expected a text as content, found none"),
    ],
)
def test_what_is_malformed_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    tokenizer, template = template_of(tmp_path, QWEN_SOURCE)
    line = json.dumps({"messages": TALK, **changes})
    with pytest.raises(DataError, match=said) as raised:
        encode_line("a.jsonl:7", line, tokenizer, template)
    assert str(raised.value).startswith("a.jsonl:7: ")


SHARED = [
    {"from": "human", "value": "How is 北京?"},
    {"from": "function_call", "value": json.dumps({"name": "get_weather", "arguments": {"city": "北京"}})},
    {"from": "observation", "value": "晴"},
    {"from": "gpt", "value": "It is sunny."},
]


@pytest.mark.parametrize("source", [QWEN_SOURCE, GLM_SOURCE, LLAMA_SOURCE, GLM4_SOURCE, None])
def test_conversations_of_sharegpt_are_those_of_openai(source: str | None, tmp_path: Path) -> None:
    tokenizer, template = template_of(tmp_path, source)
    system = {"role": "system", "content": "Be brief."}
    expected = [MESSAGES[0], {**MESSAGES[1], "tool_calls": [call("get_weather", {"city": "北京"})]}, *MESSAGES[2:4]]
    shared = [SHARED[0], {**SHARED[1], "value": f"[{SHARED[1]['value']}]"}, {**SHARED[2], "from": "tool"}, SHARED[3]]
    lines = [
        {"messages": [system, *expected], "tools": OFFERED},
        {"conversations": SHARED, "system": "Be brief.", "tools": json.dumps(OFFERED)},
        {"conversations": [{"from": "system", "value": "Be brief."}, *shared], "system": "", "tools": OFFERED},
        {"messages": None, "conversations": [system, *expected], "tools": [WEATHER, TIME]},
    ]
    first, *others = (encode_line("a.jsonl:1", json.dumps(line), tokenizer, template) for line in lines)
    assert all(other == first for other in others)
    plain = [{"conversations": [SHARED[0], SHARED[3]], "tools": ""}, {"messages": [MESSAGES[0], MESSAGES[3]]}]
    first, second = (encode_line("a.jsonl:1", json.dumps(line), tokenizer, template) for line in plain)
    assert first == second


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            {"conversations": [{"from": "narrator", "value": "x"}]},
            r"conversations\[0\]: from is 'narrator': expected hum",
        ),
        ({"conversations": [{"from": ["x"], "value": "x"}]}, r"conversations\[0\]: from is "),
        ({"conversations": [{"from": "human"}]}, r"conversations\[0\]: expected a text as value, found none"),
        ({"conversations": [{"from": "gpt", "value": 3}]}, r"conversations\[0\]: expected a text as value, found int"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "expected the JSON object .* found 'x'"),
        ({"conversations": [{"from": "function_call", "value": "[]"}]}, "expected the JSON object"),
        ({"conversations": [{"from": "function_call", "value": '{"x": 1}'}]}, r"messages\[0\]: tool_calls: expected"),
        (
            {"conversations": [{"from": "system", "value": "a"}], "system": "b"},
            "system: conversations has a message of",
        ),
        ({"conversations": [SHARED[0]], "system": 3}, r"messages\[0\]: expected a text as content, found int"),
        ({"conversations": []}, "the list is empty"),
        ({"conversations": "x"}, "expected an object with 'messages' or 'conversations'"),
    ],
)
def test_what_is_malformed_in_sharegpts_form_is_named(line: dict[str, Any], said: str, tmp_path: Path) -> None:
    tokenizer, template = template_of(tmp_path, QWEN_SOURCE)
    with pytest.raises(DataError, match=said) as raised:
        encode_line("a.jsonl:7", json.dumps(line), tokenizer, template)
    assert str(raised.value).startswith("a.jsonl:7: ")


def test_a_template_without_tools_refuses_them(tmp_path: Path) -> None:
    tokenizer, template = template_of(
        tmp_path, "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
    )
    for line in ({"messages": TALK, "tools": OFFERED}, {"messages": MESSAGES}):
        with pytest.raises(DataError, match="the chat template of the model has no tools: leave them out"):
            encode_line("a.jsonl:1", json.dumps(line), tokenizer, template)


@pytest.mark.parametrize("tools", [None, OFFERED])
def test_a_template_of_an_unknown_dialect_gets_tools_and_calls_in_openais_form(tools: Any, tmp_path: Path) -> None:
    """As far as it has them; otherwise they would be left out of the text."""
    calls = "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
    body = f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{{{{ m.content }}}}{calls}{{% endfor %}}"
    end = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    tokenizer, template = template_of(tmp_path, "{{ tools | tojson if tools else 'none' }}" + body + end)
    assert find_dialect(template) is None
    messages = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call("get_time", '{"a": 1}')]}]
    before, answer = encoded(template, tokenizer, messages, tools=tools)
    assert tokenizer.decode(answer) == '[get_time{"a": 1}]'
    assert tokenizer.decode(before).startswith("none" if tools is None else json.dumps(OFFERED, ensure_ascii=False))
    tokenizer, without = template_of(tmp_path, body + end)
    line = json.dumps({"messages": messages, "tools": tools})
    if tools is None:
        encode_line("a.jsonl:1", line, tokenizer, without)
    else:
        with pytest.raises(DataError, match="tools: the chat template of the model has no tools"):
            encode_line("a.jsonl:1", line, tokenizer, without)
