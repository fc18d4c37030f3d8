"""The READMEs: short, the same in both languages, and with no figure that no record or document has."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
MAX_LINES = 150
MAX_LENGTH = 140  # characters of a line

BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"(?<![\w.-])\d[\d,]*\.?\d*(?![\w-])")


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.name)
def test_a_readme_is_short(path: Path) -> None:
    lines = text(path).splitlines()
    assert len(lines) <= MAX_LINES
    assert [line for line in lines if len(line) > MAX_LENGTH] == []


def test_both_languages_have_the_same_commands() -> None:
    def commands(path: Path) -> list[list[str]]:
        lines = [block.splitlines() for block in BLOCK.findall(text(path))]
        return [[re.sub(r" +#.*", "", line) for line in block] for block in lines]

    assert commands(READMES[0]) == commands(READMES[1])
    assert len(commands(READMES[0])) >= 3


def test_both_languages_have_the_same_sections_tables_and_figures() -> None:
    english, chinese = map(text, READMES)
    assert len(re.findall(r"^## ", english, re.MULTILINE)) == len(re.findall(r"^## ", chinese, re.MULTILINE))
    assert english.count("\n|") == chinese.count("\n|")

    def figures(page: str) -> list[str]:
        """Figures with a decimal point or a thousand, which are spelled alike."""
        return sorted(found for found in FIGURE.findall(page) if "." in found.strip(".") or "," in found.strip(","))

    assert [each.strip(",.") for each in figures(english)] == [each.strip(",.") for each in figures(chinese)]


def test_measured_figures_are_in_a_record_or_a_document() -> None:
    page = text(READMES[0])
    measured = page.partition("## Benchmarks")[2].partition("## Learn")[0]
    bullets = "\n".join(re.findall(r"^- \*\*.*", page.partition("## Install")[0], re.MULTILINE))
    known = "".join(text(ROOT / "docs" / f"{name}.md") for name in ("benchmark_results", "quantization_quality"))
    values = [
        value
        for path in (ROOT / "benchmarks" / "results").glob("*.json")
        for record in json.loads(text(path))
        for value in (record["ours"], (record["peer"] or {}).get("value"))
        if value is not None
    ]
    missing = []
    without_names = re.sub(r"[A-Za-z]\w*\d[\w-]*|N = \d+", "", measured + bullets)  # such as H100 and w4a16-g128
    for figure in {each.strip(",.") for each in FIGURE.findall(without_names)}:
        digits = len(figure.partition(".")[2])
        number = float(figure.replace(",", ""))
        if number <= 4 or figure in known or any(round(value, digits) == number for value in values):
            continue
        missing.append(figure)
    assert missing == []
