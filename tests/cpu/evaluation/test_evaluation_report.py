"""Evaluations as a table, a picture and a page."""

import errno
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from warpbus.errors import StorageError
from warpbus.evaluation import Evaluation, report

FIRST = Evaluation(
    name="original",
    model="/models/original",
    scheme="bfloat16",
    perplexity=20.5,
    divergence=0.0,
    agreement=1.0,
    accuracy=0.75,
    tokens=12_345,
    disk_bytes=34_567_000,
    weight_bytes=69_000_000,
    tokens_per_second=87.6,
    peak_bytes=456_000_000,
)
SECOND = replace(
    FIRST,
    name="w4a16-g128-gptq",
    scheme="w4a16-g128",
    perplexity=21.525,
    divergence=0.01234,
    agreement=0.934,
    disk_bytes=10_000_000,
    tokens_per_second=123.0,
)
HOSTILE = replace(SECOND, name="<script>alert(1)</script>[/bold] $\\frac$ 诗人")


def shown(evaluations: list[Evaluation], width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(report.table(evaluations, "Models on [poems]"))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_speeds_that_cannot_be_compared_are_doubted() -> None:
    steady, disturbed = replace(SECOND, slowest=100.0), replace(SECOND, slowest=12.0)
    assert "uncertain" not in shown([FIRST, steady])
    sentence = "The speeds are uncertain: runs of w4a16-g128-gptq gave from 12 to 123 tokens/s. Other programs use this"
    assert sentence in shown([FIRST, disturbed])
    assert "times as fast" in report.finding([FIRST, steady])
    assert "as fast" not in report.finding([FIRST, disturbed])


def test_the_table_compares_with_the_first() -> None:
    title, headings, _, *rows = [
        [cell.strip() for cell in re.split("[│┃]", line)[1:-1]] or line.strip()
        for line in shown([FIRST, SECOND]).splitlines()
        if not line.startswith(("┏", "└"))
    ]
    assert title == "Models on [poems]"
    assert headings[:6] == ["model", "perplexity", "change", "KL", "agrees", "choices"]
    assert headings[6:] == ["weights", "disk MB", "memory MB", "tokens/s", "peak MB"]
    assert rows[0] == ["original", "20.500", "", "", "", "75.0 %", "bfloat16", "34.6", "69.0", "88", "456"]
    assert rows[1][:5] == ["w4a16-g128-gptq", "21.525", "+5.00 %", "0.0123", "93.4 %"]


def test_columns_that_were_not_measured_are_left_out() -> None:
    fewer = [replace(each, accuracy=None, tokens_per_second=None, peak_bytes=None) for each in (FIRST, SECOND)]
    assert "choices" not in shown(fewer)
    assert "tokens/s" not in shown(fewer)
    partly = shown([replace(FIRST, accuracy=None), SECOND])
    assert "choices" in partly
    assert "None" not in partly


@pytest.mark.parametrize("width", [80, 100])
def test_a_narrow_terminal_loses_no_number(width: int) -> None:
    text = shown([FIRST, SECOND], width)
    for number in ("20.500", "21.525", "+5.00", "0.0123", "93.4", "34.6", "10.0", "69.0", "88", "123", "456"):
        assert number in text
    assert max(map(len, text.splitlines())) <= width


def test_names_are_text_and_no_markup(tmp_path: Path) -> None:
    assert "[/bold] $\\frac$" in shown([FIRST, HOSTILE], 200)
    report.draw([FIRST, HOSTILE], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_a_panel_for_each_measure() -> None:
    def titles(figure: Figure) -> list[str]:
        return [axis.get_title(loc="left") for axis in figure.axes]

    everything = titles(report.figure([FIRST, SECOND]))
    assert [title.split(" (")[0] for title in everything] == [
        "perplexity",
        "KL from the first",
        "choices correct",
        "size on disk",
        "decoding",
    ]
    fewer = [replace(each, accuracy=None, tokens_per_second=None) for each in (FIRST, SECOND)]
    assert len(titles(report.figure(fewer))) == 3
    perplexity, *_, disk, _ = report.figure([FIRST, SECOND]).axes
    assert [float(line.get_xdata()[0]) for line in perplexity.get_lines() if line.get_marker() == "o"] == [20.5, 21.525]
    assert [bar.get_width() for bar in disk.patches] == [34.567, 10.0]


def test_small_differences_of_the_perplexity_can_be_seen() -> None:
    close = replace(SECOND, perplexity=20.6)
    (axis, *_) = report.figure([FIRST, close]).axes
    low, high = axis.get_xlim()
    assert 0.1 / (high - low) > 0.4
    assert low > 20


def test_the_finding_and_the_machine_are_on_the_picture() -> None:
    measured = [replace(each, device="NVIDIA H100", date="2026-01-31T12:00:00Z") for each in (FIRST, SECOND)]
    texts = [" ".join(text.get_text().split()) for text in report.figure(measured).texts]
    assert texts[0] == ("w4a16-g128-gptq: perplexity 20.50 → 21.52 (+5.00%), 3.46 times smaller, 1.40 times as fast")
    assert texts[1] == "measured on 12,345 predicted tokens"
    assert texts[2].startswith("NVIDIA H100 2026-01-31 warpbus")


def test_one_model_alone(tmp_path: Path) -> None:
    report.draw([FIRST], tmp_path / "a.png")
    report.write_page([FIRST], "One", tmp_path / "a.html")
    assert (tmp_path / "a.png").stat().st_size > 5000
    text = shown([FIRST])
    assert "original" in text
    # There is nothing to compare it with.
    assert not any(heading in text for heading in ("change", "KL", "agrees"))
    assert report.figure([FIRST]).texts[0].get_text() == "original: perplexity 20.50"


def test_the_page_stands_alone_and_escapes_names(tmp_path: Path) -> None:
    report.write_page([FIRST, HOSTILE], "Models on <b>poems</b>", tmp_path / "new" / "a.html")
    page = (tmp_path / "new" / "a.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "&lt;b&gt;poems" in page
    # Nothing is fetched from anywhere: no addresses but the picture within, and a policy that forbids them.
    assert re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'>]{5})""", page) == ["data:"] * 2
    assert "http:" not in page
    assert "https:" not in page
    assert "default-src 'none'" in page
    assert "21.525" in page
    assert "12,345" in page


def test_json_round_trips() -> None:
    assert [Evaluation(**each) for each in json.loads(json.dumps(report.to_json([FIRST, HOSTILE])))] == [FIRST, HOSTILE]


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, write in (
        ("a.png", lambda path: report.draw([FIRST], path)),
        ("a.html", lambda path: report.write_page([FIRST], "One", path)),
    ):
        path = tmp_path / name
        path.write_text("old", encoding="utf-8")
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(StorageError, match=f"{name}: cannot be written") as raised:
                write(path)
        assert "\n" not in str(raised.value)
        assert path.read_text(encoding="utf-8") == "old"
        with pytest.raises(StorageError, match="cannot be written"):
            write(path / "below")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.png"]


def full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
