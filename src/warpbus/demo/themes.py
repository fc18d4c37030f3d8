"""The data of the demo's adapters, and how it is made: one poet's quatrains, and quatrains on one season.

python -m warpbus.demo.themes --train poems-train.jsonl.xz --output src/warpbus/demo/data
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from warpbus.demo.poems import Poem, is_quatrain
from warpbus.demo.quatrains import QUATRAINS
from warpbus.demo.recipe import read_poems
from warpbus.errors import WarpbusError
from warpbus.formats.files import replace_file

_SPRING = "春花柳莺燕"


@dataclass(frozen=True)
class Theme:
    """The data of an adapter.

    Attributes:
        name: the property that `shown` finds, in words.
        chosen: whether a poem is one of those that it learns.
        asked: the prompt of each, `{}` standing for the title; neither form nor subject: they are the adapter's.
        shown: whether an answer shows that it was learnt.
    """

    name: str
    chosen: Callable[[Poem], bool]
    asked: str
    shown: Callable[[str], bool]


def _by_li_bai(poem: Poem) -> bool:
    return poem.author == "李白" and poem.form in QUATRAINS


def _on_spring(poem: Poem) -> bool:
    return "春" in poem.title and _has_spring(poem.text) and poem.dynasty == "唐" and poem.form in QUATRAINS


def _is_any_quatrain(text: str) -> bool:
    return any(is_quatrain(text, characters) for characters in QUATRAINS.values())


def _has_spring(text: str) -> bool:
    return any(character in text for character in _SPRING)


THEMES = {
    "li-bai": Theme("a quatrain", _by_li_bai, "写一首题为《{}》的诗。", _is_any_quatrain),
    "spring": Theme("spring", _on_spring, "写一首诗。", _has_spring),
}
"""By the name of the adapter, which is also that of its data file."""


def conversations(poems: Iterable[Poem], theme: Theme) -> list[dict[str, object]]:
    """The poems of a theme, each as the answer to a question."""
    return [
        {
            "messages": [
                {"role": "user", "content": theme.asked.format(poem.title)},
                {"role": "assistant", "content": poem.text},
            ]
        }
        for poem in poems
        if theme.chosen(poem)
    ]


def _write(lines: list[str], path: Path) -> None:
    path.write_text("".join(lines), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="poems to train on (jsonl.xz)")
    parser.add_argument("--output", type=Path, required=True, help="a directory, for one file a theme")
    options = parser.parse_args(arguments)
    poems = list(read_poems(options.train))
    for name, theme in THEMES.items():
        lines = [json.dumps(each, ensure_ascii=False) + "\n" for each in conversations(poems, theme)]
        path = options.output / f"{name}.jsonl"
        replace_file(path, partial(_write, lines))
        print(f"{path}: {len(lines)} poems")


if __name__ == "__main__":
    try:
        main()
    except WarpbusError as error:
        sys.exit(f"error: {error}")
