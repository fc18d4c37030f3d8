"""Processes that work together: joining them (`group`), adding up over them (`tree`), and starting them (`launch`)."""

from warpbus.dist.group import SHARES, Group, joined_group
from warpbus.dist.launch import relaunch
from warpbus.dist.tree import TreeSum

__all__ = ["SHARES", "Group", "TreeSum", "joined_group", "relaunch"]
