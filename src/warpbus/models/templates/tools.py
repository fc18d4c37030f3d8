"""Tool dialects by chat template, and what is shared by those that Jinja templates declare."""

from __future__ import annotations

import re

from warpbus.models.templates.base import Template
from warpbus.models.templates.chatglm import RoleTokenTemplate
from warpbus.models.templates.chatglm3_tools import ChatGLM3Tools
from warpbus.models.templates.dialect import AnswerStream, Tool, ToolCall, ToolDialect, Turn
from warpbus.models.templates.glm4_tools import HEADING, GLM4Tools
from warpbus.models.templates.jinja import JinjaTemplate
from warpbus.models.templates.llama_tools import LlamaTools
from warpbus.models.templates.tagged_tools import ArgumentTagTools, JsonTagTools

__all__ = [
    "AnswerStream",
    "ArgumentTagTools",
    "ChatGLM3Tools",
    "GLM4Tools",
    "JsonTagTools",
    "LlamaTools",
    "Tool",
    "ToolCall",
    "ToolDialect",
    "Turn",
    "find_dialect",
]

# A template that reads the key `tools` of a message, as glm-4-9b-chat's.
_TOOLS_OF_MESSAGE = re.compile(r"""\w\[\s*['"]tools['"]\s*\]""")


def find_dialect(template: Template) -> ToolDialect | None:
    """The dialect of a model by its template; None if it knows no tools."""
    if isinstance(template, RoleTokenTemplate):
        return GLM4Tools() if template.sop == "<sop>" else ChatGLM3Tools()
    if not isinstance(template, JinjaTemplate):
        return None
    source = template.tools_source
    if HEADING in source and "metadata" in source:
        return GLM4Tools("message" if _TOOLS_OF_MESSAGE.search(source) else "variable")
    if "tools" not in source:
        return None
    if "<tool_call>" in source and "<arg_key>" in source:
        return ArgumentTagTools()
    if "<tool_call>" in source and "arguments" in source and "<function=" not in source:
        return JsonTagTools()
    if "Environment: ipython" in source and "parameters" in source:
        return LlamaTools()
    return None
