"""Classical Chinese verse: what form a poem has, and whether a text keeps to a form."""

import re
from dataclasses import dataclass

# A poem's form by (characters in a verse, number of verses).
FORMS = {
    (5, 4): "五言绝句",
    (7, 4): "七言绝句",
    (6, 4): "六言绝句",
    (5, 8): "五言律诗",
    (7, 8): "七言律诗",
}
OLD_STYLE = {4: "四言诗", 5: "五言古诗", 7: "七言古诗"}

_PUNCTUATION = re.compile(r"[，。？！；：、\s]+")


@dataclass(frozen=True)
class Poem:
    """A poem; `couplets` are its lines with their punctuation, for instance `床前明月光，疑是地上霜。`."""

    dynasty: str
    author: str
    title: str
    couplets: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.couplets)

    @property
    def form(self) -> str | None:
        """The name of its form, or `None` where the verses differ in length."""
        lengths = verse_lengths(self.text)
        if len(set(lengths)) != 1:
            return None
        return FORMS.get((lengths[0], len(lengths))) or OLD_STYLE.get(lengths[0])


def verses(text: str) -> list[str]:
    """The verses of a text, without punctuation."""
    return [verse for verse in _PUNCTUATION.split(text) if verse]


def verse_lengths(text: str) -> list[int]:
    """How many characters each verse has."""
    return [len(verse) for verse in verses(text)]


def is_quatrain(text: str, characters: int) -> bool:
    """Four verses of `characters` characters each, all of them Han, and no verse twice."""
    found = verses(text)
    return len(set(found)) == len(found) == 4 and all(
        len(verse) == characters and all(_is_han(character) for character in verse) for verse in found
    )


def _is_han(character: str) -> bool:
    code = ord(character)
    return 0x4E00 <= code <= 0x9FFF or 0x3400 <= code <= 0x4DBF or 0x20000 <= code <= 0x323AF or code == 0x3007


def read_poem(record: dict[str, object]) -> Poem | None:
    """A poem from a record of the data set, or `None` where characters are lost or notes stand among the verses."""
    couplets = record.get("lines")
    if not isinstance(couplets, list) or not couplets:
        return None
    lines = tuple(str(line).strip() for line in couplets)
    title = re.sub(r"[（(［〔\[].*", "", str(record.get("title", ""))).strip()
    title = re.sub(r"\s+", " ", title)
    marks = set("".join(lines)) - set("，。？！；：、")
    if not title or len(title) > 40 or not all(_is_han(character) for character in marks):
        return None
    return Poem(str(record.get("dynasty", "")), str(record.get("author", "")), title, lines)
