"""The language of what people read: under a Chinese locale, English text becomes Chinese before it is shown.

Everything is written in English. `translated` looks a text up in the catalogue `zh.po`. Its entries are texts, and
templates such as `{0}: no such file`, which stand for f-strings of the package. A value of several words that fills a
template is looked up as well; a single word may be the name of a file. So all packages compose messages as they like;
the command line translates what it prints, and `warpbus.figures` what it draws. A text that the catalogue does not
have stays English. `--json` prints without `translated`.
"""

import gettext
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

CATALOGUE = Path(__file__).with_name("zh.po")

_PLACEHOLDER = re.compile(r"\{(\d+)\}")
_ENTRY = re.compile(r'^msgid ((?:".*"\n)+)msgstr ((?:".*"(?:\n|\Z))+)', re.MULTILINE)
_COUNTED = re.compile(r"\{0\} \w+")  # "{0} rows": only a number takes the place
_CHINESE = re.compile(r"[\u4e00-\u9fff]")
_LEAST_LETTERS = 4  # of a template without its placeholders: fewer would fit texts that it does not mean


class Catalogue(gettext.NullTranslations):
    """Translations of texts and of templates.

    Args:
        entries: Chinese texts by English ones. `{0}`, `{1}`, ... stand for any text.
    """

    def __init__(self, entries: Mapping[str, str]) -> None:
        super().__init__()
        self.entries = dict(entries)
        templates = [text for text in self.entries if _PLACEHOLDER.search(text)]
        # The template with most text of its own is the one that is meant. Its longest piece rules it out fastest.
        self._templates = [
            (max(_PLACEHOLDER.split(text)[::2], key=len), text)
            for text in sorted(templates, key=lambda text: -len(_PLACEHOLDER.sub("", text)))
        ]

    def gettext(self, message: str) -> str:
        """The translation, line by line if there is none of the whole, or the message itself. Blanks around it stay."""
        found = self.entries.get(message)
        if found is not None:
            return found
        inner = message.strip()
        if inner != message:
            return message.replace(inner, self.gettext(inner), 1) if inner else message
        for longest, template in self._templates:
            if longest in message and (match := _pattern(template).fullmatch(message)):
                return _filled(
                    self.entries[template], [self.gettext(value) if " " in value else value for value in match.groups()]
                )
        if "\n" in message:
            return "\n".join(map(self.gettext, message.split("\n")))
        place, _, text = message.partition(": ")
        if text and " " not in place:  # such as "poems.jsonl:3: no text"; the text may be Chinese already
            chinese = self.gettext(text)
            return f"{place}：{chinese}" if chinese != text or _CHINESE.match(text) else message
        return message


def _filled(template: str, values: list[str]) -> str:
    return _PLACEHOLDER.sub(lambda place: values[int(place[1])], template)


@cache
def _pattern(template: str) -> re.Pattern[str]:
    """An expression that finds the values of a template's placeholders."""
    pieces = _PLACEHOLDER.split(template)[::2]
    if len(re.findall(r"[^\W\d_]", "".join(pieces))) < _LEAST_LETTERS:
        raise ValueError(f"{template!r} would fit nearly every text")
    value = r"([-+\d.,]+)" if _COUNTED.fullmatch(template) else "(.*?)"
    return re.compile(value.join(map(re.escape, pieces)), re.DOTALL)


def read_catalogue(text: str) -> dict[str, str]:
    """The entries of a .po file that are translated."""

    def joined(lines: str) -> str:
        return "".join(json.loads(line) for line in lines.splitlines())

    entries = {joined(english): joined(chinese) for english, chinese in _ENTRY.findall(text)}
    return {english: chinese for english, chinese in entries.items() if english and chinese}


class _LanguageInUse:
    """The translations in use; none until `use_language`."""

    translations: gettext.NullTranslations = gettext.NullTranslations()


@cache
def _chinese() -> Catalogue:
    return Catalogue(read_catalogue(CATALOGUE.read_text(encoding="utf-8")))


def use_language(language: str) -> None:
    """Show text in this language, `zh` or `en`, from now on."""
    _LanguageInUse.translations = _chinese() if language == "zh" else gettext.NullTranslations()


def language_in_use() -> str:
    """The language of `translated`, `zh` or `en`."""
    return "zh" if isinstance(_LanguageInUse.translations, Catalogue) else "en"


@contextmanager
def in_language(language: str) -> Iterator[None]:
    """A block in which text is shown in this language, `zh` or `en`; not for several threads at once."""
    before = _LanguageInUse.translations
    use_language(language)
    try:
        yield
    finally:
        _LanguageInUse.translations = before


def translated(text: str) -> str:
    """The text in the language in use."""
    return _LanguageInUse.translations.gettext(text) if text else text
