"""Every document exists in English and Chinese: the same structure, the same code, and one term for one thing."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
CHINESE = DOCS / "zh"
PAGES = sorted(path.name for path in CHINESE.glob("*.md"))

# The glossary defines in Chinese how other terms are translated, too.
MORE_HEADINGS = {"glossary.md": ["## 通用术语的译法"]}

FENCE = re.compile(r"^```[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#+) +(.*)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|mailto:)(?P<target>[^)#\s]*)(?:#(?P<anchor>[^)\s]*))?\)")
FIGURE = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
TERM = re.compile(r"^\| (?P<english>[^|]+) \| (?P<chinese>[^|]+) \| (?P<never>[^|]+) \|$", re.MULTILINE)


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose(page: str) -> str:
    """A page without its code, which may quote what programs print."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page))


def headings(page: str) -> list[str]:
    return [f"{level} {title}" for level, title in HEADING.findall(FENCE.sub("", page))]


def code(page: str) -> list[list[str]]:
    """The lines of code blocks without comments and without what follows a name after at least two spaces."""
    return [
        [re.sub(r"(?:(?<=\S) {2,}|(?:^|\s+)(?:#|//) ).*", "", line).rstrip() for line in block.splitlines()]
        for block in FENCE.findall(page)
    ]


def figures(page: str, length: int) -> set[str]:
    """The significant digits of all numbers of at least so many characters: 17 M is 1700 万 in Chinese."""
    words = re.sub(r"\]\([^)]*\)|`[^`]*`", " ", FENCE.sub("", page))
    found = (number.replace(",", "") for number in FIGURE.findall(words))
    return {number.replace(".", "").strip("0") for number in found if len(number) >= length}


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings as GitHub makes them."""
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for _, title in HEADING.findall(FENCE.sub("", page))]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def terms() -> dict[str, list[str]]:
    """The Chinese terms, each with the variants that are not used."""
    table = text(CHINESE / "glossary.md").partition("## 通用术语的译法")[2]
    found = {row["chinese"]: row["never"].split("、") for row in TERM.finditer(table) if row["english"] != "英文"}
    return {chinese: never for chinese, never in found.items() if not set(chinese) <= set("-")}


def test_every_document_has_its_twin() -> None:
    assert {path.name for path in DOCS.glob("*.md")} == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_twins_link_to_each_other_at_their_heads(name: str) -> None:
    english, chinese = (text(folder / name).split("\n")[2] for folder in (DOCS, CHINESE))
    assert english.startswith(f"*[中文](zh/{name})")
    assert chinese.startswith(f"*[English](../{name})")


@pytest.mark.parametrize("name", PAGES)
def test_twins_have_the_same_structure(name: str) -> None:
    english, chinese = text(DOCS / name), text(CHINESE / name)
    more = MORE_HEADINGS.get(name, [])
    expected = [title for title in headings(chinese) if title not in more]
    assert [title.split()[0] for title in headings(english)] == [title.split()[0] for title in expected]
    if not more:
        assert english.count("\n| ") == chinese.count("\n| "), "rows of tables"


@pytest.mark.parametrize("chapter", sorted((DOCS / "tutorial").glob("*.zh-CN.md")), ids=lambda path: path.name)
def test_chapters_have_the_same_structure(chapter: Path) -> None:
    english, chinese = text(chapter.with_name(chapter.name.replace(".zh-CN", ""))), text(chapter)
    assert [title.split()[0] for title in headings(english)] == [title.split()[0] for title in headings(chinese)]
    assert english.count("\n| ") == chinese.count("\n| "), "rows of tables"


@pytest.mark.parametrize("name", PAGES)
def test_twins_have_the_same_code(name: str) -> None:
    assert code(text(DOCS / name)) == code(text(CHINESE / name))


@pytest.mark.parametrize("name", PAGES)
def test_twins_have_the_same_figures(name: str) -> None:
    english, chinese = text(DOCS / name), text(CHINESE / name)
    assert sorted(figures(english, 3) - figures(chinese, 1)) == []
    assert sorted(figures(chinese, 3) - figures(english, 1)) == []


@pytest.mark.parametrize("path", [*DOCS.glob("*.md"), *CHINESE.glob("*.md")], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for link in LINK.finditer(re.sub(r"`[^`\n]*`", "`", FENCE.sub("", text(path)))):
        target = path.parent / link["target"] if link["target"] else path
        assert target.exists(), link[0]
        if link["anchor"] and target.suffix == ".md":
            assert link["anchor"] in anchors(text(target)), link[0]


@pytest.mark.parametrize("name", PAGES)
def test_a_chinese_page_links_to_chinese_pages(name: str) -> None:
    """Except for its own counterpart."""
    linked = {link["target"] for link in LINK.finditer(text(CHINESE / name))}
    assert linked & {f"../{page}" for page in PAGES} <= {f"../{name}"}


@pytest.mark.parametrize("name", [name for name in PAGES if name != "glossary.md"])
def test_a_chinese_page_uses_the_terms_of_the_glossary(name: str) -> None:
    page = prose(text(CHINESE / name))
    assert [variant for never in terms().values() for variant in never if variant in page] == []


@pytest.mark.parametrize("chapter", sorted((DOCS / "tutorial").glob("*.zh-CN.md")), ids=lambda path: path.name)
def test_a_chinese_chapter_uses_the_terms_of_the_glossary(chapter: Path) -> None:
    page = prose(text(chapter))
    assert [variant for never in terms().values() for variant in never if variant in page] == []


def test_the_chat_page_uses_the_terms_of_the_glossary() -> None:
    strings = text(ROOT / "src" / "warpbus" / "server" / "page" / "strings.js")
    assert [variant for never in terms().values() for variant in never if variant in strings] == []


def test_the_glossary_has_terms() -> None:
    found = terms()
    assert len(found) >= 30
    assert "词元" in found["token"]


def test_a_wrong_term_is_noticed() -> None:
    assert "词元" in prose("一个词元\n")
    assert "词元" not in prose("`词元`\n```\n词元\n```\n")
