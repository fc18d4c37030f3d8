"""The theme of all pictures: a colour per contender, captions, ticks that can be read, and fonts that have Chinese.

Every picture is drawn within `style` and ends with `caption`: the finding as its title, the machine and the date below
it. Pictures are opaque on white paper, so that they can be read on a dark page too; `style(dark=True)` has pale ink and
no paper, for pages that have one picture for light and one for dark.
"""

import math
import re
import textwrap
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

from matplotlib import font_manager, rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter
from rich.cells import cell_len

from warpbus.formats.files import replace_file
from warpbus.language import language_in_use, translated

WARPBUS = "#0072B2"
UNQUANTIZED = "#6B7280"
LIMIT = "#7A7F8A"
QUIET = "#7A7F8A"  # ink of remarks, legible on white paper and on a dark page

# Colours of contenders by a word of their names; the first word that a name contains decides. Those of Okabe and Ito
# come first, which people with colour blindness tell apart.
_CONTENDERS = (
    (("warpbus, float16", "warpbus, bfloat16", "warpbus, float32", "16 bits", "original"), UNQUANTIZED),
    (("warpbus", "ours"), WARPBUS),
    (("llama.cpp",), "#009E73"),
    (("cublas",), "#D55E00"),
    (("transformers",), "#8C564B"),
    (("vllm",), "#CC79A7"),
    (("llm-compressor", "llmcompressor"), "#117733"),
    (("humming",), "#882255"),
    (("tinygemm",), "#B8860B"),
    (("numpy",), "#4D7EA8"),
    (("torch cpu", "torch, cpu"), "#56B4E9"),
    (("torch.compile",), "#A6761D"),
    (("torch",), "#E69F00"),
    (("cpu",), "#56B4E9"),
    (("network", "tcp"), "#44AA99"),
    (("published",), "#999933"),
)
_OTHERS = ("#332288", "#AA4499", "#661100", "#999933", "#44AA99")
_SHADES = (WARPBUS, "#00324F", "#6A5ACD", "#1B9AAA", "#3D7DCA", "#8E44AD")
_ON_DARK = {"#00324F": "#9CC3E6"}  # instead of a shade that cannot be seen on a dark page
SERIES = (WARPBUS, "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#999933")
"""Colours of things that are not contenders: stages, matrices of a layer, curves of one run."""

# For Chinese: the first that is installed draws what DejaVu, which comes with matplotlib, has no glyphs for.
_CHINESE_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Micro Hei", "SimHei")
_CHINESE_FILES = ("notosanscjk", "sourcehansans", "wqy-microhei", "simhei")  # how the names of their files begin
_INKS = (
    "text.color",
    "axes.labelcolor",
    "axes.edgecolor",
    "axes.titlecolor",
    "xtick.color",
    "ytick.color",
    "grid.color",
)
_DARK, _PALE = "#111318", "#E4E7EE"
_DPI = 130
_PIECES = re.compile(r" *[!-~]+|.")  # words of letters and digits, which lines do not cut, and single characters
_TITLE_SIZE, _FOOTER_SIZE = 12.5, 8
_COLUMNS_PER_INCH = {_TITLE_SIZE: 9.8, 10: 12.5, _FOOTER_SIZE: 15.0}  # of a line of text, by its size
_TIMES = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
_COUNTS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_MOST_TICKS = 10  # on an axis of powers of two
_FEW_TICKS = 3  # on a logarithmic axis with fewer, numbers between the powers of ten are named too


def color_of(contender: str) -> str:
    """The colour of a contender, the same in every picture: of Warpbus, cuBLAS, torch, transformers, vLLM, ..."""
    name = contender.lower()
    for words, color in _CONTENDERS:
        if any(word in name for word in words):
            return color
    return _OTHERS[zlib.crc32(name.encode()) % len(_OTHERS)]


def shade(index: int) -> str:
    """The colour of the variant of Warpbus with this number, the first one Warpbus's own."""
    colour = _SHADES[index % len(_SHADES)]
    return _ON_DARK.get(colour, colour) if rcParams["text.color"] == _PALE else colour


@cache
def _chinese_font() -> str | None:
    if (font := _listed_chinese_font()) is None:
        # matplotlib keeps its list of fonts in a file, which does not have those that were installed later.
        for path in font_manager.findSystemFonts():
            if Path(path).name.lower().startswith(_CHINESE_FILES):
                font_manager.fontManager.addfont(path)
        font = _listed_chinese_font()
    return font


def _listed_chinese_font() -> str | None:
    installed = set(font_manager.get_font_names())
    return next((font for font in _CHINESE_FONTS if font in installed), None)


@cache
def _warn_of_english() -> None:
    warnings.warn(
        f"Chinese pictures have English words, since no font for Chinese is installed: install {_CHINESE_FONTS[0]} "
        "(Debian and Ubuntu: fonts-noto-cjk)",
        stacklevel=2,
    )


def said(text: str) -> str:
    """Text of a picture in the language in use; in English, with a warning, where no font has Chinese.

    A dollar begins no formula.
    """
    if language_in_use() == "zh" and _chinese_font() is None:
        _warn_of_english()
        return plain(text)
    return plain("\n".join(map(translated, text.split("\n"))))


def plain(text: str) -> str:
    """Text that matplotlib draws as it is: a dollar sign would begin a formula."""
    return text.replace("$", r"\$")


