"""Forms of verse, and which records are usable poems."""

from typing import Any

import pytest

from warpbus.demo.poems import Poem, is_quatrain, read_poem, verse_lengths, verses

QUIET_NIGHT = ("床前明月光，疑是地上霜。", "举头望明月，低头思故乡。")


def poem(*couplets: str) -> Poem:
    return Poem("唐", "李白", "静夜思", couplets)


def test_verses() -> None:
    text = "\n".join(QUIET_NIGHT)
    assert poem(*QUIET_NIGHT).text == text
    assert verses(text) == ["床前明月光", "疑是地上霜", "举头望明月", "低头思故乡"]
    assert verse_lengths(text) == [5, 5, 5, 5]
    assert verses("，。？！；：、 \n") == []


@pytest.mark.parametrize(
    ("characters", "count", "form"),
    [
        (5, 4, "五言绝句"),
        (7, 4, "七言绝句"),
        (6, 4, "六言绝句"),
        (5, 8, "五言律诗"),
        (7, 8, "七言律诗"),
        (4, 6, "四言诗"),
        (5, 12, "五言古诗"),
        (7, 2, "七言古诗"),
        (6, 8, None),
        (3, 4, None),
    ],
)
def test_forms(characters: int, count: int, form: str | None) -> None:
    verse = "春夜江山月明花"[:characters]
    assert poem(*[f"{verse}，{verse}。"] * (count // 2)).form == form


def test_verses_of_different_lengths_have_no_form() -> None:
    assert poem("床前明月光，疑是地上霜。", "举头望明月，低头思。").form is None


@pytest.mark.parametrize(
    ("text", "characters", "expected"),
    [
        ("\n".join(QUIET_NIGHT), 5, True),
        ("\n".join(QUIET_NIGHT), 7, False),
        ("床前明月光，疑是地上霜。", 5, False),
        ("床前明月光，疑是地上霜。举头望明月，床前明月光。", 5, False),
        ("床前明月光，疑是地上霜。举头望明月，低头思故。", 5, False),
        ("床前明月光，疑是地上霜。举头望明月，低头思abc。", 5, False),
        ("床前明月光，疑是地上霜。举头望明月，低头思故a。", 5, False),
        ("床前明月光，疑是地上霜。举头望明月，低头思故乡。月", 5, False),
        ("𠀀前明月光，疑是〇上霜。举头望明月，低头思故乡。", 5, True),
        ("", 5, False),
    ],
)
def test_quatrains(text: str, characters: int, expected: bool) -> None:
    assert is_quatrain(text, characters) is expected


def record(**changes: Any) -> dict[str, Any]:
    return {"dynasty": "唐", "author": "李白", "title": "静夜思", "lines": list(QUIET_NIGHT), **changes}


def test_a_usable_record() -> None:
    assert read_poem(record()) == poem(*QUIET_NIGHT)
    assert read_poem(record(lines=[f" {line}\n" for line in QUIET_NIGHT])) == poem(*QUIET_NIGHT)


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("静夜思（其一）", "静夜思"),
        ("静夜思(又作)", "静夜思"),
        ("静夜思〔一〕 其二", "静夜思"),
        ("  静夜  思\u3000其二 ", "静夜 思 其二"),
        ("（无题）", None),
        ("", None),
        ("夜" * 40, "夜" * 40),
        ("夜" * 41, None),
    ],
)
def test_titles_lose_their_notes(title: str, expected: str | None) -> None:
    found = read_poem(record(title=title))
    assert (found and found.title) == expected


@pytest.mark.parametrize(
    "lines",
    [
        [],
        None,
        7,
        ["床前明月光，疑是□上霜。"],
        ["床前明月光，疑是地上霜。", "举头望明月（一作山月），低头思故乡。"],
        ["床前明月光, 疑是地上霜."],
        ["床前明月光，疑是地上霜。", "１"],
    ],
)
def test_lost_characters_and_notes_are_left_out(lines: Any) -> None:
    assert read_poem(record(lines=lines)) is None
