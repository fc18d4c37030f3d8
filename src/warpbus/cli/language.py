"""A console that prints in the language in use: text, tables, and what is made of them."""

from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

from rich.console import Console as PlainConsole
from rich.console import Group
from rich.table import Table
from rich.text import Text

from warpbus.language import language_in_use, translated


class Console(PlainConsole):
    """A console that translates what it prints: text, and the headings, cells and captions of tables."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich's console does."""
        super().print(*map(translated_object, objects), **options)


def translated_object(value: Any) -> Any:
    """What a console prints, in the language in use: text, a table or a group of those; other values as they are."""
    return value if language_in_use() == "en" else _translated_object(value)


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
    if is_dataclass(value) and not isinstance(value, type):  # a renderable that is made of others
        return replace(value, **{field.name: _translated_object(getattr(value, field.name)) for field in fields(value)})
    return value


def _translated_table(table: Table) -> Table:
    """A copy whose texts are translated."""
    found = copy(table)
    found.title, found.caption = _translated_object(table.title), _translated_object(table.caption)
    found.columns = [
        replace(
            column,
            header=_translated_object(column.header),
            footer=_translated_object(column.footer),
            _cells=list(map(_translated_object, column.cells)),
        )
        for column in table.columns
    ]
    return found
