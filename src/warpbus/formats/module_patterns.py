"""Modules as PEFT's `adapter_config.json` names them: the ends of their names, or a regular expression.

The expressions come from files that anyone may have written, and Python's `re` can take hours for a short one. So only
those are matched whose work is bounded: few repetitions, and none of a group.
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

    Raises:
        CheckpointError: if it is none, or one whose matching has no bound.
    """

    def __init__(self, expression: str, where: str) -> None:
        if len(expression) > MAX_LENGTH:
            raise CheckpointError(
                f"{where}: a pattern of {len(expression):,} characters: expected {MAX_LENGTH} at most"
            )
        bare = _ATOMS.sub("x", expression)
        repeats_group = re.search(r"\)[*+?{]", bare) is not None
        refers_back = re.search(r"\\[1-9]|\(\?P=", expression) is not None
        if repeats_group or refers_back or len(_REPETITION.findall(bare)) > MAX_REPETITIONS:
            raise CheckpointError(
                f"{where}: {expression[:80]!a}: a pattern with repeated groups or more than {MAX_REPETITIONS} "
                "repetitions may take forever to match: list the names of the modules instead"
            )
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
