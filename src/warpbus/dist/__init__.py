"""Processes that work together: joining them (`group`) and starting them (`launch`)."""

from warpbus.dist.group import Group, joined_group
from warpbus.dist.launch import relaunch

__all__ = ["Group", "joined_group", "relaunch"]
