"""The drawings are what the script makes, are shown by a page of each language, and say what they show."""

import importlib
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
PLACE = ROOT / "docs" / "tutorial" / "drawings"
NAMES = sorted(path.name for path in PLACE.glob("*.svg"))

_SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)]*drawings/([\w.-]+\.svg))\)")


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("draw")


def test_committed_drawings_are_what_the_script_makes(draw):
    made = draw.files()
    assert sorted(made) == NAMES, "run scripts/draw.py"
    for name, text in made.items():
        assert (PLACE / name).read_bytes() == text.encode(), f"{name}: run scripts/draw.py"


@pytest.mark.parametrize("name", NAMES)
def test_drawings_are_xml_without_scripts_and_links(name):
    root = ElementTree.parse(PLACE / name).getroot()
    assert {element.tag.rpartition("}")[2] for element in root.iter()} <= {
        *("svg", "title", "style", "defs", "marker", "path", "rect", "text", "polyline", "circle"),
    }
    title = root.find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert title.text == root.get("aria-label")
    width = float(root.get("width", "0"))
    for element in root.iter():
        assert float(element.get("x", "0")) + float(element.get("width", "0")) <= width


def test_pages_show_drawings_of_their_language():
    shown: dict[str, str] = {}
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        is_chinese = page.name.endswith(".zh-CN.md") or page.parent.name == "zh"
        for alternative, target, name in _SHOWN.findall(page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), f"{page}: {target}"
            assert name.endswith(".zh-CN.svg") == is_chinese, f"{page}: {name}"
            assert bool(re.search("[\u4e00-\u9fff]", alternative)) == is_chinese, f"{page}: {alternative}"
            shown[name] = alternative
    # Documents without a Chinese page leave the Chinese drawing unused.
    assert {name for name in NAMES if not name.endswith(".zh-CN.svg")} <= set(shown)
