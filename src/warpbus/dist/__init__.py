"""Multi-process jobs: process groups (`group`), reproducible sums (`tree`), and starting workers (`processes`).

The public names are imported on first use: the command line starts workers (`interpreters`) before it imports torch,
which takes seconds in each process.
"""

from typing import TYPE_CHECKING

from warpbus.lazy import lazy_names

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

__getattr__ = lazy_names(
    __name__,
    shares=("SHARES",),
    group=("Group", "joined_group"),
    outcome=("Job", "JobPipe", "Receive", "Send"),
    watchdog=("Patience", "ProcessDiedError", "ProcessStalledError"),
    processes=("Processes", "launch"),
    tree=("TreeSum",),
)
