"""What `warpbus demo` says at its end; tests/e2e runs the whole of it."""

import io
from pathlib import Path

from rich.console import Console

from warpbus.cli import demo


def test_the_next_steps_fit_80_columns_and_can_be_copied():
    poet = Path("demo-output") / ("far-away-" * 9) / "[red]poet"
    for directory in (Path("demo-output/w4a16-g128-gptq"), poet):
        console = Console(file=io.StringIO(), width=80)
        demo._next_steps(console, directory)
        lines = console.file.getvalue().splitlines()
        assert lines[0] == "What next?"
        assert [line for line in lines[1:-1] if not line.startswith("  ")] == []
        commands = [line.strip() for line in lines if line.startswith("    ")]
        assert [command.split()[1] for command in commands] == ["chat", "quantize", "eval", "doctor"]
        assert str(directory) in commands[0]
        assert len(lines) == 2 + 2 * len(commands)
        assert [line for line in lines if len(line) > 80 and str(poet) not in line] == []
