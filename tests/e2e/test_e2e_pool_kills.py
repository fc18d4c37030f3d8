"""Kills amid a move: one living copy with the right numbers, or a clear error, and no process left."""

import sys
import tempfile
from pathlib import Path

import pytest
from pool_machine import Machine

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from pool_move_kills import OPTIONS, VICTIMS, trial

ELEMENTS = 8_000_000  # of 8 bytes


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory() as found:
        yield Path(found)


def test_kills_while_a_lease_is_copied(directory):
    home = Machine("home", directory, options=OPTIONS)
    away = Machine("away", directory, home.address, options=OPTIONS)
    try:
        for turn, victim in enumerate(VICTIMS):
            found = trial((home, away), victim, 0.02 * turn, ELEMENTS)
            assert found["seconds"] is None or found["seconds"] < 20  # the pool gives a client 60 to claim its lease
            if found["seconds"] is not None and victim == "both":
                assert found["outcome"] == "lost"
    finally:
        away.close()
        home.close()
