"""Processes that work together: joining them (`group`), adding up over them (`tree`), and starting them (`processes`).

The public names are loaded when they are first used: the command line starts interpreters (`interpreters`) before it
loads torch, which takes each of them and itself seconds.
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

# None has the name of a file of this room, which would hide it.
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