@contextmanager
def style(*, dark: bool = False) -> Iterator[None]:
    """Fonts that have Chinese, and ink for white paper or for a dark page; for what is made in the `with` block."""
    settings: Any = dict.fromkeys(_INKS, _PALE if dark else _DARK)
    settings |= {
        "figure.facecolor": "none" if dark else "white",
        "axes.facecolor": "none",
        "savefig.facecolor": "auto",
        "font.family": ["DejaVu Sans", *([font] if (font := _chinese_font()) else [])],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.labelsize": 9.5,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "legend.fontsize": 8.5,
        "legend.frameon": False,
        "grid.alpha": 0.18,
        "grid.linewidth": 0.7,
        "axes.unicode_minus": False,
    }
    with rc_context(settings):
        yield


def paper(width: float, height: float) -> Figure:
    """An empty picture of so many inches, whose parts keep their distance from each other and from the edge."""
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))


def caption(drawn: Figure, finding: str, what: str = "", footer: str = "") -> Figure:
    """Put the finding above a picture, with what was measured below it in small print, and the footer at the bottom.

    Args:
        drawn: the picture; it grows by the height of what is written.
        finding: a sentence.
        what: the measured quantity.
        footer: the machine, the date, the versions.
    """
    width, height = drawn.get_size_inches()
    title = wrapped(said(finding), width, _TITLE_SIZE)
    below = wrapped(said(what), width, 10) if what else ""
    lines = title.count("\n") + 1, below.count("\n") + 1 if below else 0
    above = 0.24 * lines[0] + 0.2 * lines[1] + 0.16
    small = wrapped(said(footer), width, _FOOTER_SIZE) if footer else ""
    under = 0.14 * (small.count("\n") + 1) + 0.12 if small else 0.0
    total = height + above + under
    drawn.set_size_inches(width, total)
    engine = drawn.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine):
        engine.set(rect=(0.0, under / total, 1.0, height / total))
    left = 0.12 / width
    drawn.text(left, 1 - 0.1 / total, title, ha="left", va="top", fontsize=_TITLE_SIZE, fontweight="bold")
    if below:
        down = (0.14 + 0.24 * lines[0]) / total
        drawn.text(left, 1 - down, below, ha="left", va="top", fontsize=10)
    if small:
        drawn.text(left, 0.08 / total, small, ha="left", va="bottom", fontsize=_FOOTER_SIZE, color=QUIET)
    return drawn


def wrapped(text: str, inches: float, size: float) -> str:
    """Text in lines that fit a width. A Chinese character takes the room of two letters."""
    room = int((inches - 0.25) * _COLUMNS_PER_INCH[size])
    if "\n" in text:
        return "\n".join(wrapped(line, inches, size) for line in text.split("\n"))
    if cell_len(text) <= room:
        return text
    if cell_len(text) == len(text):
        return textwrap.fill(text, room)
    lines, line = [], ""
    for piece in _PIECES.findall(text):
        if cell_len(line + piece.rstrip()) > room and piece not in "，。；：、）":
            lines.append(line.rstrip())
            line = ""
            piece = piece.lstrip()
        line += piece
    return "\n".join([*lines, line])


def footer(device: str, date: str, versions: Sequence[str] = ()) -> str:
    """The line below a picture: the machine, the day of the measurement and the versions of what took part."""
    return "   ".join(each for each in (device, date[:10], ", ".join(versions)) if each)


def save(drawn: Figure, path: Path) -> None:
    """Write a PNG.

    Raises:
        StorageError: if it cannot be written.
    """
    replace_file(path, lambda partial: drawn.savefig(partial, dpi=_DPI, format="png"))


def log_axis(axis: Axes, which: Literal["x", "y"], *, powers_of_two: bool = False, unit: str = "") -> None:
    """A logarithmic axis whose ticks are numbers, not powers; for values that are plotted already.

    Args:
        axis: the axes.
        which: the axis.
        powers_of_two: ticks at the values of the lines, which are powers of two.
        unit: "us" names times from µs to s; anything else, plain numbers.
    """
    ruler: Axis = axis.xaxis if which == "x" else axis.yaxis
    name = axis.set_xscale if which == "x" else axis.set_yscale
    name("log", base=2 if powers_of_two else 10)
    low, high = ruler.get_view_interval()
    if powers_of_two:
        powers = _powers(low, high, 2)
        apart = 1 + len(powers) // _MOST_TICKS
        ruler.set_major_locator(FixedLocator([2.0**power for power in powers if power % apart == 0]))
    elif len(_powers(low, high, 10)) < _FEW_TICKS:
        ruler.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    else:
        ruler.set_major_locator(LogLocator(numticks=12))
    ruler.set_major_formatter(lambda value, _: time_text(value) if unit == "us" else count_text(value))
    ruler.set_minor_formatter(NullFormatter())


def _powers(low: float, high: float, base: int) -> list[int]:
    return [*range(math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9) + 1)]


def time_text(microseconds: float) -> str:
    """A time with the unit that suits it: 10 µs, 2 ms, 1 s."""
    seconds = microseconds * 1e-6
    size, unit = max((pair for pair in _TIMES if seconds >= 0.9995 * pair[0]), default=_TIMES[0])
    return f"{float(f'{seconds / size:.3g}'):,g} {unit}"


def count_text(value: float) -> str:
    """A count or a rate: 512, 1,024, 16,384, 10 M; powers of ten from a million on, others written out."""
    for size, unit in _COUNTS:
        if value >= max(size, 1e5) and math.isclose(value / size, round(value / size), rel_tol=1e-9):
            return f"{value / size:,.0f} {unit}"
    return f"{value:,.12g}"
