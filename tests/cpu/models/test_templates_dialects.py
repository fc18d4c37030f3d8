"""Tools of Qwen, GLM-4.5 and Llama 3: prompts by their Jinja templates, calls in answers, grammars."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lark_grammars import accepted
from tokenizer_files import write_byte_level
from transformers.utils.chat_template_utils import render_jinja_template

from warpbus.errors import UsageError
from warpbus.models.templates import JinjaTemplate
from warpbus.models.templates.tools import (
    ArgumentTagTools,
    JsonTagTools,
    LlamaTools,
    ToolCall,
    Turn,
    find_dialect,
)
from warpbus.models.tokenizers import load_tokenizer

WEATHER = {
    "name": "get_weather",
    "description": "天气 <|user|>",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "more": {"type": "object"},
        },
        "required": ["city"],
    },
}
TIME = {"name": "get_time"}
TOOLS = [WEATHER, TIME]
QWEN, GLM, LLAMA = JsonTagTools(), ArgumentTagTools(), LlamaTools()

# Templates that use what those of the three families use; written for this test.
QWEN_SOURCE = (
    "{%- if tools %}<|system|>tools:{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{%- endfor %}"
    " call in <tool_call>: name, arguments\n{%- endif %}"
    "{%- for message in messages %}<|{{ 'observation' if message.role == 'tool' else message.role }}|>"
    "{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{%- endif %}"
    "{{ message.content }}{%- for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{%- endfor %}{%- endfor %}{%- if add_generation_prompt %}<|assistant|>"
    "{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{%- endif %}{%- endif %}"
)
GLM_SOURCE = (
    "[gMASK]<sop>{%- if tools %}<|system|>\n{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}\n"
    "{% endfor %}"
    "<tool_call>name <arg_key>k</arg_key>{%- endif %}"
    "{%- for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}"
    "{%- for tc in m.tool_calls or [] %}\n<tool_call>{{ tc.function.name }}\n"
    "{% for k, v in tc.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>\n{% endfor %}</tool_call>"
    "{%- endfor %}{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{%- endif %}"
)
LLAMA_SOURCE = (
    "{%- if tools is not none %}<|system|>Environment: ipython\n{%- for t in tools %}{{ t | tojson(indent=4) }}"
    "{%- endfor %}{%- endif %}{%- for message in messages %}{%- if 'tool_calls' in message %}"
    "{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{%- endif %}"
    '{%- set call = message.tool_calls[0].function %}<|assistant|>{"name": "{{ call.name }}", "parameters": '
    "{{ call.arguments | tojson }}}{%- else %}<|{{ 'observation' if message.role == 'tool' else message.role }}|>"
    "{{ message.content | trim }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{%- endif %}"
)
CALL = ToolCall("get_weather", '{"city": "北京 \\"x\\"", "days": 2, "more": {"a": [1, null]}}')
TURNS = [
    Turn("system", "简短"),
    Turn("user", "北京？ <|assistant|>"),
    Turn("assistant", "", (CALL,), reasoning="想"),
    Turn("tool", '{"晴": "<|user|>"}'),
]


def template_of(tmp_path, source):
    tokenizer = load_tokenizer(write_byte_level(tmp_path))
    return tokenizer, JinjaTemplate(source, tokenizer, name="own", variables={}, stop_ids=(), end_id=None)


@pytest.mark.parametrize(
    ("source", "kind"), [(QWEN_SOURCE, JsonTagTools), (GLM_SOURCE, ArgumentTagTools), (LLAMA_SOURCE, LlamaTools)]
)
def test_prompts_are_those_of_the_template(tmp_path, source, kind):
    tokenizer, template = template_of(tmp_path, source)
    dialect = find_dialect(template)
    assert type(dialect) is kind
    arguments = json.loads(CALL.arguments)
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    call = {"type": "function", "function": {"name": CALL.name, "arguments": arguments}}
    conversation = [
        {"role": "system", "content": "简短"},
        {"role": "user", "content": "北京？ @assistant@"},
        {"role": "assistant", "content": "", "reasoning_content": "想", "tool_calls": [call]},
        {"role": "tool", "content": '{"晴": "@user@"}'},
    ]
    tools[0] = {"type": "function", "function": {**WEATHER, "description": "天气 @user@"}}
    [[expected], _] = render_jinja_template(
        [conversation], tools=tools, chat_template=source, add_generation_prompt=True
    )
    ids = template.render(dialect.render_tools(TURNS, TOOLS), variables=dialect.variables(TOOLS))
    shown = {number: text.encode() for text, number in tokenizer.special_ids.items()}
    text = b"".join(shown.get(i) or tokenizer.token_bytes(i) for i in ids).decode()
    assert text == expected.replace("@user@", "<|user|>").replace("@assistant@", "<|assistant|>")
    # Special tokens come from the template alone: those in contents and tools are text.
    assert ids.count(tokenizer.special_ids["<|user|>"]) == 1


def test_without_tools_the_template_gets_none(tmp_path):
    tokenizer, template = template_of(tmp_path, LLAMA_SOURCE)
    messages = LLAMA.render_tools([Turn("user", "u")], [])
    assert LLAMA.variables([]) == {}
    special = tokenizer.special_ids
    assert template.render(messages) == [special["<|user|>"], *tokenizer.encode("u"), special["<|assistant|>"]]


def test_what_the_template_refuses_is_the_requests_fault(tmp_path):
    _, template = template_of(tmp_path, LLAMA_SOURCE)
    turns = [Turn("user", "u"), Turn("assistant", "", (CALL, CALL))]
    with pytest.raises(UsageError, match="one call at once"):
        template.render(LLAMA.render_tools(turns, TOOLS), variables=LLAMA.variables(TOOLS))


def test_a_template_without_tools_or_of_another_form_has_no_dialect(tmp_path):
    for source in ("{{ messages[0].content }}", QWEN_SOURCE.replace("<tool_call>", "<call>"), "tools <function= "):
        assert find_dialect(template_of(tmp_path, source)[1]) is None


def split(dialect, text, size, tools=TOOLS):
    stream = dialect.stream(tools)
    pieces = [stream.push(text[at : at + size]) for at in range(0, len(text), size)]
    pieces.append(stream.flush())
    return "".join(shown for shown, _ in pieces), [call for _, calls in pieces for call in calls]


QWEN_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "北京"}}\n</tool_call>'
GLM_CALL = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>北京</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>"
)
LLAMA_CALL = '{"name": "get_weather", "parameters": {"city": "北京"}}'


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("dialect", "text", "shown", "calls"),
    [
        (QWEN, QWEN_CALL, "", [("get_weather", {"city": "北京"})]),
        (
            QWEN,
            f'好 < 的。\n\n{QWEN_CALL}\n<tool_call>\n{{"name": "get_time", "arguments": {{}}}}\n</tool_call>\n完',
            "好 < 的。\n完",
            [("get_weather", {"city": "北京"}), ("get_time", {})],
        ),
        (
            QWEN,
            '<tool_call>{"arguments": {"city": "a\n"}, "name": "get_weather"}</tool_call>',
            "",
            [("get_weather", {"city": "a\n"})],
        ),
        (GLM, f"\n{GLM_CALL}", "", [("get_weather", {"city": "北京", "days": 2})]),
        (
            GLM,
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>12</arg_value><arg_key>unit</arg_key>"
            '<arg_value>C</arg_value><arg_key>more</arg_key><arg_value>{"a": true}</arg_value><arg_key>other</arg_key>'
            "<arg_value>plain text</arg_value></tool_call>",
            "",
            [("get_weather", {"city": "12", "unit": "C", "more": {"a": True}, "other": "plain text"})],
        ),
        (GLM, "<tool_call>get_time\n</tool_call>", "", [("get_time", {})]),
        (LLAMA, f" {LLAMA_CALL}", "", [("get_weather", {"city": "北京"})]),
        (
            LLAMA,
            f'{LLAMA_CALL}; {{"type": "function", "name": "get_time", "parameters": {{}}}}',
            "",
            [("get_weather", {"city": "北京"}), ("get_time", {})],
        ),
    ],
)
def test_calls_are_read(dialect, text, shown, calls, size):
    found, read = split(dialect, text, size)
    assert [(call.name, json.loads(call.arguments)) for call in read] == calls
    assert found == shown


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (QWEN, '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
        (QWEN, '<tool_call>{"name": "get_time", "arguments": []}</tool_call>'),
        (QWEN, '<tool_call>{"name": "get_time", "arguments": {"a": NaN}}</tool_call>'),
        (QWEN, '<tool_call>{"name": "get_time"}</tool_call>'),
        (QWEN, '<tool_call>{"name": ["get_time"], "arguments": {}}</tool_call>'),
        (QWEN, "<tool_call>[" + "[" * 5000 + "</tool_call>"),
        (QWEN, '<tool_call>\n{"name": "get_time", "arguments": {}}\n'),
        (QWEN, "a <tool_cal"),
        (GLM, "<tool_call>other\n</tool_call>"),
        (GLM, "<tool_call>get_time and more</tool_call>"),
        (GLM, "<tool_call>get_time\n<arg_key>a</arg_key></tool_call>"),
        (
            GLM,
            "<tool_call>get_time<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2"
            "</arg_value></tool_call>",
        ),
        (LLAMA, '{"name": "other", "parameters": {}}'),
        (LLAMA, LLAMA_CALL + " and more"),
        (LLAMA, '{"name": "get_time", "parameters": {}, "x": 1}'),
        (LLAMA, '{"city": 1}'),
        (LLAMA, f"I call {LLAMA_CALL}"),
        (LLAMA, "{" * 70_000),
    ],
)
def test_text_that_is_not_exactly_a_call_remains_text(dialect, text, size):
    assert split(dialect, text, size) == (text, [])


@pytest.mark.parametrize("dialect", [QWEN, GLM, LLAMA])
@given(text=st.text(st.sampled_from("<tool_call>/ \n{}x"), max_size=60), size=st.integers(1, 5))
def test_without_a_call_no_text_is_lost(dialect, text, size):
    if "<tool_call>" not in text:
        assert split(dialect, text, size) == (text, [])
    assert split(dialect, text, size, tools=[]) == (text, [])


@pytest.mark.parametrize(
    ("dialect", "text", "calls"),
    [
        (QWEN, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "北', [("get_weather", '{"city": "北')]),
        (QWEN, '<tool_call>{"name": "get_weather", "arguments": ', [("get_weather", "")]),
        (QWEN, QWEN_CALL[:-14], [("get_weather", '{"city": "北京"}')]),
        (GLM, "<tool_call>get_weather\n<arg_key>ci", [("get_weather", "{")]),
        (GLM, '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>北"<', [("get_weather", '{"city": "北\\"')]),
        (GLM, GLM_CALL.partition("2</arg")[0] + "2</arg_v", [("get_weather", '{"city": "北京", "days": 2')]),
        (GLM, GLM_CALL[:-12], [("get_weather", '{"city": "北京", "days": 2')]),
        (LLAMA, '{"name": "get_weather", "parameters": {"city": "北', [("get_weather", '{"city": "北')]),
        (
            LLAMA,
            f'{LLAMA_CALL}; {{"type": "function", "name": "get_time", "parameters": {{"a',
            [("get_weather", '{"city": "北京"}'), ("get_time", '{"a')],
        ),
    ],
)
def test_a_call_that_is_cut_off_keeps_the_beginning_of_its_arguments(dialect, text, calls):
    stream = dialect.stream(TOOLS)
    shown, found = stream.push(text)
    last, cut = stream.cut_off()
    assert (shown + last, [(call.name, call.arguments) for call in found + cut]) == ("", calls)
    assert not cut[-1].complete
    assert stream.cut_off() == ("", [])


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (QWEN, "a <tool"),
        (QWEN, '<tool_call>\n{"name": "get_'),
        (QWEN, '<tool_call>\n{"name": "other", "arguments": {"a'),
        (QWEN, '<tool_call>\n{"name": "get_time", "arguments": 5'),
        (GLM, "<tool_call>get_"),
        (GLM, "<tool_call>other\n<arg_key>ci"),
        (LLAMA, '{"name": "get_wea'),
        (LLAMA, '{"name": "other", "parameters": {"a'),
        (LLAMA, f"{LLAMA_CALL} and"),
    ],
)
def test_a_cut_off_answer_without_a_known_tool_is_text(dialect, text):
    stream = dialect.stream(TOOLS)
    shown = stream.push(text)[0]
    last, calls = stream.cut_off()
    assert (shown + last, calls) == (text, [])


@given(text=st.text(max_size=20), cut=st.integers(0, 80), dialect=st.sampled_from([QWEN, GLM, LLAMA]))
def test_calls_may_be_cut_off_anywhere(text, cut, dialect):
    written = json.dumps({"city": text}, ensure_ascii=False)
    call = {
        QWEN: f'<tool_call>\n{{"name": "get_weather", "arguments": {written}}}\n</tool_call>',
        GLM: f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        LLAMA: f'{{"name": "get_weather", "parameters": {written}}}',
    }[dialect][:cut]
    stream = dialect.stream(TOOLS)
    shown, found = stream.push(call)
    last, calls = stream.cut_off()
    if found + calls:
        assert shown + last == ""
        assert written.startswith((found + calls)[0].arguments)
    else:
        assert shown + last == call


def test_text_is_shown_as_soon_as_it_cannot_be_a_call():
    stream = QWEN.stream(TOOLS)
    assert [stream.push(char)[0] for char in "a <tb"] == ["a", "", "", "", " <tb"]
    stream = LLAMA.stream(TOOLS)
    assert [stream.push(char)[0] for char in " ab"] == ["", " a", "b"]


@pytest.mark.parametrize(
    ("dialect", "text", "allowed"),
    [
        (QWEN, QWEN_CALL, True),
        (QWEN, QWEN_CALL.replace("city", "days"), False),
        (QWEN, QWEN_CALL.replace("get_weather", "other"), False),
        (QWEN, "text", False),
        (GLM, GLM_CALL, True),
        (GLM, GLM_CALL.replace("\n", ""), True),
        (GLM, GLM_CALL.replace(">2<", ">two<"), False),
        (GLM, "<tool_call>get_weather\n</tool_call>", False),
        (GLM, "<tool_call>get_time</tool_call>", True),
        (GLM, GLM_CALL.replace("days", "unit").replace(">2<", ">C<"), True),
        (GLM, GLM_CALL.replace("days", "unit").replace(">2<", ">K<"), False),
        (LLAMA, LLAMA_CALL, True),
        (LLAMA, LLAMA_CALL.replace("city", "days"), False),
    ],
)
def test_a_forced_call_is_one_that_can_be_read(dialect, text, allowed):
    assert accepted(dialect.grammar(TOOLS), text) == allowed
    if allowed:
        assert len(split(dialect, text, 1000)[1]) == 1
    both = f"{text}\n{text}"
    assert not accepted(dialect.grammar(TOOLS), both)
    assert accepted(dialect.grammar(TOOLS, several=True), both) == (allowed and dialect is not LLAMA)


PAINT = {
    "name": "paint",
    "parameters": {
        "type": "object",
        "$defs": {
            "Color": {"type": "string", "enum": ["red", "blue"]},
            "Point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        },
        "properties": {
            "color": {"$ref": "#/$defs/Color", "description": "of the paint"},
            "at": {"type": "array", "items": {"$ref": "#/$defs/Point"}},
            "kind": {"const": "oil"},
        },
        "required": ["color", "at"],
    },
}


def pairs(name, **values):
    written = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items()]
    return f"<tool_call>{name}\n{''.join(written)}</tool_call>"


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({"color": "red", "at": '[{"x":1}]'}, True),
        ({"color": "blue", "at": "[]", "kind": "oil"}, True),
        ({"color": "green", "at": "[]"}, False),
        ({"color": '"red"', "at": "[]"}, False),
        ({"color": "red", "at": '[{"y":1}]'}, False),
        ({"color": "red", "at": "[]", "kind": "water"}, False),
    ],
)
def test_arguments_may_refer_to_definitions_of_the_tool(values, allowed):
    text = pairs("paint", **values)
    assert accepted(GLM.grammar([PAINT]), text) == allowed
    if allowed:
        [call] = split(GLM, text, 3, [PAINT])[1]
        assert call.name == "paint"
        assert json.loads(call.arguments) == {key: json.loads(v) if key == "at" else v for key, v in values.items()}


def test_grammars_that_definitions_would_make_too_long_are_refused():
    definitions = {f"d{at}": {"items": {"$ref": f"#/$defs/d{at + 1}"}} for at in range(500)}
    properties = {f"p{at}": {"$ref": "#/$defs/d0"} for at in range(900)}
    tool = {"name": "f", "parameters": {"type": "object", "$defs": definitions, "properties": properties}}
    for write in (GLM.grammar, GLM.free_grammar):
        with pytest.raises(UsageError, match="tools: f: its grammar is longer than 131,072 characters"):
            write([tool])
    small = {**tool, "parameters": {**tool["parameters"], "properties": {"p": {"$ref": "#/$defs/d0"}}}}
    with pytest.raises(UsageError, match="tools: f: its grammar"):
        GLM.grammar([small] * 20)


def test_a_text_that_looks_like_another_type_stays_a_text():
    options = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    properties = {"a": options, "b": options, "c": options, "d": {"type": ["string", "integer"]}, "e": {}}
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    [call] = split(GLM, pairs("f", a="123", b="null", c='"1"', d="007", e="5"), 5, [tool])[1]
    assert json.loads(call.arguments) == {"a": "123", "b": None, "c": "1", "d": "007", "e": 5}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("dialect", "call", "broken"),
    [
        (
            QWEN,
            '<tool_call>{"name": "get_weather", "arguments": {"city": "\\"</tool_call>\\\\"}}</tool_call>',
            '<tool_call>{"name": "get_weather", "arguments": {"city": "x}}</tool_call>',
        ),
        (
            GLM,
            '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>"</tool_call>\\</arg_value>\n</tool_call>',
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>x</tool_call>",
        ),
    ],
    ids=["qwen", "glm"],
)
def test_a_closing_tag_may_be_within_an_argument(dialect, call, broken, size):
    assert accepted(
        dialect.grammar([WEATHER]), call.replace("<tool_call>{", "<tool_call>\n{").replace("}</t", "}\n</t")
    )
    shown, calls = split(dialect, f"a{call} b{call}c", size)
    assert shown == "a bc"
    assert [json.loads(each.arguments) for each in calls] == [{"city": '"</tool_call>\\'}] * 2
    if dialect is QWEN:
        shown, calls = split(dialect, f"a{broken}b{call}c", size)
        assert shown == f"a{broken}bc"
        assert len(calls) == 1
    assert split(dialect, broken, size) == (broken, [])


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (QWEN, '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'),
        (LLAMA, '{"name": "f", "parameters": %s}'),
    ],
)
@pytest.mark.parametrize("parameters", [{"properties": {"a": {"type": "integer"}}}, {"type": ["object", "null"]}, {}])
def test_arguments_are_an_object_whatever_the_schema_says(dialect, text, parameters):
    grammar = dialect.grammar([{"name": "f", "parameters": parameters}])
    assert accepted(grammar, text % '{"a":1}')
    assert not accepted(grammar, text % "5")
    assert not accepted(grammar, text % "null")


@pytest.mark.parametrize(
    ("dialect", "call"), [(QWEN, QWEN_CALL), (GLM, GLM_CALL), (LLAMA, LLAMA_CALL)], ids=["qwen", "glm", "llama"]
)
def test_free_text_and_strict_calls(dialect, call):
    grammar = dialect.free_grammar(TOOLS)
    assert accepted(grammar, "a < b, and nothing to call")
    assert accepted(grammar, call)
    assert not accepted(grammar, call.replace("city", "days"))
    if dialect is not LLAMA:
        assert accepted(grammar, f"first this\n{call}\n{call} and then that")
        assert not accepted(grammar, f"first this\n{call.replace('city', 'days')}")
