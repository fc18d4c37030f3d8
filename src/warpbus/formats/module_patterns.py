"""Modules as PEFT's `adapter_config.json` names them: the ends of their names, or a regular expression.

The expressions come from files that anyone may have written, and Python's `re` can take hours for a short one. So only
those are matched whose work is bounded: few repetitions, none of a group, and few alternatives beside them. For a name
of 60 characters five repetitions take 0.2 s at worst, three less than a millisecond.
"""

import math
import re
from collections.abc import Iterable

from warpbus.errors import CheckpointError

MAX_LENGTH = 1000
MAX_REPETITIONS = 5

# Atoms without repetition: an escaped character, and a set of characters, which may begin with its closing bracket.
_ATOMS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_GROUP = re.compile(r"\(\?:?")
_REPETITION = re.compile(r"[*+?}]+")
_WORDS = re.compile(r"\((\w*(?:\|\w*)*)\)")
# Flags could let spaces stand between a group and what repeats it; a comment may hold any brackets.
_REFUSED = re.compile(r"\\[1-9]|\(\?(P=|[aiLmsux#(-])")


class ModulePattern:
    """A regular expression for the names of modules.

    Args:
        expression: a regular expression of Python's `re`.
        where: the file and the setting, for messages.
        most: how many repetitions it may have.

    Attributes:
        repeats: whether it has any.

    Raises:
        CheckpointError: if it is none, or one whose matching has no bound.
    """

    def __init__(self, expression: str, where: str, most: int = MAX_REPETITIONS) -> None:
        if len(expression) > MAX_LENGTH:
            raise CheckpointError(
                f"{where}: a pattern of {len(expression):,} characters: expected {MAX_LENGTH} at most"
            )
        bare = _GROUP.sub("(", _ATOMS.sub(".", expression))
        repetitions = len(_REPETITION.findall(bare))
        unbounded = _REFUSED.search(expression) or re.search(r"\)[*+?{]", bare)
        if unbounded or repetitions > most or _ways(bare) > 4 * 16 ** (most - repetitions):
            raise CheckpointError(
                f"{where}: {expression[:80]!a}: a pattern with repeated groups, references, comments, flags, many "
                f"alternatives or more than {most} repetitions may take forever to match: list the names of the "
                "modules instead"
            )
        self.repeats = repetitions > 0
        try:
            self._compiled = re.compile(expression)
        except (re.error, OverflowError, RecursionError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(f"{where}: {expression[:80]!a}: not a regular expression ({reason})") from None

    def is_name(self, module: str) -> bool:
        """Whether it matches the whole name."""
        return self._compiled.fullmatch(module) is not None

    def is_end(self, module: str) -> bool:
        """Whether it matches the whole name, or all that follows one of its dots."""
        parts = module.split(".")
        return any(self.is_name(".".join(parts[start:])) for start in range(len(parts)))


def _ways(bare: str) -> int:
    """How often the choices between alternatives can be made anew: those of groups that follow each other multiply.

    Of words only those can match at one place of which one begins with the other.
    """
    ways = 1
    for group in _WORDS.findall(bare):
        words = group.split("|")
        ways *= max(sum(word.startswith(other) for other in words) for word in words)
    alternatives, around = [1], [0]
    for character in _WORDS.sub(".", bare):
        if character == "(":
            around.append(len(alternatives))
            alternatives.append(1)
        elif character == "|":
            alternatives[around[-1]] += 1
        elif character == ")" and len(around) > 1:
            around.pop()
    return ways * math.prod(alternatives)


def is_listed(module: str, names: Iterable[str]) -> bool:
    """Whether a module, or the end of its name after a dot, is among `names`."""
    return any(module == name or module.endswith(f".{name}") for name in names)
