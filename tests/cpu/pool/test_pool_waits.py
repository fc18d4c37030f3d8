"""Waits of requests: they have limits, and many of them do not keep a daemon from its other work."""

import threading
from contextlib import suppress

import pytest
from pool_daemons import serving, until

from warpbus.errors import ConnectionLostError
from warpbus.pool.protocol.control_channel import ControlChannel


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("mill")) as found:
        yield found


@pytest.fixture
def control(served):
    with served.control() as found:
        yield found


@pytest.fixture
def peers(served, tmp_path):
    """Another machine in the same pool."""
    with serving(tmp_path, name="dam", peers=(str(served.address),)) as found:
        yield found


def test_an_answer_that_does_not_come_is_waited_for_so_long(served, control):
    large = control.ask("lease", {"memory": 900_000_000, "share": 0.5}, timeout=60)
    reported, watched = [], []
    with served.control() as other, pytest.raises(ConnectionLostError, match="did not answer within 1 s"):
        other.ask(
            "lease", {"memory": 900_000_000, "share": 0.5}, reported.append, timeout=1, watch=lambda: watched.append(1)
        )
    assert reported[0]["queued"] == 1
    assert len(watched) > 1
    control.ask("release", {"lease": large["lease"]})


def test_many_who_wait_over_another_machine_do_not_keep_it_from_others(peers, control):
    """Each request that the broker's machine answers holds a thread of the other machine's daemon."""
    large = control.ask("lease", {"memory": 900_000_000, "share": 0.5, "on": "dam"}, timeout=60)
    reported = []

    def wait(other: ControlChannel) -> None:
        with suppress(ConnectionLostError):  # it is closed at the end
            other.ask("lease", {"memory": 900_000_000, "share": 0.5, "on": "dam"}, reported.append)

    waiting = [peers.control() for _ in range(40)]  # more than asyncio's own executor ever has threads
    threads = [threading.Thread(target=wait, args=(each,)) for each in waiting]
    for thread in threads:
        thread.start()
    until(lambda: len(control.ask("status")["queue"]) == len(waiting))
    with peers.control() as one_more:
        found = one_more.ask("status", timeout=60)
        assert len(found["queue"]) == len(waiting)
    for each in waiting:
        each.close()
    for thread in threads:
        thread.join()
    until(lambda: not control.ask("status")["queue"])
    control.ask("release", {"lease": large["lease"]})
