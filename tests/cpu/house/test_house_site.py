"""The documentation site: every document has a place in it, and links are rewritten to these places."""

import importlib
import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import warpbus

pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    path = ROOT / "scripts" / "documentation_site.py"
    spec = importlib.util.spec_from_file_location("documentation_site", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_document_is_in_the_navigation(site, tmp_path):
    site.arrange(tmp_path, None)
    groups = [pages for entry in (*site.english(), *site.chinese(tmp_path)) for pages in entry.values()]
    named = {page for pages in groups for page in ([pages] if isinstance(pages, str) else pages)}
    pages = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.md")}
    assert {page for page in pages if not page.startswith("files/")} == named
    assert (tmp_path / "files" / "src" / "warpbus" / "kernels" / "csrc" / "ladder" / "vector_add.cu").is_file()
    assert (tmp_path / "pictures" / "chat_page.png").is_file()


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("README.md", "[a](docs/pool.md#leases)", "[a](pool.md#leases)"),
        ("README.md", '<img src="docs/pictures/chat_page.png">', '<img src="pictures/chat_page.png">'),
        ("README.zh-CN.md", "[a](docs/zh/moe.md) [b](docs/pool.md)", "[a](moe.md) [b](../pool.md)"),
        ("docs/tutorial/README.md", "[a](../../README.md)", "[a](../index.md)"),
        ("docs/pool.md", "[a](../src/warpbus/errors.py)", "[a](files/src/warpbus/errors.py)"),
        ("docs/pool.md", "[a](#here) [b](https://x.y)", "[a](#here) [b](https://x.y)"),
        ("docs/pool.md", "see [the kernels](../src/warpbus/kernels/csrc).", "see the kernels."),
        ("docs/pool.md", "```\n[a](b.md)\n```\n", "```\n[a](b.md)\n```\n"),
        ("docs/moe.md", "![a](pictures/chat_page.png)\n", "[![a](pictures/chat_page.png)](pictures/chat_page.png)\n"),
        (
            "docs/moe.md",
            "1. Why?\n\n   <details><summary>Answer</summary>\n\n   `x`\n   </details>\n",
            '1. Why?\n\n    ??? question "Answer"\n\n        `x`\n',
        ),
        ("docs/zh/pool.md", "- 一行，\n  下一行\n\n另一段\n用 `x`\n", "- 一行，下一行\n\n另一段用 `x`\n"),
        (
            "docs/zh/pool.md",
            "一行，\n`x`、\n[另](moe.md)\n和 y，\nz：\n- 一\n",
            "一行，`x`、[另](moe.md)\n和 y，z：\n- 一\n",
        ),
        ("docs/zh/pool.md", "一行，\n4 比特、\n+1：\n1. 一\n", "一行，4 比特、+1：\n1. 一\n"),
        ("docs/zh/pool.md", "```\n一行\n下一行\n```\n", "```\n一行\n下一行\n```\n"),
    ],
)
def test_links_are_rewritten(site, source, text, expected):
    assert site.rewritten(source, text, None)[0] == expected


def test_directories_lead_to_the_repository_if_there_is_one(site):
    text, linked = site.rewritten("docs/pool.md", "[a](../src/warpbus/kernels/csrc)", "https://example.org/w")
    assert text == "[a](https://example.org/w/tree/main/src/warpbus/kernels/csrc)"
    assert linked == []


def test_the_reference_names_what_is_public(site):
    """The API of the site is that of `warpbus.__all__`, by the names that a user writes."""
    named = {name for names in site.API.values() for name in names}
    in_modules = {"pool": "warpbus.pool.connect", "WarpbusError": "warpbus.errors"}
    assert {in_modules.get(name, f"warpbus.{name}") for name in warpbus.__all__} <= named
    for name in named:
        module, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(module), last)


def test_languages_are_no_sites_of_their_own(site, tmp_path):
    """A list of them in `alternate` would make the theme's script ask for zh/sitemap.xml."""
    site.arrange(tmp_path, None)
    assert site.settings(tmp_path, None)["extra"] == {"alternate": True}
    assert (site.THEME / "partials" / "alternate.html").is_file()  # the menu, which that list would have filled
    chinese = (tmp_path / "zh" / "reference.md").read_text(encoding="utf-8")
    assert [line for line in chinese.splitlines() if line.startswith(":::")] == [
        f"::: {name}" for names in site.API.values() for name in names
    ]
    assert "英文" in chinese


def test_the_extra_has_what_the_script_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = " ".join(project["optional-dependencies"]["docs"])
    for name in ("mkdocs-material", "mkdocstrings", "jieba", "pyyaml"):
        assert name in text
