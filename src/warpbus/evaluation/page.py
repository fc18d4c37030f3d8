"""One self-contained HTML page, light or dark as its reader likes it: tables, pictures, what the words mean."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from warpbus.evaluation.pictures import style
from warpbus.formats.files import replace_file

_TEMPLATE = Path(__file__).with_name("page.html")

Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class PageTable:
    """A table of texts.

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
    """What a picture shows in words, and what draws it; called twice, in ink for a light and for a dark page."""

    description: str
    draw: Callable[[], Figure]


def write_page(
    path: Path,
    *,
    title: str,
    tables: Sequence[PageTable],
    pictures: Sequence[Picture],
    terms: Sequence[tuple[str, str]],
    command: str,
    lead: Sequence[str] = (),
    passed: bool | None = None,
) -> None:
    """Write the page; all texts are escaped.

    Args:
        path: the file.
        title: its heading.
        tables: the first stands above the pictures, the others below.
        pictures: see `Picture`.
        terms: words and what they mean.
        command: what made it.
        lead: sentences below the heading.
        passed: whether what was demanded is met, `None` where nothing was.

    Raises:
        StorageError: if it cannot be written.
    """
    template = jinja2.Environment(autoescape=True).from_string(_TEMPLATE.read_text(encoding="utf-8"))
    rendered = template.render(
        title=title,
        lead=lead,
        passed=passed,
        tables=tables,
        pictures=[(each.description, _png(each, dark=False), _png(each, dark=True)) for each in pictures],
        terms=terms,
        command=command,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    replace_file(path, lambda partial: partial.write_text(rendered, encoding="utf-8"))


def _png(picture: Picture, *, dark: bool) -> str:
    written = io.BytesIO()
    with style(dark=dark):
        picture.draw().savefig(written, format="png", dpi=130)
    return base64.b64encode(written.getvalue()).decode("ascii")
