"""Make the packaged calibration texts, `src/warpbus/quantization/data/general.jsonl`.

    python scripts/calibration_texts.py DATA

`DATA` is a directory with poems-train.jsonl.xz (chinese-poetry, MIT), tinyshakespeare.txt (public domain) and
wikitext2-valid.txt (Wikipedia, CC BY-SA 3.0). The rest is from this repository: its documents, its code, and the
conversations in scripts/calibration, which were written for this purpose. The README beside the output says how much of
each is in it. The same inputs give the same file.
"""

import argparse
import ast
import json
import lzma
import random
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "warpbus"
OUTPUT = PACKAGE / "quantization" / "data" / "general.jsonl"

LINE = 8_000
"""UTF-8 bytes of a line: about 2,048 tokens, the longest sequence that is drawn from it by default."""

Turn = tuple[str, str]
Line = dict[str, object]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="directory of the texts that are not part of this repository")
    data = parser.parse_args(arguments).data
    parts: dict[str, list[Line]] = {
        "encyclopedia": texts(encyclopedia(data / "wikitext2-valid.txt"), 40),
        "plays": texts((data / "tinyshakespeare.txt").read_text(encoding="utf-8").split("\n\n"), 8),
        "poems": texts(poems(data / "poems-train.jsonl.xz"), 24),
        "English documents": texts(tutorial(chinese=False), 10),
        "Chinese documents": texts(tutorial(chinese=True), 12),
        "code": texts(code(), 34),
        "English conversations": conversations([*written("en"), *explained(chinese=False)], 22),
        "Chinese conversations": conversations([*written("zh"), *explained(chinese=True)], 20),
        "programming conversations": conversations(functions(), 18),
    }
    lines = [{"source": name, **line} for name, part in parts.items() for line in part]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    OUTPUT.write_text(text, encoding="utf-8")
    for name, part in parts.items():
        size = sum(len(json.dumps(line, ensure_ascii=False).encode()) for line in part)
        print(f"{name}: {len(part)} lines, {size / 1000:.0f} kB")
    print(f"{OUTPUT}: {len(lines)} lines, {len(text.encode()) / 1e6:.2f} MB")
    return 0


def texts(pieces: Iterable[str], count: int) -> list[Line]:
    """At most `count` lines of pieces that follow each other."""
    found: list[Line] = []
    held: list[str] = []
    for piece in (each.strip("\n") for each in pieces if each.strip()):
        held.append(piece)
        if len("\n\n".join(held).encode()) >= LINE:
            found.append({"text": "\n\n".join(held)})
            held = []
            if len(found) == count:
                return found
    return [*found, {"text": "\n\n".join(held)}] if held else found


def conversations(turns: Iterable[Turn], count: int) -> list[Line]:
    """At most `count` lines, each a conversation of several turns."""
    found: list[Line] = []
    held: list[dict[str, str]] = []
    for question, answer in turns:
        held += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if sum(len(message["content"].encode()) for message in held) >= LINE * 3 // 4:
            found.append({"messages": held})
            held = []
            if len(found) == count:
                return found
    return [*found, {"messages": held}] if held else found


def encyclopedia(path: Path) -> Iterator[str]:
    """Runs of sentences without unknown words, with the spaces of the tokenized form removed."""
    for paragraph in path.read_text(encoding="utf-8").splitlines():
        run: list[str] = []
        for sentence in [*re.split(r"(?<= \.) ", paragraph.strip()), "<unk>"]:
            if "<unk>" not in sentence and not sentence.startswith("="):
                run.append(sentence)
                continue
            if len(" ".join(run)) > 150:
                yield natural(" ".join(run))
            run = []


def natural(text: str) -> str:
    """Undo the tokenization of WikiText-2."""
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    text = re.sub(r" ([,.;:!?%)\]]|'s\b|n't\b)", r"\1", text)
    text = re.sub(r"([(\[$£]) ", r"\1", text)
    return re.sub(r'" ([^"]*?) "', r'"\1"', text)


def poems(path: Path) -> Iterator[str]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in islice(lines, 2_000):
            poem = json.loads(line)
            verses = "\n".join(poem["lines"])
            yield f"《{poem['title']}》\n{poem['dynasty']} · {poem['author']}\n{verses}"


def tutorial(*, chinese: bool) -> Iterator[str]:
    """The paragraphs of the tutorial, without its pictures."""
    for page in sorted((ROOT / "docs" / "tutorial").glob("0*.md")):
        if page.name.endswith(".zh-CN.md") == chinese:
            yield from (part for part in page.read_text(encoding="utf-8").split("\n\n") if not part.startswith("!["))


def code() -> Iterator[str]:
    """Modules and kernels of every language in this repository, mixed."""
    patterns = ("kernels/csrc/**/*.cu", "engine/*.py", "pool/**/*.py", "server/page/*.js", "server/page/*.css")
    files = [path for pattern in patterns for path in sorted(PACKAGE.glob(pattern))]
    random.Random(0).shuffle(files)
    for path in files:
        yield from path.read_text(encoding="utf-8").split("\n\n")


def written(language: str) -> Iterator[Turn]:
    """The questions and answers of scripts/calibration."""
    text = (ROOT / "scripts" / "calibration" / f"conversations.{language}.md").read_text(encoding="utf-8")
    for part in re.split(r"^# (?:Q: |问：)", text, flags=re.MULTILINE)[1:]:
        question, _, answer = part.partition("\n")
        yield question.strip(), answer.strip()


def explained(*, chinese: bool) -> Iterator[Turn]:
    """The sections of the documents, each as the answer to a question about it."""
    pages = sorted((ROOT / "docs" / "zh").glob("*.md")) if chinese else sorted((ROOT / "docs").glob("*.md"))
    for page in pages:
        title, *sections = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        name = title.splitlines()[0].strip("# ")
        for section in sections:
            heading, _, body = section.partition("\n")
            if len(body) > 400:
                question = f"请介绍“{name}”中的“{heading}”。" if chinese else f"{name}: explain “{heading}”."
                yield question, body.strip()


def functions() -> Iterator[Turn]:
    """Functions with long docstrings: written from their signature and their docstring."""
    for path in sorted([*PACKAGE.glob("models/*.py"), *PACKAGE.glob("formats/**/*.py"), *PACKAGE.glob("train/*.py")]):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef) or len(ast.get_docstring(node) or "") < 150:
                continue
            text = ast.get_source_segment(source, node) or ""
            docstring, lines = node.body[0], text.splitlines()
            head = "\n".join(lines[: (docstring.end_lineno or node.lineno) - node.lineno + 1])
            yield f"Complete this function:\n```python\n{head}\n```", f"```python\n{text}\n```"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
