"""Tools in prompts, and calls in answers, of ChatGLM3 and GLM-4."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_files import write_byte_level

from warpbus.errors import UsageError
from warpbus.models.templates import JinjaTemplate, QueryTemplate, RoundTemplate
from warpbus.models.templates.tools import ChatGLM3Tools, GLM4Tools, ToolCall, Turn, find_dialect
from warpbus.models.tokenizers import load_tokenizer

WEATHER = {
    "name": "get_weather",
    "description": "今天的天气",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME = {"name": "get_time"}
PYTHON = {"name": "python", "description": "runs Python"}
INTERPRETER = {"name": "interpreter", "description": "runs Python", "parameters": {"properties": {"code": {}}}}
GLM4, GLM3 = GLM4Tools(), ChatGLM3Tools()
NAMES = ("get_weather", "get_time")


def split(dialect, text, size, names=NAMES):
    stream = dialect.stream([{"name": name} for name in names])
    pieces = [stream.push(text[at : at + size]) for at in range(0, len(text), size)]
    pieces.append(stream.flush())
    return "".join(shown for shown, _ in pieces), [call for _, calls in pieces for call in calls]


def test_glm4_is_reported_of_tools_in_a_system_message():
    [head, question] = GLM4.render_tools([Turn("user", "北京？")], [WEATHER, TIME])
    assert head["role"] == "system"
    assert head["content"].startswith('# 可用工具\n\n## get_weather\n\n{\n    "name": "get_weather"')
    assert head["content"].count("在调用上述函数时，请使用 Json 格式表示调用的参数。") == 2
    assert "今天的天气" in head["content"]
    assert question == {"role": "user", "content": "北京？"}


def test_chatglm3_is_reported_of_tools_as_a_list():
    [head, _] = GLM3.render_tools([Turn("user", "a")], [WEATHER])
    first, _, listed = head["content"].partition("\n")
    assert first == ("Answer the following questions as best as you can. You have access to the following tools:")
    assert json.loads(listed) == [WEATHER]


@pytest.mark.parametrize("dialect", [GLM3, GLM4])
def test_without_tools_there_is_no_system_message(dialect):
    turns = [Turn("system", "s"), Turn("user", "u"), Turn("assistant", "a")]
    assert dialect.render_tools(turns, []) == [{"role": turn.role, "content": turn.content} for turn in turns]


@pytest.mark.parametrize(
    ("dialect", "written"),
    [
        (GLM4, '{"city": "北京", "days": 2}'),
        (GLM3, " ```python\ntool_call(city='北京', days=2)\n```"),
    ],
)
def test_calls_of_the_past_are_rendered_back(dialect, written):
    turns = [
        Turn("user", "u"),
        Turn("assistant", "let me see", (ToolCall("get_weather", '{"city": "北京", "days": 2}'),)),
        Turn("tool", "晴"),
    ]
    assert dialect.render_tools(turns, [])[1:] == [
        {"role": "assistant", "content": "let me see"},
        {"role": "assistant", "metadata": "get_weather", "content": written},
        {"role": "observation", "content": "晴"},
    ]
    # What was rendered is what would be read.
    assert [json.loads(call.arguments) for call in dialect.read("get_weather\n" + written, NAMES)] == [
        {"city": "北京", "days": 2}
    ]


@pytest.mark.parametrize("dialect", [GLM3, GLM4])
@pytest.mark.parametrize("arguments", ["[]", "{", "NaN", '{"a": NaN}', "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(dialect, arguments):
    with pytest.raises(UsageError, match=r"get_time.*JSON object"):
        dialect.render_tools([Turn("assistant", "", (ToolCall("get_time", arguments),))], [])


def test_a_call_without_arguments_is_rendered_as_one_with_an_empty_object():
    for dialect in (GLM3, GLM4):
        empty, nothing = (
            dialect.render_tools([Turn("assistant", "", (ToolCall("get_time", arguments),))], [])
            for arguments in ("{}", "")
        )
        assert nothing == empty


def test_chatglm3_refuses_arguments_that_it_cannot_write():
    with pytest.raises(UsageError, match="two words"):
        GLM3.render_tools([Turn("assistant", "", (ToolCall("get_time", '{"two words": 1}'),))], [])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("dialect", "text", "calls"),
    [
        (GLM4, 'get_weather\n{"city": "北京"}', [("get_weather", {"city": "北京"})]),
        (GLM4, 'get_weather \n\n {"city":\n "x"}\n', [("get_weather", {"city": "x"})]),
        (GLM4, 'get_time\n{}\nget_weather\n{"a": [1, {}]}', [("get_time", {}), ("get_weather", {"a": [1, {}]})]),
        (GLM4, 'get_weather\n{"city": "a\n\tb"}', [("get_weather", {"city": "a\n\tb"})]),
        (
            GLM3,
            "get_weather\n ```python\ntool_call(city='北京', n=-1, l=[1, {'a': None}], t=True)\n```",
            [("get_weather", {"city": "北京", "n": -1, "l": [1, {"a": None}], "t": True})],
        ),
        (GLM3, "get_time\n```python\ntool_call()\n```", [("get_time", {})]),
        (GLM3, 'get_weather\n ```python\ntool_call(city="it\'s\\n")\n``` ', [("get_weather", {"city": "it's\n"})]),
    ],
)
def test_calls_are_read(dialect, text, calls, size):
    shown, found = split(dialect, text, size)
    assert shown == ""
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (GLM4, "get_weather is a function"),
        (GLM4, "get_weather"),
        (GLM4, 'get_weather\n{"city": "北京"'),
        (GLM4, 'get_weather\n{"city": "北京"} and more'),
        (GLM4, 'get_weather\n{"city": "北京"}\nother\n{}'),
        (GLM4, "get_weather\n[1]"),
        (GLM4, 'get_weather\n{"a": NaN}'),
        (GLM4, 'other\n{"city": 1}'),
        (GLM4, "get_weather\n{" + '"a":{' * 2000),
        (GLM3, "get_weather\n ```python\ntool_call(city=open('/etc/passwd'))\n```"),
        (GLM3, "get_weather\n ```python\ntool_call('北京')\n```"),
        (GLM3, "get_weather\n ```python\ntool_call(**{'a': 1})\n```"),
        (GLM3, "get_weather\n ```python\nother(a=1)\n```"),
        (GLM3, "get_weather\n ```python\ntool_call(a=1); tool_call(b=2)\n```"),
        (GLM3, "get_weather\n ```python\ntool_call(a=1e999)\n```"),
        (GLM3, "get_weather\n ```python\ntool_call(a={1, 2})\n```"),
        (GLM3, "get_weather\n ```python\ntool_call(a=1, a=2)\n```"),
        (GLM3, "get_weather\n ```python\ntool_call(a=" + "(" * 5000 + ")\n```"),
        (GLM3, "get_weather\ntool_call(a=1)"),
        (GLM3, "interpreter\n```python\nprint(1)\n```"),
    ],
)
def test_what_is_not_exactly_a_call_stays_text(dialect, text, size):
    assert split(dialect, text, size) == (text, [])


@pytest.mark.parametrize("dialect", [GLM3, GLM4])
@pytest.mark.parametrize("names", [NAMES, ()])
def test_the_empty_first_line_of_an_answer_is_not_shown(dialect, names):
    assert split(dialect, "\n 你好\nget_time\n{}", 1, names) == ("你好\nget_time\n{}", [])


@pytest.mark.parametrize(
    ("dialect", "text", "calls"),
    [
        (GLM4, 'get_weather\n{"city": "北', [("get_weather", '{"city": "北', False)]),
        (GLM4, 'get_weather\n{"city": "北"}', [("get_weather", '{"city": "北"}', True)]),
        (GLM4, "get_weather\n", [("get_weather", "", False)]),
        (GLM4, 'get_time\n{}\nget_weather\n{"c', [("get_time", "{}", True), ("get_weather", '{"c', False)]),
        (GLM4, 'python\nprint("', [("python", '{"code": "print(\\"', False)]),
        (GLM4, 'python\n{"code": "pri', [("python", '{"code": "pri', False)]),
        (GLM3, "get_weather\n ```python\ntool_call(city='北", [("get_weather", "", False)]),
        (GLM3, "get_weather\n ``", [("get_weather", "", False)]),
        (GLM3, "get_time\n ```python\ntool_call()\n```", [("get_time", "{}", True)]),
        (GLM3, "interpreter\n ```python\nprint(1)\n``", [("interpreter", '{"code": "print(1)\\n', False)]),
    ],
)
def test_a_call_that_is_cut_off_keeps_the_beginning_of_its_arguments(dialect, text, calls):
    stream = dialect.stream([WEATHER, TIME, PYTHON, INTERPRETER])
    assert stream.push(text) == ("", [])
    shown, found = stream.cut_off()
    assert (shown, [(call.name, call.arguments, call.complete) for call in found]) == ("", calls)
    assert stream.cut_off() == ("", [])


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (GLM4, "get_wea"),
        (GLM4, "get_weather"),
        (GLM4, "get_weather\nis a tool"),
        (GLM4, "get_weather\n[1"),
        (GLM3, "get_weather\nis a tool"),
        (GLM3, "get_weather\n ```c\nx"),
    ],
)
def test_a_cut_off_answer_that_is_no_call_is_text(dialect, text):
    stream = dialect.stream([WEATHER, TIME])
    shown = stream.push(text)[0]
    last, calls = stream.cut_off()
    assert (shown + last, calls) == (text, [])


def test_text_is_shown_as_soon_as_it_cannot_be_a_call():
    stream = GLM4.stream([WEATHER, TIME])
    assert [stream.push(char)[0] for char in "get me"] == ["", "", "", "", "get m", "e"]
    stream = GLM4.stream([WEATHER, TIME])
    assert [stream.push(char)[0] for char in "\nget_time"] == ["", *"get_time"]


@given(st.text(), st.integers(1, 5))
def test_no_text_is_lost(text, size):
    shown, calls = split(GLM4, text, size)
    assert calls == []
    assert shown == text.lstrip()


def test_forced_calls_have_a_grammar():
    grammar = GLM4.grammar([WEATHER, TIME])
    assert grammar.splitlines()[0] == "start: tool0 | tool1"
    assert '"get_weather\\n" %json {"type": "object"' in grammar
    blanks = '"x-guidance": {"whitespace_pattern": "[ ]?"}'
    assert GLM4.grammar([TIME]) == f'start: tool0\ntool0: "get_time\\n" %json {{"type": "object", {blanks}}}'
    assert GLM4.grammar([PYTHON]) == 'start: tool0\ntool0: "python\\n" /(.|\\n)+/'
    with pytest.raises(UsageError, match="cannot be made to run code: give auto, or tools other than interpreter"):
        GLM3.grammar([TIME, INTERPRETER])
    with pytest.raises(UsageError, match="tools: f: ChatGLM3 cannot write the argument's name 'two words'"):
        GLM3.grammar([{"name": "f", "parameters": {"properties": {"two words": {}}}}])


def test_a_grammar_grows_with_the_tool():
    sizes = [
        len(GLM3.grammar([{"name": "f", "parameters": {"properties": {f"a{i:04}": {} for i in range(count)}}}]))
        for count in (100, 1000)
    ]
    assert sizes[1] < 11 * sizes[0]


FORECAST = {
    "name": "forecast",
    "parameters": {
        "type": "object",
        "properties": {
            "days": {"type": "integer"},
            "city": {"type": "string"},
            "unit": {"enum": ["C", "it's  F"]},
            "more": {"type": "object"},
        },
        "required": ["city"],
    },
}
SWITCH = {
    "name": "switch",
    "parameters": {"properties": {"on": {"type": "boolean"}, "at": {}, "by": {"type": "number"}}},
}


@pytest.mark.parametrize(
    ("dialect", "text", "allowed"),
    [
        (GLM4, 'forecast\n{"city":"北京"}', True),
        (GLM4, 'forecast\n{"days":1}', False),
        (GLM4, "switch\n{}", True),
        (GLM4, "other\n{}", False),
        (GLM3, "forecast\n ```python\ntool_call(city='北京')\n```", True),
        (GLM3, " forecast\n ```python\ntool_call(city='it\\'s', days=-3, more={'a': [1, None], 'b': {}})\n```", True),
        (GLM3, "forecast\n ```python\ntool_call(city='x', unit=\"it's  F\")\n```", True),
        (GLM3, "forecast\n ```python\ntool_call(city='x', unit='K')\n```", False),
        (GLM3, "forecast\n ```python\ntool_call(days=3)\n```", False),
        (GLM3, "forecast\n ```python\ntool_call(city=1)\n```", False),
        (GLM3, "forecast\n ```python\ntool_call(city=open('x'))\n```", False),
        (GLM3, "switch\n ```python\ntool_call()\n```", True),
        (GLM3, "switch\n ```python\ntool_call(on=True, by=1.5)\n```", True),
        (GLM3, "switch\n ```python\ntool_call(at=[True, 'x'], by=-2)\n```", True),
        (GLM3, "switch\n ```python\ntool_call(on=True, at=1, by=2)\n```", True),
        (GLM3, "switch\n ```python\ntool_call(by=2)\n```", True),
        (GLM3, "switch\n ```python\ntool_call(by=1, on=True)\n```", False),
        (GLM3, "switch\n ```python\ntool_call(on=True, on=True)\n```", False),
        (GLM3, "get_time\n ```python\ntool_call()\n```", True),
        (GLM3, "get_time\n ```python\ntool_call(a=1)\n```", False),
    ],
)
def test_a_forced_call_is_one_that_can_be_read(dialect, text, allowed):
    llguidance = pytest.importorskip("llguidance")
    grammar = llguidance.LLMatcher.grammar_from_lark(dialect.grammar([FORECAST, SWITCH, TIME]))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    taken = matcher.validate_tokens(tokens)
    assert (taken == len(tokens)) == allowed
    if allowed:
        assert matcher.consume_tokens(tokens)
        assert matcher.is_accepting()
        [call] = dialect.read(text, ("forecast", "switch", "get_time"))
        assert isinstance(json.loads(call.arguments), dict)


def test_code_interpreters_are_reported_apart_from_functions():
    [head, _] = GLM4.render_tools([Turn("user", "u")], [TIME, PYTHON])
    assert head["content"].endswith("\n\n## python\n\nruns Python")
    assert head["content"].count("## ") == 2
    [head, _] = GLM3.render_tools([Turn("user", "u")], [TIME, INTERPRETER])
    assert head["content"].startswith("runs Python\nAnswer the following questions")
    assert "interpreter" not in head["content"]
    # One that wants something else than code is a function like others.
    other = {**INTERPRETER, "parameters": {"properties": {"line": {"type": "integer"}}}}
    assert '"interpreter"' in GLM3.render_tools([Turn("user", "u")], [other])[0]["content"]
    # Without a description there is nothing to say.
    assert GLM3.render_tools([Turn("user", "u")], [{"name": "interpreter"}]) == [{"role": "user", "content": "u"}]


CODE = "import math\nprint({1: 'a'})\n```\nprint(2)"


@pytest.mark.parametrize(
    ("dialect", "name", "written"),
    [(GLM3, "interpreter", f" ```python\n{CODE}\n```"), (GLM4, "python", CODE)],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_code_is_read_and_rendered_back(dialect, name, written, size):
    shown, [call] = split(dialect, f"{name}\n{written}", size, (*NAMES, name))
    assert (shown, call.name, json.loads(call.arguments)) == ("", name, {"code": CODE})
    [message] = dialect.render_tools([Turn("assistant", "", (call,))], [])
    assert message == {"role": "assistant", "metadata": name, "content": written}
    # Where it was not offered, it is text.
    assert split(dialect, f"{name}\n{written}", size) == (f"{name}\n{written}", [])


@pytest.mark.parametrize("size", [1, 1000])
def test_messages_of_one_answer_are_apart(size):
    stream = GLM4.stream([WEATHER, TIME])
    shown, calls = "", []
    for message in ("\n好的。", 'get_weather\n{"city": "x"}', "get_time\n{}", "\n 再见", "get_time"):
        shown += "".join(stream.push(message[at : at + size])[0] for at in range(0, len(message), size))
        text, found = stream.turn()
        shown += text
        calls += found
    assert shown == "好的。\n再见\nget_time"
    assert [(call.name, call.arguments) for call in calls] == [("get_weather", '{"city": "x"}'), ("get_time", "{}")]
    assert stream.flush() == ("", [])


# As GLM-4's checkpoints bring them: with a place for tools and for the metadata of a message. The first is of
# glm-4-9b-chat's form, the second of GLM-4-0414's, which puts system messages first.
BROUGHT = (
    "[gMASK]<sop>{% for item in messages %}{% if item['tools'] is defined %}<|system|>\n# 可用工具"
    "{% for tool in item['tools'] %}{{ tool['function'] | tojson(indent=4) }}{% endfor %}{% endif %}"
    "{% if item['content'] %}<|{{ item['role'] }}|>{{ item['metadata'] }}\n{{ item['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "[gMASK]<sop>{%- if tools -%}<|system|>\n# 可用工具{{ tools | tojson(indent=4, ensure_ascii=False) }}{%- endif -%}"
    "{%- for m in messages if m.role == 'system' %}<|system|>\n{{ m.content }}{%- endfor %}"
    "{%- for m in messages if m.role != 'system' %}{%- set metadata = m.get('metadata', '') %}"
    "<|{{ m.role }}|>{{ metadata }}\n{{ m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}",
)


@pytest.mark.parametrize("source", BROUGHT)
def test_templates_that_glm4_brings_declare_the_tools_themselves(tmp_path, source):
    tokenizer = load_tokenizer(write_byte_level(tmp_path))
    special = tokenizer.special_ids
    template = JinjaTemplate(source, tokenizer, name="brought", variables={}, stop_ids=(), end_id=None)
    dialect = find_dialect(template)
    assert isinstance(dialect, GLM4Tools)
    turns = [
        Turn("system", "简短"),
        Turn("user", "<|observation|>"),
        Turn("assistant", "", (ToolCall("get_time", "{}"), ToolCall("python", '{"code": "1 + 1"}'))),
        Turn("tool", "2"),
        Turn("tool", "正午"),
    ]
    messages = dialect.render_tools(turns, [TIME])
    if source is BROUGHT[0]:
        reported = json.dumps(TIME, ensure_ascii=False, indent=4)
    else:
        reported = json.dumps([{"type": "function", "function": TIME}], ensure_ascii=False, indent=4)
    expected = [special["[gMASK]"], special["<sop>"]]
    for role, text in (
        ("system", f"\n# 可用工具{reported}"),
        ("system", "\n简短"),
        ("user", "\n<|observation|>"),
        ("assistant", "get_time\n{}"),
        ("assistant", "python\n1 + 1"),
        ("observation", "\n2"),
        ("observation", "\n正午"),
    ):
        expected += [special[f"<|{role}|>"], *tokenizer.encode(text)]
    ids = template.render(messages, variables=dialect.variables([TIME]))
    assert ids == [*expected, special["<|assistant|>"]]


def test_glm4s_code_interpreter_is_declared_by_its_template():
    assert GLM4Tools("message").render_tools([Turn("user", "u")], [TIME, PYTHON])[0] == {
        "role": "system",
        "content": "",
        "tools": [{"type": "function", "function": TIME}, {"type": "python"}],
    }


def test_models_that_know_no_tools_have_no_dialect():
    assert find_dialect(RoundTemplate.__new__(RoundTemplate)) is None
    assert find_dialect(QueryTemplate.__new__(QueryTemplate)) is None


@pytest.mark.parametrize(
    ("dialect", "text", "arguments"),
    [
        (GLM3, "get_time\n```python\ntool_call(x='\\ud800')\n```", '{"x": "\\ud800"}'),
        (GLM4, 'get_time\n{"x": "\\ud800\n"}', '{"x": "\\ud800\\n"}'),
        (GLM3, "get_time\n```\ntool_call(x=1e999)\n```", None),
        (GLM4, 'get_time\n{"x": 1e999, "y": "\n"}', None),
        (GLM3, f"get_time\n```\ntool_call(x=0x{'f' * 60_000})\n```", None),
        (GLM4, f'get_time\n{{"x": {"9" * 60_000}}}', None),
        (GLM3, f"get_time\n```\n{' ' * 60_000}x", None),
    ],
)
def test_calls_become_json_that_can_be_sent(dialect, text, arguments):
    _, calls = split(dialect, text, len(text))
    assert [call.arguments for call in calls] == ([] if arguments is None else [arguments])
    assert all(call.arguments.encode() and json.loads(call.arguments) for call in calls)


@pytest.mark.parametrize("dialect", [GLM3, GLM4])
def test_nests_of_any_depth_are_read_or_stay_text(dialect):
    for depth in (*range(100, 1000, 100), *range(900, 1000)):
        nest = "[" * depth + "]" * depth
        written = f'{{"x": {nest}}}' if dialect is GLM4 else f"```\ntool_call(x={nest})\n```"
        text, calls = split(dialect, f"get_time\n{written}", 10_000)
        assert bool(text) != bool(calls)
