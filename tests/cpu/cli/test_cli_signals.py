"""SIGTERM while a run prepares its work: it ends as after Ctrl-C, with a message and its own exit code."""

import os
import signal
from pathlib import Path

import pytest
import typer

from warpbus.cli.signals import interruptible
from warpbus.cli.training import shown


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGINT, 130, "Interrupted. "), (signal.SIGTERM, 143, "Terminated. ")]
)
def test_training_that_is_ended_while_it_reads_its_data(number, code, said, capsys):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as caught, shown(Path("out")):
        os.kill(os.getpid(), number)
    assert caught.value.exit_code == code
    assert f"{said}Run the same command to resume from the last checkpoint" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before


def test_ctrl_c_that_a_library_turns_into_an_error_of_its_own_is_ctrl_c():
    before = signal.getsignal(signal.SIGINT)

    @interruptible()
    def load():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None

    with pytest.raises(KeyboardInterrupt):
        load()
    assert signal.getsignal(signal.SIGINT) == before


def test_errors_without_ctrl_c_stay():
    with pytest.raises(ValueError, match="shape"), interruptible():
        raise ValueError("shape")
