"""`Schemes`: which scheme each matrix of a model has. Sensitive layers may keep more bits than the rest."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from warpbus.errors import SchemeError
from warpbus.qtensor.scheme import Scheme

_PATTERN = "re:"
_LONGEST = 4096  # characters of a pattern
_MOST_CHOICES = 8  # repetitions, options and groups of a pattern

# Python's `re` tries all ways that a pattern may fit, and a pattern may come out of a file: repeated groups are
# refused, and so are many choices.
_NO_SYNTAX = re.compile(r"\\.|\[[^\]]*\]", re.DOTALL)
_CHOICE = re.compile(r"[*+?{(]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")


@dataclass(frozen=True)
class Schemes:
    """The schemes of a model's matrices.

    Attributes:
        default: of the matrices that no exception fits; None: they are not quantized.
        exceptions: by the matrix' name in the checkpoint without `.weight`, `model.layers.3.mlp.down_proj`; or by
            `re:` and a regular expression that the name has to begin with (end it with `$` to mean the whole name).
            The first that fits holds.

    Raises:
        SchemeError: if a pattern is no regular expression, or one that may take forever.
    """

    default: Scheme | None
    exceptions: Mapping[str, Scheme | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.exceptions:
            if name.startswith(_PATTERN):
                _check_pattern(name.removeprefix(_PATTERN))

    def of(self, name: str) -> Scheme | None:
        """The scheme of a matrix, or None if it is not quantized."""
        for exception, scheme in self.exceptions.items():
            if exception == name:
                return scheme
            if exception.startswith(_PATTERN) and re.match(exception.removeprefix(_PATTERN), name):
                return scheme
        return self.default

    def distinct(self) -> tuple[Scheme, ...]:
        """The schemes that there are, each once, that of most matrices (the default) first."""
        return tuple(dict.fromkeys(each for each in (self.default, *self.exceptions.values()) if each is not None))

    def __str__(self) -> str:
        return " + ".join(map(str, self.distinct())) or "not quantized"

    def to_json(self) -> dict[str, object]:
        """The same in JSON's types."""
        exceptions = {name: None if scheme is None else str(scheme) for name, scheme in self.exceptions.items()}
        return {"default": None if self.default is None else str(self.default), "exceptions": exceptions}

    @classmethod
    def from_json(cls, value: object) -> "Schemes":
        """Undo `to_json`.

        Raises:
            SchemeError: if `value` is not what `to_json` gives.
        """
        if not isinstance(value, dict) or not isinstance(value.get("exceptions"), dict):
            raise SchemeError(f"schemes are {value!a:.80}: expected an object with default and exceptions")
        exceptions = {str(name): _read(text) for name, text in value["exceptions"].items()}
        return cls(_read(value.get("default")), exceptions)


def _read(text: object) -> Scheme | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise SchemeError(f"scheme {text!a:.80}: expected a name such as w4a16-g128, or null")
    return Scheme.parse(text)


def _check_pattern(pattern: str) -> None:
    shown = f"pattern {pattern!a:.80}"
    if len(pattern) > _LONGEST:
        raise SchemeError(f"{shown}: it has {len(pattern)} characters, expected {_LONGEST} at most")
    syntax = _NO_SYNTAX.sub("x", pattern)
    if _REPEATED_GROUP.search(syntax) or len(_CHOICE.findall(syntax)) > _MOST_CHOICES:
        raise SchemeError(
            f"{shown}: expected no repeated group and at most {_MOST_CHOICES} of * + ? {{ (: name the matrices instead"
        )
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as error:
        raise SchemeError(f"{shown}: it is no regular expression: {error}") from error
