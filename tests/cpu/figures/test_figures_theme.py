"""The theme of pictures: ticks, captions, colours; and pages in two languages."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from warpbus.figures import theme
from warpbus.figures.page import Gate, PageTable, Picture, write_page
from warpbus.figures.panels import Measure, draw_measures
from warpbus.language import in_language


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [(0.5, "0.5 µs"), (10, "10 µs"), (999.96, "1 ms"), (1234, "1.23 ms"), (1e6, "1 s"), (2.5e7, "25 s")],
)
def test_times_have_the_unit_that_suits_them(microseconds: float, text: str) -> None:
    assert theme.time_text(microseconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.05, "0.05"), (64, "64"), (16384, "16,384"), (1e5, "100 k"), (1e6, "1 M"), (2e9, "2 G"), (1048576, "1,048,576")],
)
def test_counts_are_no_powers(value: float, text: str) -> None:
    assert theme.count_text(value) == text


def ticks(axis: object) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels() if label.get_text()]  # type: ignore[attr-defined]


def test_logarithmic_axes_name_numbers() -> None:
    with theme.style():
        drawn = theme.paper(6, 4)
        axis = drawn.subplots()
        axis.plot([64, 8192], [3, 4e5])
        theme.log_axis(axis, "x", powers_of_two=True)
        theme.log_axis(axis, "y", unit="us")
        drawn.draw_without_rendering()
    assert ticks(axis.xaxis) == ["64", "128", "256", "512", "1,024", "2,048", "4,096", "8,192"]
    assert {"10 µs", "1 ms", "100 ms"} <= set(ticks(axis.yaxis))
    assert not any("10^" in text or "e+" in text for text in ticks(axis.yaxis))


def test_a_caption_grows_the_picture_and_stays_on_it() -> None:
    with theme.style():
        drawn = theme.paper(6, 3)
        drawn.subplots().plot([1, 2])
        theme.caption(
            drawn, "A long finding, " * 12 + "\nand a second one", "what", theme.footer("cpu", "2026-01-31T12", ["a 1"])
        )
        drawn.draw_without_rendering()
    assert drawn.get_size_inches()[1] > 4
    width, height = drawn.canvas.get_width_height()
    boxes = [text.get_window_extent() for text in drawn.texts]
    for box in boxes:
        assert box.x0 >= 0
        assert box.x1 <= width
        assert box.y0 >= 0
        assert box.y1 <= height
    axis = drawn.axes[0].get_tightbbox()
    assert axis is not None
    assert boxes[1].y0 >= axis.y1
    assert boxes[2].y1 <= axis.y0
    assert drawn.texts[2].get_text() == "cpu   2026-01-31   a 1"


def test_chinese_lines_are_cut_where_they_are_too_long() -> None:
    lines = theme.wrapped("量化后的模型困惑度上升很少，" * 8, 4, 12.5).split("\n")
    assert len(lines) > 2
    assert not any(line.startswith("，") for line in lines)


def test_lines_of_chinese_cut_no_words():
    text = "矩阵乘法：为同时测得的 cuBLAS 的 1.02 倍，" * 6
    lines = theme.wrapped(text, 3, 12.5).split("\n")
    assert len(lines) > 3
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert sum(line.count("cuBLAS") for line in lines) == sum(line.count("1.02") for line in lines) == 6


@pytest.fixture
def fonts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the fonts that matplotlib knows: none for Chinese."""
    names = ["DejaVu Sans"]
    caches = [theme._chinese_font, theme._warn_of_english]
    monkeypatch.setattr(theme.font_manager, "get_font_names", lambda: names)
    monkeypatch.setattr(theme.font_manager, "findSystemFonts", list)
    for each in caches:
        each.cache_clear()
    yield names
    for each in caches:
        each.cache_clear()


def test_without_a_font_for_chinese_pictures_are_english_and_one_warning_says_so(fonts: list[str]) -> None:
    with in_language("zh"), pytest.warns(UserWarning, match="Noto Sans CJK SC") as warned:
        assert [theme.said("perplexity"), theme.said("limit")] == ["perplexity", "limit"]
    assert len(warned) == 1


def test_a_font_that_was_installed_after_matplotlib_listed_the_fonts_is_found(
    fonts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"/fonts/NotoSansCJK-Regular.ttc": "Noto Sans CJK SC", "/fonts/Other.ttf": "Other"}
    monkeypatch.setattr(theme.font_manager, "findSystemFonts", lambda: list(files))
    monkeypatch.setattr(theme.font_manager.fontManager, "addfont", lambda path: fonts.append(files[path]))
    with in_language("zh"):
        assert theme.said("limit") == "上限"
    assert fonts == ["DejaVu Sans", "Noto Sans CJK SC"]


