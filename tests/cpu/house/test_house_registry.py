"""The registry of algorithms and the places that cannot read it: a command line without torch, and a document."""

from pathlib import Path

import pytest
import typer

from warpbus.cli import app, quantize
from warpbus.quantization.methods import METHODS

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", [*METHODS, "rtn"])
def test_an_algorithm_is_in_the_help_and_in_the_document(name: str) -> None:
    command = typer.main.get_command(app).commands["quantize"]
    (option,) = [option for option in command.params if option.name == "algorithm"]
    assert name in option.help
    assert f"`{name}`" in (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")


def test_processes_begin_at_once_for_every_algorithm_that_is_calibrated() -> None:
    assert set(quantize._AT_ONCE) == {None, *METHODS}
