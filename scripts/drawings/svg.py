"""Primitives of the drawings: boxes, texts, arrows and grids, in one theme for light and dark pages.

A drawing has a ground of its own, so that it stays readable where a page and the browser disagree about the colours.
The same drawing gives the same bytes: coordinates are rounded, and nothing depends on time or order of a dict.
"""

from collections.abc import Callable
from html import escape

# One of two texts, by the language of the drawing.
Say = Callable[[str, str], str]

_STYLE = """
text{font-family:system-ui,-apple-system,"Segoe UI","Noto Sans","Noto Sans CJK SC",
"PingFang SC","Microsoft YaHei",sans-serif}
.mono{font-family:ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,"Noto Sans Mono CJK SC",monospace}
.paper{fill:#ffffff}.ink{fill:#1f2328}.soft{fill:#59636e}.edge{stroke:#59636e}.strong{stroke:#1f2328}.none{fill:none}
.grey{fill:#e6e9ee}.orange{fill:#ffd08a}.blue{fill:#a8d1f4}.green{fill:#b0e0c0}.pink{fill:#f4bcd2}.yellow{fill:#f7e98f}
@media (prefers-color-scheme:dark){
.paper{fill:#0d1117}.ink{fill:#e6edf3}.soft{fill:#9aa4af}.edge{stroke:#8b949e}.strong{stroke:#e6edf3}
.grey{fill:#2b323b}.orange{fill:#8a5300}.blue{fill:#1f5585}.green{fill:#22683f}.pink{fill:#843a5c}.yellow{fill:#665c00}
}
"""


class Drawing:
    """An SVG picture.

    Args:
        width, height: in pixels.
        title: what the picture shows, for those who cannot see it.

    Fills are names of the theme: grey, orange, blue, green, pink, yellow, none.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "grey",
        *,
        label: str = "",
        size: float = 13,
        dashed: bool = False,
        strong: bool = False,
        radius: float = 3,
        mono: bool = False,
        bold: bool = False,
    ) -> None:
        """A rectangle, with a label in its middle: one line, or several that are separated by line feeds."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        stroke = f'stroke-width="{2 if strong else 1}"'
        self._parts.append(
            f'<rect class="{fill} {"strong" if strong else "edge"}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" '
            f'height="{_n(height)}" rx="{_n(radius)}" {stroke}{dash}/>'
        )
        lines = label.split("\n") if label else []
        for i, line in enumerate(lines):
            middle = y + height / 2 + (i - (len(lines) - 1) / 2) * size * 1.3
            self.text(x + width / 2, middle + size * 0.36, line, size, anchor="middle", mono=mono, bold=bold)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 13,
        *,
        anchor: str = "start",
        soft: bool = False,
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """A line of text whose baseline is at y."""
        weight = ' font-weight="600"' if bold else ""
        classes = f"{'soft' if soft else 'ink'}{' mono' if mono else ''}"
        self._parts.append(
            f'<text class="{classes}" x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )

    def line(
        self, *points: tuple[float, float], arrow: bool = False, dashed: bool = False, strong: bool = False
    ) -> None:
        """A line through points, with an arrow at its end if wanted."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        end = ' marker-end="url(#arrow)"' if arrow else ""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<polyline class="none {"strong" if strong else "edge"}" points="{path}" '
            f'stroke-width="{2 if strong else 1.5}"{dash}{end}/>'
        )

    def arrow(self, x0: float, y0: float, x1: float, y1: float, *, dashed: bool = False) -> None:
        self.line((x0, y0), (x1, y1), arrow=True, dashed=dashed)

    def dot(self, x: float, y: float, radius: float, fill: str) -> None:
        self._parts.append(f'<circle class="{fill} edge" cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"/>')

    def grid(
        self,
        x: float,
        y: float,
        rows: int,
        columns: int,
        side: float,
        fill: Callable[[int, int], str] | str = "grey",
        label: Callable[[int, int], str] | None = None,
        *,
        height: float = 0,
        size: float = 10,
    ) -> None:
        """Cells in rows and columns; the fill and the label of a cell follow from its row and column."""
        high = height or side
        for row in range(rows):
            for column in range(columns):
                colour = fill if isinstance(fill, str) else fill(row, column)
                text = label(row, column) if label else ""
                self.box(x + column * side, y + row * high, side, high, colour, label=text, size=size, radius=0)

    def svg(self) -> str:
        """The file's text."""
        size = f'width="{_n(self.width)}" height="{_n(self.height)}" viewBox="0 0 {_n(self.width)} {_n(self.height)}"'
        title = escape(self.title)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">\n<title>{title}</title>\n'
            f"<style>{_STYLE}</style>\n"
            '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="soft" d="M0 0L10 5L0 10z"/></marker></defs>\n'
            f'<rect class="paper" width="{_n(self.width)}" height="{_n(self.height)}" rx="6"/>\n'
        )
        return head + "\n".join(self._parts) + "\n</svg>\n"


def _n(value: float) -> str:
    return f"{round(value, 1):g}"
