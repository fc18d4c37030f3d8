"""Help and usage errors in Chinese: texts from the catalogue, and lines that are broken where Chinese may be."""

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from rich.cells import cell_len

from warpbus.language import translated

_GAP = 2  # columns between an option and its text
_LEAST_WIDTH = 20  # of the text of an option
_NOT_FIRST = "，。；：、？！）」』”’…%])"  # characters that do not begin a line
_NOT_LAST = "（「『“‘[("  # and those that do not end one
# The remark that click adds to the help of an option.
_REMARK = re.compile(r"^(?P<help>.*?) {0,2}\[(?P<remark>[^\[\]]*)\]$", re.DOTALL)

# The errors of a command line. Newer versions of typer contain the module that defines them, older ones import it.
_UsageError: Any = next(each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException")


def run(app: typer.Typer, name: str) -> None:
    """Run the program with Chinese help, and exit as it would."""
    command: Any = typer.main.get_command(app)
    translate_command(command)
    try:
        code = command.main(prog_name=name, standalone_mode=False)
    except _UsageError as error:
        _show(error)
        sys.exit(error.exit_code)
    except typer.Abort:
        print(translated("Aborted."), file=sys.stderr)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _show(error: Any) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command: its message is its help
        error.show()
        return
    context = getattr(error, "ctx", None)
    if context is not None:
        print(context.get_usage(), file=sys.stderr)
        hint = f"Try '{context.command_path} {context.help_option_names[0]}' for help."
        print(translated(hint) + "\n", file=sys.stderr)
    print(translated(f"Error: {error.format_message()}"), file=sys.stderr)


def translate_command(command: Any) -> None:
    """Translate the help of a command (click's, which newer versions of typer contain) and of all commands in it."""
    paragraphs = (command.help or "").split("\n\n")  # whose lines are broken as in the source
    command.help = translated("\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))
    for parameter in command.params:
        if getattr(parameter, "help", None):
            parameter.help = translated(parameter.help)
    context = command.context_class
    formatter = type("ChineseFormatter", (context.formatter_class,), _METHODS)
    command.context_class = type("ChineseContext", (context,), {"formatter_class": formatter})
    for inner in getattr(command, "commands", {}).values():
        translate_command(inner)


def _write_usage(self: Any, prog: str, args: str = "", prefix: str | None = None) -> None:
    start = translated("Usage:") + prog + " "
    self.write("\n".join(wrapped(args, self.width, start, " " * cell_len(start))) + "\n")


def _write_heading(self: Any, heading: str) -> None:
    self.write(f"{' ' * self.current_indent}{translated(heading)}：\n")


def _write_text(self: Any, text: str) -> None:
    indent = " " * self.current_indent
    for paragraph in text.split("\n\n"):
        self.write("\n".join(wrapped(" ".join(paragraph.split()), self.width, indent, indent)) + "\n")
        if paragraph != text.split("\n\n")[-1]:
            self.write("\n")


def _write_dl(self: Any, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = _GAP) -> None:
    rows = list(rows)
    widest = min(max((cell_len(name) for name, _ in rows), default=0), col_max)
    column = min(widest + col_spacing + self.current_indent, self.width - _LEAST_WIDTH)
    for name, text in rows:
        start = " " * self.current_indent + name
        if cell_len(start) + col_spacing > column:
            self.write(start + "\n")
            start = ""
        start += " " * (column - cell_len(start))
        self.write("\n".join(wrapped(_with_remark(text), self.width, start, " " * column)).rstrip() + "\n")


_METHODS = {
    "write_usage": _write_usage,
    "write_heading": _write_heading,
    "write_text": _write_text,
    "write_dl": _write_dl,
}


def _with_remark(text: str) -> str:
    """The help of an option with what click adds to it, such as its default."""
    found = _REMARK.match(text)
    if found is None:
        return translated(text)
    remarks = "；".join(translated(each) for each in found["remark"].split("; "))
    return f"{translated(found['help'])} [{remarks}]".strip()


def wrapped(text: str, width: int, first: str, following: str) -> Iterator[str]:
    """Lines of at most `width` columns: `first` and `following` begin them. A Chinese character takes two columns."""
    line, empty = first, True
    room = width - cell_len(following)
    for piece in (part for whole in _pieces(text) for part in _cut(whole, room)):
        space = "" if empty or not piece.startswith(" ") else " "
        piece = piece.removeprefix(" ")
        if not empty and cell_len(line) + len(space) + cell_len(piece) > width:
            yield line
            line, space = following, ""
        line += space + piece
        empty = False
    yield line


def _cut(piece: str, room: int) -> Iterator[str]:
    """A piece, or parts of it where it does not fit into a line, such as a long address."""
    while cell_len(piece.removeprefix(" ")) > room:
        end = room + piece.startswith(" ")
        yield piece[:end]
        piece = piece[end:]
    yield piece


def _pieces(text: str) -> Iterator[str]:
    """The units that no line break divides: words, and single Chinese characters with their punctuation.

    A piece that follows a space begins with one.
    """
    piece = ""
    for character in text:
        wide = cell_len(character) > 1
        breaks = piece != "" and (
            character == " "
            or (
                (wide or cell_len(piece[-1]) > 1)
                and character not in _NOT_FIRST
                and piece[-1] not in _NOT_LAST
                and piece != " "
            )
        )
        if breaks:
            yield piece
            piece = ""
        piece += character
    if piece:
        yield piece
