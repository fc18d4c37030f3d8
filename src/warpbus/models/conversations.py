"""Conversations of data files, in the form of OpenAI's API or of ShareGPT, as messages for a chat template."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from warpbus.errors import UsageError
from warpbus.models.templates import JinjaTemplate, Message, Template
from warpbus.models.templates.base import Variables, check_messages
from warpbus.models.templates.dialect import TemplateTools
from warpbus.models.templates.tools import Tool, ToolCall, ToolDialect, Turn, find_dialect

# ShareGPT's names for the roles, and those of OpenAI's API.
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    **{role: role for role in ("system", "user", "assistant", "tool")},
}


def find_messages(record: Mapping[str, Any]) -> list[Any] | None:
    """The messages of a line of a data file, in the form of OpenAI's API, or None if the line has none.

    Args:
        record: the messages are a list under `messages` or `conversations`, each `{"role": ..., "content": ...}` or
            ShareGPT's `{"from": ..., "value": ...}`. There `function_call` has the text of a JSON object with `name`
            and `arguments`, or of a list of those, and `system` of the line is the first message.

    Raises:
        UsageError: a message of ShareGPT has an unknown role or is malformed.
    """
    name = "messages" if record.get("messages") is not None else "conversations"
    messages = record.get(name)
    if not isinstance(messages, list):
        return None
    found = [_from_sharegpt(f"{name}[{index}]", message) for index, message in enumerate(messages)]
    if name == "conversations" and record.get("system"):
        if found and isinstance(found[0], Mapping) and found[0].get("role") == "system":
            raise UsageError("system: conversations has a message of the role system, too: give one of them")
        found.insert(0, {"role": "system", "content": record["system"]})
    return found


def _from_sharegpt(where: str, message: Any) -> Any:
    if not isinstance(message, Mapping) or "from" not in message:
        return message
    name, value = message["from"], message.get("value")
    role = _SHAREGPT_ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise UsageError(
            f"{where}: from is {str(name)[:40]!r}: expected human, gpt, system, function_call, observation or tool"
        )
    if not isinstance(value, str):
        found = type(value).__name__ if "value" in message else "none"
        raise UsageError(f"{where}: expected a text as value, found {found}")
    others = {key: content for key, content in message.items() if key not in ("from", "value")}
    if name != "function_call":
        return {**others, "role": role, "content": value}
    calls = _parsed(value)
    listed = calls if isinstance(calls, list) else [calls]
    if not listed or not all(isinstance(call, Mapping) for call in listed):
        raise UsageError(
            f"{where}: expected the JSON object {{'name': ..., 'arguments': ...}} as value of function_call, found "
            f"{value[:60]!r}"
        )
    return {**others, "role": role, "content": "", "tool_calls": listed}


def _parsed(text: str) -> Any:
    """The JSON value of a text, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def template_inputs(
    messages: Sequence[Any], tools: Any, template: Template, *, learned: bool = True
) -> tuple[list[Message], Variables]:
    """Messages and variables for `Template.spans`.

    A conversation with tools becomes what the server makes of it: tools are declared and calls are written as the model
    has learned it.

    Args:
        messages: `{"role": ..., "content": ...}`. The content is a text, a list of `{"type": "text", "text": ...}`, or
            with `tool_calls` null. The arguments of a call are the text of a JSON object, or the object. The thinking
            is `reasoning_content` or `reasoning`.
        tools: the tools of the conversation in OpenAI's form, as a list or the text of one in JSON, or None.
        template: of the model.
        learned: whether all answers are learned, so that one whose `weight` is not 1 is refused.

    Raises:
        UsageError: a message or a tool is malformed, or the model has not learned to call tools.
    """
    if learned:
        _check_weights(messages)
    plain = [_plain(message) for message in messages]
    offered = _tools(tools)
    called = any(isinstance(message, Mapping) and message.get("tool_calls") for message in plain)
    if not offered and not called:
        return plain, {}
    check_messages(plain)
    dialect: ToolDialect | TemplateTools | None = find_dialect(template)
    if dialect is None:
        # Most templates take tools in OpenAI's form, also those whose calls Warpbus cannot find in an answer.
        source = ""
        if isinstance(template, JinjaTemplate):
            source = template.tools_source if offered else template.source
        for name, used in (("tools", offered), ("tool_calls", called)):
            if used and name not in source:
                raise UsageError(f"{name}: the chat template of the model has no tools: leave them out")
        dialect = TemplateTools()
    turns = [_turn(index, message) for index, message in enumerate(plain)]
    return dialect.render_tools(turns, offered), dialect.variables(offered)


def _check_weights(messages: Sequence[Any]) -> None:
    for index, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("weight", 1) != 1:
            raise UsageError(
                f"messages[{index}]: weight is {str(message['weight'])[:40]}: every answer is learned: end the "
                "conversation before it, or leave it out"
            )


def _plain(message: Any) -> Any:
    """A message with its content as one text; what is none remains as it is, for the template's own check."""
    if not isinstance(message, Mapping):
        return message
    content, role = message.get("content"), message.get("role")
    if content is None and message.get("tool_calls"):
        content = ""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    # Null stands for a missing field where a data set has the same fields in all lines.
    given = {key: value for key, value in message.items() if value is not None}
    if "reasoning" in given:  # as in answers of vLLM
        given.setdefault("reasoning_content", given.pop("reasoning"))
    changed = {} if content is None else {"content": content}
    return {**given, **changed, **({"role": "system"} if role == "developer" else {})}


def _turn(index: int, message: Mapping[str, Any]) -> Turn:
    role = "tool" if message["role"] == "observation" else message["role"]
    calls = message.get("tool_calls") or []
    if calls and role != "assistant":
        raise UsageError(f"messages[{index}]: only messages of the role assistant have tool_calls")
    if not isinstance(calls, list):
        raise UsageError(f"messages[{index}]: expected a list as tool_calls, found {type(calls).__name__}")
    return Turn(
        role, message["content"], tuple(_call(index, call) for call in calls), message.get("reasoning_content", "")
    )


def _call(index: int, call: Any) -> ToolCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise UsageError(
            f"messages[{index}]: tool_calls: expected {{'function': {{'name': ..., 'arguments': ...}}}}, found "
            f"{str(call)[:60]}"
        )
    arguments = function.get("arguments") or "{}"
    return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _tools(tools: Any) -> list[Tool]:
    if not tools:
        return []
    if isinstance(tools, str):
        if not tools.strip():
            return []
        listed = _parsed(tools)
        if not isinstance(listed, list):
            raise UsageError(f"tools: expected a list, or a text that is one in JSON, found {tools[:60]!r}")
        tools = listed
    if not isinstance(tools, list):
        raise UsageError(f"tools: expected a list, found {type(tools).__name__}")
    found: list[Tool] = []
    for index, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UsageError(
                f"tools[{index}]: expected {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}, "
                f"found {str(tool)[:60]}"
            )
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise UsageError(f"tools[{index}]: expected a JSON schema as parameters of {function['name'][:60]}")
        found.append({key: function[key] for key in ("name", "description", "parameters") if function.get(key)})
    return found
