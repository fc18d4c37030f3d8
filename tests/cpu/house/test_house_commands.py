"""Every command that the documents show can be given, and every flag that they or an error name is there."""

import ast
import json
import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer

from warpbus.cli import app

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "src" / "warpbus"
SOURCES = sorted(PACKAGE.rglob("*.py"))
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("README.md")})
COMMAND: Any = typer.main.get_command(app)

FENCE = re.compile(r"^ *```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
SHELL = ("|", "||", ">", "&", "&&")

# Of scripts in benchmarks/, of compute-sanitizer, of Ray's own command, and of what installs Warpbus.
OTHERS = {"--kill", "--llama", "--minutes", "--small", "--tool", "--train", "--vllm", "--head"}
OTHERS |= {
    "--queue",
    "--sequences",
    "--cache-tokens",
    "--patience",
    "--model",
    "--runs",
    "--schemes",
    "--peers",
    "--peer-python",
    "--jobs",
}
OTHERS |= {"--build-arg", "--extra-index-url", "--index-url", "--pip-args", "--torch-backend"}


def options(command: Any) -> set[str]:
    """The flags of a command itself."""
    return {"--help", *(name for option in command.params for name in (*option.opts, *option.secondary_opts))}


def all_options(command: Any) -> set[str]:
    return options(command).union(*(all_options(each) for each in getattr(command, "commands", {}).values()))


def verb(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the first words name, and the others."""
    command = COMMAND
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def recorded() -> Iterator[tuple[str, str]]:
    """The records' files, and what they say how to measure it again."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        for command in sorted({record["command"] for record in json.loads(path.read_text(encoding="utf-8"))}):
            if command.startswith("warpbus "):
                yield path.name, command


def shown() -> Iterator[tuple[str, str]]:
    """Documents, and the commands in their blocks of code."""
    for document in DOCUMENTS:
        for block in FENCE.findall(document.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                if re.match(r"[ $]*(?:\w+=\S+ +)*(?:\.venv/bin/)?warpbus ", line):
                    yield document.name, line.strip()


def mentioned(text: str) -> list[str]:
    """What text, a document's without blocks or a source's, says between backticks."""
    return [" ".join(span.replace('"', " ").split()) for span in SPAN.findall(text)]


def without_blocks(document: Path) -> str:
    return FENCE.sub("", document.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("document", "line"), sorted({*shown(), *recorded()}))
def test_a_command_that_is_shown_can_be_given(document: str, line: str) -> None:
    words = takewhile(lambda word: word not in SHELL, shlex.split(line, comments=True))
    plain = [word.strip("[]") for word in words if word not in ("...", "--help")]  # `[--flag]` may be left out
    first = next(index for index, word in enumerate(plain) if word.endswith("warpbus"))
    command, rest = verb(plain[first + 1 :])
    assert rest or not hasattr(command, "commands"), line
    command.make_context("warpbus", rest)  # raises where a verb, a flag or an argument is not there


def test_a_command_that_is_mentioned_has_its_verb_and_flags() -> None:
    texts = {document: without_blocks(document) for document in DOCUMENTS}
    texts |= {source: source.read_text(encoding="utf-8") for source in SOURCES}
    found = [(path.name, span) for path, text in texts.items() for span in mentioned(text) if span[:8] == "warpbus "]
    assert len(found) > 100
    wrong = []
    for name, span in found:
        command, rest = verb(span.split()[1:])
        unknown = {flag for word in takewhile(lambda word: word != "--", rest) for flag in FLAG.findall(word)}
        if unknown - options(command) or (hasattr(command, "commands") and re.match("[a-z]", "".join(rest))):
            wrong.append((name, span))
    assert wrong == []


def test_a_flag_that_is_mentioned_is_one_of_some_verb() -> None:
    known = all_options(COMMAND)
    spans = [span for document in DOCUMENTS for span in mentioned(without_blocks(document))]
    raised = [
        node for source in SOURCES for node in ast.walk(ast.parse(source.read_bytes())) if type(node) is ast.Raise
    ]
    said = [part.value for node in raised for part in ast.walk(node) if isinstance(part, ast.Constant)]
    found = {flag for text in (*spans, *said) if isinstance(text, str) for flag in FLAG.findall(text)}
    assert len(found) > 50
    assert found - known <= OTHERS
