"""The language of the command line: under a Chinese locale, English text becomes Chinese before it is shown.

Everything is written in English. `translated` looks a text up in the catalogue `locale/zh.po`. Its entries are texts,
and templates such as `{0}: no such file`, which stand for f-strings of the package. A value of several words that fills
a template is looked up as well; a single word may be the name of a file. So packages below the command line compose
messages as they like, and do not know about languages. A text that the catalogue does not have stays English. `--json`
prints without `translated`.
"""

import gettext
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console as PlainConsole
from rich.console import Group
from rich.table import Table
from rich.text import Text

CATALOGUE = Path(__file__).with_name("locale") / "zh.po"

_PLACEHOLDER = re.compile(r"\{(\d+)\}")
_ENTRY = re.compile(r'^msgid ((?:".*"\n)+)msgstr ((?:".*"(?:\n|\Z))+)', re.MULTILINE)
_LEAST_LETTERS = 4  # of a template without its placeholders: fewer would fit texts that it does not mean


class Catalogue(gettext.NullTranslations):
    """Translations of texts and of templates.

    Args:
        entries: Chinese texts by English ones. `{0}`, `{1}`, ... stand for any text.
    """

    def __init__(self, entries: Mapping[str, str]) -> None:
        super().__init__()
        self.entries = dict(entries)
        templates = [text for text in self.entries if _PLACEHOLDER.search(text)]
        # The template with most text of its own is the one that is meant.
        self._templates = sorted(templates, key=lambda text: -len(_PLACEHOLDER.sub("", text)))

    def gettext(self, message: str) -> str:
        """The translation, line by line if there is none of the whole, or the message itself. Blanks around it stay."""
        found = self.entries.get(message)
        if found is not None:
            return found
        inner = message.strip()
        if inner != message:
            return message.replace(inner, self.gettext(inner), 1) if inner else message
        for template in self._templates:
            pieces, pattern = _pattern(template)
            if all(piece in message for piece in pieces) and (match := pattern.fullmatch(message)):
                return _filled(
                    self.entries[template], [self.gettext(value) if " " in value else value for value in match.groups()]
                )
        if "\n" in message:
            return "\n".join(map(self.gettext, message.split("\n")))
        return message


def _filled(template: str, values: list[str]) -> str:
    return _PLACEHOLDER.sub(lambda place: values[int(place[1])], template)


@cache
def _pattern(template: str) -> tuple[list[str], re.Pattern[str]]:
    """The text of a template between its placeholders, and an expression that finds their values."""
    pieces = _PLACEHOLDER.split(template)[::2]
    if len(re.findall(r"[^\W\d_]", "".join(pieces))) < _LEAST_LETTERS:
        raise ValueError(f"{template!r} would fit nearly every text")
    return [piece for piece in pieces if piece], re.compile("(.*?)".join(map(re.escape, pieces)), re.DOTALL)


def read_catalogue(text: str) -> dict[str, str]:
    """The entries of a .po file that are translated."""

    def joined(lines: str) -> str:
        return "".join(json.loads(line) for line in lines.splitlines())

    entries = {joined(english): joined(chinese) for english, chinese in _ENTRY.findall(text)}
    return {english: chinese for english, chinese in entries.items() if english and chinese}


class _LanguageInUse:
    """The translations in use; none until `use_language`."""

    translations: gettext.NullTranslations = gettext.NullTranslations()


def use_language(language: str) -> None:
    """Show text in this language, `zh` or `en`, from now on."""
    chinese = language == "zh"
    _LanguageInUse.translations = (
        Catalogue(read_catalogue(CATALOGUE.read_text(encoding="utf-8"))) if chinese else gettext.NullTranslations()
    )


def translated(text: str) -> str:
    """The text in the language in use."""
    return _LanguageInUse.translations.gettext(text) if text else text


class Console(PlainConsole):
    """A console that translates what it prints: text, and the headings, cells and captions of tables."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich's console does."""
        if isinstance(_LanguageInUse.translations, Catalogue):
            objects = tuple(map(_translated_object, objects))
        super().print(*objects, **options)


def _translated_object(value: Any) -> Any:
    if isinstance(value, str):
        return translated(value)
    if isinstance(value, Text):
        found = value.copy()
        if (plain := translated(value.plain)) != value.plain:
            found.plain = plain
        return found
    if isinstance(value, Group):
        return Group(*map(_translated_object, value.renderables))
    if isinstance(value, Table):
        return _translated_table(value)
    return value


def _translated_table(table: Table) -> Table:
    """A table whose texts are translated, with the form of another one."""
    found = Table(
        title=_translated_object(table.title),
        caption=_translated_object(table.caption),
        width=table.width,
        min_width=table.min_width,
        box=table.box,
        padding=table.padding,
        collapse_padding=table.collapse_padding,
        pad_edge=table.pad_edge,
        expand=table.expand,
        show_header=table.show_header,
        show_footer=table.show_footer,
        show_edge=table.show_edge,
        show_lines=table.show_lines,
        leading=table.leading,
        style=table.style,
        row_styles=list(table.row_styles),
        header_style=table.header_style,
        border_style=table.border_style,
        title_style=table.title_style,
        caption_style=table.caption_style,
        title_justify=table.title_justify,
        caption_justify=table.caption_justify,
        highlight=table.highlight,
    )
    for column in table.columns:
        found.add_column(
            _translated_object(column.header),
            justify=column.justify,
            vertical=column.vertical,
            style=column.style,
            header_style=column.header_style,
            width=column.width,
            min_width=column.min_width,
            max_width=column.max_width,
            ratio=column.ratio,
            no_wrap=column.no_wrap,
            overflow=column.overflow,
        )
    cells = zip(*(column.cells for column in table.columns), strict=True)
    for row, values in zip(table.rows, cells, strict=True):
        found.add_row(*map(_translated_object, values), style=row.style, end_section=row.end_section)
    return found
