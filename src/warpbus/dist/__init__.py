"""Processes that work together: joining them (`group`), adding up over them (`tree`), and starting them (`launch`)."""

from warpbus.dist.group import SHARES, Group, joined_group
from warpbus.dist.launch import Processes, launch, relaunch
from warpbus.dist.outcome import Job, Receive, Send
from warpbus.dist.tree import TreeSum

__all__ = ["SHARES", "Group", "Job", "Processes", "Receive", "Send", "TreeSum", "joined_group", "launch", "relaunch"]
