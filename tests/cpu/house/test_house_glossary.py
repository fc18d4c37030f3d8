"""The glossary is short, sorted, and defines only terms that are used."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
GLOSSARY = ROOT / "docs" / "glossary.md"
MAX_TERMS = 40

ENTRY = re.compile(r"^\| (?!term \|)(?P<term>[\w][\w -]*) \| (?P<meaning>\S.*) \|$", re.MULTILINE)
TERMS = [entry["term"] for entry in ENTRY.finditer(GLOSSARY.read_text(encoding="utf-8"))]


def test_the_glossary_is_short_and_sorted():
    rows = [line for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert len(TERMS) == len(rows) - 2  # each row below the head is one entry
    assert 0 < len(TERMS) <= MAX_TERMS
    assert sorted({term.lower() for term in TERMS}) == [term.lower() for term in TERMS]


def test_every_term_of_the_glossary_is_used():
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files if path != GLOSSARY)
    words = re.sub(r"[\s*`]+", " ", text).lower()
    unused = [term for term in TERMS if not re.search(rf"\b{re.escape(term.lower())}(?:e?s)?\b", words)]
    assert unused == []
