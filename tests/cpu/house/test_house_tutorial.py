"""The tutorial quotes the code word for word, its snippets print what it says, and both languages hold the same."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from warpbus.kernels.ops.ladder import GEMV_RUNGS, MATMUL_RUNGS

ROOT = Path(__file__).resolve().parents[3]
TUTORIAL = ROOT / "docs" / "tutorial"
CHAPTERS = sorted(TUTORIAL.glob("[0-9][0-9]_*.md"))
ENGLISH = [path for path in CHAPTERS if not path.name.endswith(".zh-CN.md")]
PAGES = [*CHAPTERS, TUTORIAL / "README.md", TUTORIAL / "README.zh-CN.md"]
LONGEST_EXCERPT = 25

_EXCERPT = re.compile(r"^<!-- from (\S+) -->\n```(?:cuda|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RUNS = re.compile(r"^<!-- runs on the CPU -->\n```python\n(.*?)^```\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(path):
    return path.name


def text(path):
    return path.read_text(encoding="utf-8")


def chinese(path):
    return path.with_name(path.name.removesuffix(".md") + ".zh-CN.md")


@pytest.mark.parametrize("chapter", CHAPTERS, ids=name)
def test_excerpts_are_the_code(chapter):
    excerpts = _EXCERPT.findall(text(chapter))
    assert excerpts
    assert len(excerpts) == text(chapter).count("<!-- from "), "a marker does not stand on the line above a fence"
    for source, quoted in excerpts:
        # Whole lines: both begin with a line break.
        assert f"\n{quoted}" in f"\n{text(ROOT / source)}", f"{source} has no such lines:\n{quoted}"
        assert len(quoted.splitlines()) <= LONGEST_EXCERPT, f"too long:\n{quoted}"


@pytest.mark.parametrize("chapter", CHAPTERS, ids=name)
def test_snippets_print_what_is_said(chapter, monkeypatch):
    snippets = _RUNS.findall(text(chapter))
    assert len(snippets) == text(chapter).count("<!-- runs "), "a snippet has no output below it"
    # In the tests it is the CPU that is promised.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for code, expected in snippets:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(chapter), "exec"), {})
        assert printed.getvalue() == expected


@pytest.mark.parametrize("chapter", ENGLISH, ids=name)
def test_both_languages_show_the_same_code(chapter):
    assert _EXCERPT.findall(text(chapter)) == _EXCERPT.findall(text(chinese(chapter)))
    assert _RUNS.findall(text(chapter)) == _RUNS.findall(text(chinese(chapter)))


@pytest.mark.parametrize("chapter", ENGLISH, ids=name)
def test_contents_list_every_chapter(chapter):
    assert f"]({chapter.name})" in text(TUTORIAL / "README.md")
    assert f"]({chinese(chapter).name})" in text(TUTORIAL / "README.zh-CN.md")


def test_every_chapter_has_its_translation():
    assert sorted([*ENGLISH, *(chinese(chapter) for chapter in ENGLISH)]) == CHAPTERS
    assert [int(chapter.name[:2]) for chapter in ENGLISH] == list(range(len(ENGLISH)))
    assert len(ENGLISH) >= 9


@pytest.mark.parametrize("page", PAGES[-2:], ids=name)
def test_contents_say_what_every_rung_adds(page):
    for rung in (*MATMUL_RUNGS, *GEMV_RUNGS):
        assert re.search(rf"^\|.*`{rung}`.*\| .+ \|$", text(page), re.MULTILINE), rung


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_languages_stay_apart(page):
    """A page links to pages of its own language, and to its own translation."""
    is_chinese = page.name.endswith(".zh-CN.md")
    other = page.name.replace(".zh-CN.md", ".md") if is_chinese else chinese(page).name
    linked = re.findall(r"\]\(((?:\d\d_\w+|README)(?:\.zh-CN)?\.md)\)", text(page))
    assert linked.count(other) == 1
    assert [link for link in linked if link != other and link.endswith(".zh-CN.md") != is_chinese] == []
