"""One self-contained HTML page, light or dark as its reader likes it, in English and in Chinese by a switch."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from warpbus.figures.theme import style
from warpbus.formats.files import replace_file
from warpbus.language import in_language, language_in_use, translated

_TEMPLATE = Path(__file__).with_name("page.html")
_LANGUAGES = {"en": "English", "zh": "中文"}

Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class PageTable:
    """A table of English texts.

    Attributes:
        headings: of the columns; the first column is aligned left, the others right.
        sections: groups of rows, with a line between them.
        caption: above it.
        reference: the first row is what the others are compared with.
    """

    headings: Sequence[str]
    sections: Sequence[Rows]
    caption: str | None = None
    reference: bool = False


@dataclass(frozen=True)
class Picture:
    """A description and what draws it; called in each language, in ink for a light and for a dark page."""

    description: str
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Gate:
    """A demand, as a sentence, and whether it is met."""

    demand: str
    met: bool


def write_page(
    path: Path,
    *,
    title: str,
    tables: Sequence[PageTable],
    pictures: Sequence[Picture],
    terms: Sequence[tuple[str, str]],
    command: str,
    lead: Sequence[str] = (),
    notes: Sequence[str] = (),
    gate: Gate | None = None,
) -> None:
    """Write the page in both languages; the one in use is shown first. Texts are English, and all are escaped.

    Args:
        path: the file.
        title: its heading.
        tables: the first stands above the pictures, the others below.
        pictures: see `Picture`.
        terms: words and what they mean.
        command: the command that made it.
        lead: sentences below the heading.
        notes: sentences below the first table: what was not measured, and why.
        gate: the demand on the result, if there was one.

    Raises:
        StorageError: if it cannot be written.
    """
    template = jinja2.Environment(autoescape=True).from_string(_TEMPLATE.read_text(encoding="utf-8"))
    editions = []
    first = language_in_use()
    for language in _LANGUAGES:
        with in_language(language):
            editions.append(
                {
                    "language": language,
                    "title": translated(title),
                    "lead": [*map(translated, lead)],
                    "notes": [*map(translated, notes)],
                    "gate": gate and (translated(gate.demand), translated("met" if gate.met else "not met"), gate.met),
                    "tables": [*map(_translated_table, tables)],
                    "pictures": [
                        (translated(each.description), _png(each, dark=False), _png(each, dark=True))
                        for each in pictures
                    ],
                    "terms": [(translated(name), translated(meaning)) for name, meaning in terms],
                }
            )
    rendered = template.render(
        editions=editions,
        names=_LANGUAGES,
        first=first,
        title=title,
        command=command,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    replace_file(path, lambda partial: partial.write_text(rendered, encoding="utf-8"))


def _translated_table(table: PageTable) -> PageTable:
    return PageTable(
        [*map(translated, table.headings)],
        [[[*map(translated, row)] for row in section] for section in table.sections],
        table.caption and translated(table.caption),
        table.reference,
    )


def _png(picture: Picture, *, dark: bool) -> str:
    written = io.BytesIO()
    with style(dark=dark):
        picture.draw().savefig(written, format="png", dpi=130)
    return base64.b64encode(written.getvalue()).decode("ascii")
