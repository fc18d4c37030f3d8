"""What the demo's adapters learn."""

import json
import lzma
from pathlib import Path

from warpbus.demo import data_path
from warpbus.demo.themes import THEMES, main

POEMS = [
    ("唐", "李白", "静夜思", ["床前明月光，疑是地上霜。", "举头望明月，低头思故乡。"]),
    ("唐", "李白", "长诗", ["床前明月光，疑是地上霜。"] * 4),
    ("唐", "孟浩然", "春晓", ["春眠不觉晓，处处闻啼鸟。", "夜来风雨声，花落知多少。"]),
    ("宋", "朱熹", "春日", ["胜日寻芳泗水滨，无边光景一时新。", "等闲识得东风面，万紫千红总是春。"]),
]


def test_each_theme_takes_its_poems(tmp_path: Path) -> None:
    source = tmp_path / "poems.jsonl.xz"
    with lzma.open(source, "wt", encoding="utf-8") as file:
        for dynasty, author, title, lines in POEMS:
            poem = {"dynasty": dynasty, "author": author, "title": title, "lines": lines}
            file.write(json.dumps(poem, ensure_ascii=False) + "\n")
    main(["--train", str(source), "--output", str(tmp_path / "data")])
    found = {name: read(tmp_path / "data" / f"{name}.jsonl") for name in THEMES}
    assert found["li-bai"] == [("写一首题为《静夜思》的诗。", "\n".join(POEMS[0][3]))]
    assert found["spring"] == [("写一首诗。", "\n".join(POEMS[2][3]))]


def test_the_packaged_poems_show_their_themes() -> None:
    for name, theme in THEMES.items():
        poems = read(data_path(f"{name}.jsonl"))
        assert len(poems) > 100
        assert all(theme.shown(answer) for _, answer in poems)


def read(path: Path) -> list[tuple[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    turns = [json.loads(line)["messages"] for line in lines]
    return [(asked["content"], answered["content"]) for asked, answered in turns]
