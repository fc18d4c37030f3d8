"""Multi-process jobs: process groups (`group`), reproducible sums (`tree`), and starting workers (`processes`).

The public names are imported on first use: the command line starts workers (`interpreters`) before it imports torch,
which takes seconds in each process.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warpbus.dist.group import Group, joined_group
    from warpbus.dist.outcome import Job, JobPipe, Receive, Send
    from warpbus.dist.processes import Processes, launch
    from warpbus.dist.shares import SHARES
    from warpbus.dist.tree import TreeSum
    from warpbus.dist.watchdog import Patience, ProcessDiedError, ProcessStalledError

__all__ = [
    "SHARES",
    "Group",
    "Job",
    "JobPipe",
    "Patience",
    "ProcessDiedError",
    "ProcessStalledError",
    "Processes",
    "Receive",
    "Send",
    "TreeSum",
    "joined_group",
    "launch",
]

# No public name may equal the name of a module of this package, which would hide it.
_FILES = {
    "SHARES": "shares",
    "Group": "group",
    "Job": "outcome",
    "JobPipe": "outcome",
    "Patience": "watchdog",
    "ProcessDiedError": "watchdog",
    "ProcessStalledError": "watchdog",
    "Processes": "processes",
    "Receive": "outcome",
    "Send": "outcome",
    "TreeSum": "tree",
    "joined_group": "group",
    "launch": "processes",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'warpbus.dist' has no attribute {name!r}")
    return getattr(importlib.import_module(f"warpbus.dist.{_FILES[name]}"), name)
