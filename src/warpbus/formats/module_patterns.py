"""Modules as PEFT's `adapter_config.json` names them: the ends of their names, or a regular expression.

The expressions come from files that anyone may have written, and Python's `re` can take hours for a short one. So only
those are matched whose work is bounded: few repetitions, and none of a group. For a name of 60 characters five of them
take 0.2 s at worst, three less than a millisecond.
"""

import re
from collections.abc import Iterable

from warpbus.errors import CheckpointError

MAX_LENGTH = 1000
MAX_REPETITIONS = 5

# What is no repetition: an escaped character, a set of characters, and the mark after which a group says what it is.
_ATOMS = re.compile(r"\\.|\[\]?(?:\\.|[^\]\\])*\]|\(\?", re.DOTALL)
_REPETITION = re.compile(r"[*+?}]+")


class ModulePattern:
    """A regular expression for the names of modules.

    Args:
        expression: what Python's `re` takes.
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
        bare = _ATOMS.sub("x", expression)
        repeats_group = re.search(r"\)[*+?{]", bare) is not None
        # Flags could let spaces stand between a group and what repeats it.
        refers_back_or_has_flags = re.search(r"\\[1-9]|\(\?(P=|[aiLmsux-])", expression) is not None
        repetitions = len(_REPETITION.findall(bare))
        if repeats_group or refers_back_or_has_flags or repetitions > most:
            raise CheckpointError(
                f"{where}: {expression[:80]!a}: a pattern with repeated groups, references, flags or more than {most} "
                "repetitions may take forever to match: list the names of the modules instead"
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


def is_listed(module: str, names: Iterable[str]) -> bool:
    """Whether a module, or the end of its name after a dot, is among `names`."""
    return any(module == name or module.endswith(f".{name}") for name in names)
