"""Checks names of lm-evaluation-harness's tasks without importing it: its index of tasks takes 8 s to build."""

import difflib
import fnmatch
import importlib.util
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from warpbus.errors import DataError, UsageError

# YAML as the harness's tasks are written, and JSON: names of tasks and groups, and lists of tags.
_NAME = re.compile(r"""(?:^|[\s{,])["']?(?:task|group|tag)["']?[ ]*:[ ]*["']?([^\s"'#,\[\]{}]+)""")
_TAGS = re.compile(r"""^["']?tag["']?[ ]*:[ ]*\n((?:[ ]*-[ ].*\n?)+)""", re.MULTILINE)
_OTHER_FILES = (".csv", ".json", ".jsonl", ".md", ".py", ".pyc", ".txt")


def check_task_names(names: Sequence[str], directory: Path | None = None) -> None:
    """Refuse names that no task, group or tag has. Patterns such as `mmlu_*` are allowed.

    Args:
        directory: of further tasks, as .yaml files. A name that these contain anywhere is left to the harness.

    Raises:
        UsageError: the harness is not installed, or there is no such task.
        DataError: the directory does not exist.
    """
    if directory is not None and not directory.is_dir():
        raise DataError(f"--task-path {directory}: no such directory: name one with .yaml files of tasks")
    package = importlib.util.find_spec("lm_eval")
    if package is None or package.origin is None:
        raise UsageError("--tasks needs lm-evaluation-harness: pip install 'warpbus[tasks]'")
    known = {name for text in _texts(Path(package.origin).parent / "tasks") for name in names_in(text)}
    own = [] if directory is None else list(_texts(directory))
    known.update(name for text in own for name in names_in(text))
    for name in names:
        if not fnmatch.filter(known, name) and not any(name in text for text in own):
            raise no_such_task(name, known)


def no_such_task(name: str, known: Collection[str]) -> UsageError:
    """The error for a name that no task has, with the names that are close to it."""
    near = difflib.get_close_matches(name, sorted(known), cutoff=0.7)
    if near:
        return UsageError(f"--tasks {name!a:.60}: no such task: did you mean {', '.join(near)}?")
    return UsageError(f"--tasks {name!a:.60}: no such task: `lm_eval ls tasks` lists them")


def names_in(text: str) -> set[str]:
    """The names of tasks, groups and tags in a file of the harness."""
    listed = [item.strip("- \"'") for block in _TAGS.findall(text) for item in block.splitlines()]
    return {*_NAME.findall(text), *listed}


def _texts(directory: Path) -> Iterator[str]:
    """The files that can be YAML. Files that tasks include have any name."""
    for parent, _, files in os.walk(directory):
        for file in files:
            if not file.endswith(_OTHER_FILES):
                yield Path(parent, file).read_text(encoding="utf-8", errors="replace")
