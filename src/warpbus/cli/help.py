"""Help of groups of commands: plain text that fits narrow terminals, and in which no word is cut."""

import re
from typing import Any

from typer.core import TyperGroup


class PlainGroup(TyperGroup):
    """A group that lists its commands with the whole first sentence of each one's help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands: `ctx` and `formatter` are click's, which newer versions of typer contain."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                paragraph = " ".join((command.help or "").split("\n\n")[0].split())
                rows.append((name, re.split(r"(?<!\.)\. |。", paragraph)[0].removesuffix(".")))
        with formatter.section("Commands"):
            formatter.write_dl(rows)