def test_unknown_contenders_keep_a_colour_of_their_own() -> None:
    assert theme.color_of("a new library") == theme.color_of("A new library")
    assert theme.color_of("warpbus, float16") == theme.UNQUANTIZED != theme.color_of("Warpbus")
    assert len({theme.shade(index) for index in range(6)}) == 6


def drawing() -> Figure:
    drawn = theme.paper(4, 2)
    drawn.subplots().plot([1, 2])
    return theme.caption(drawn, "perplexity")


def page(path: Path, gate: Gate | None = None) -> str:
    write_page(
        path,
        title="glm",
        tables=[PageTable(["", "before"], [[["perplexity", "36.7"]]])],
        pictures=[Picture("A row per model: perplexity, KL, size and speed", drawing)],
        terms=[("change", "Change of the perplexity, relative to the first model.")],
        command="warpbus eval",
        gate=gate,
    )
    return path.read_text(encoding="utf-8")


def test_a_page_has_one_language_at_a_time(tmp_path: Path) -> None:
    text = page(tmp_path / "a.html")
    english, chinese = text.split("<article")[1:]
    assert "perplexity" in english
    assert "困惑度" not in english
    assert "困惑度" in chinese
    assert "perplexity<" not in chinese
    assert 'id="to-en" checked' in text
    assert "<script" not in text
    with in_language("zh"):
        assert 'id="to-zh" checked' in page(tmp_path / "a.html")


def test_a_gate_says_what_was_demanded_beside_its_result(tmp_path: Path) -> None:
    demand = "The perplexity may increase by at most 5.00%. It changed by +0.84%."
    text = page(tmp_path / "a.html", Gate(demand, met=True))
    assert f'<b class="met">met</b>{demand}' in text
    assert "passed" not in text
    assert 'class="missed">not met<' in page(tmp_path / "a.html", Gate(demand, met=False))


def test_powers_of_two_over_a_wide_range_leave_out_ticks() -> None:
    with theme.style():
        axis = theme.paper(4, 3).subplots()
        axis.plot([1, 2.0**20], [1, 2])
        theme.log_axis(axis, "x", powers_of_two=True)
    assert all(math.log2(tick) % 3 == 0 for tick in axis.xaxis.get_majorticklocs())


def luminance(colour: str) -> float:
    """Of "#RRGGBB", from 0 (black) to 1, by WCAG 2."""
    channels = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("dark", "paper"), [(False, "#FFFFFF"), (True, "#121212")])
def test_shades_are_seen_on_a_light_and_on_a_dark_page(dark: bool, paper: str) -> None:
    with theme.style(dark=dark):
        shades = [theme.shade(index) for index in range(6)]
    assert len(set(shades)) == 6
    for colour in (*shades, theme.UNQUANTIZED):
        low, high = sorted((luminance(colour), luminance(paper)))
        assert (high + 0.05) / (low + 0.05) > 2.5, colour


def test_the_text_of_a_dot_is_on_the_side_away_from_the_first_one() -> None:
    drawn = Figure()
    draw_measures(
        drawn, ["a", "b", "c"], ["red"] * 3, [Measure("perplexity", [48.63, 48.55, 49.44], "{:.2f}", dots=True)]
    )
    (axis,) = drawn.axes
    sides = {text.get_text(): text.get_horizontalalignment() for text in axis.texts}
    assert sides == {"48.63": "left", "48.55": "right", "49.44": "left"}
    assert axis.get_xlim()[0] < 48.1


def test_a_table_of_short_values_fits_a_phone(tmp_path: Path, chromium: Any) -> None:
    rows = [["perplexity, 95 % interval", "", "", "[-1.18%, +4.74%]"], ["cost, estimated", "", "not known: no GPU", ""]]
    rows.append(["largest error", "488.8 MB", "453.5 MB", "layers.0.attention.o"])
    path = tmp_path / "page.html"
    table = PageTable(["", "before", "after", "change"], [rows])
    write_page(path, title="glm", tables=[table], pictures=[], terms=[], command="warpbus eval")
    page = chromium.new_context(viewport={"width": 390, "height": 800}, locale="en-US").new_page()
    page.goto(path.as_uri())
    assert page.eval_on_selector("article:visible .wide", "wide => wide.scrollWidth - wide.clientWidth") == 0
