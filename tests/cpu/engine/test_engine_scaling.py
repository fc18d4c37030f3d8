"""The number of replicas follows the queues: slowly, by one, and within its limits."""

import pytest

from warpbus.engine.options import ReplicaOptions
from warpbus.engine.scaling import QueueScaling
from warpbus.errors import UsageError


def test_a_queue_that_lasts_adds_one_replica_after_another() -> None:
    scaling = QueueScaling(1, 3, max_num_seqs=4, until_more=10, until_fewer=100)
    assert scaling.wanted(0, 1, running=4, waiting=1) == 1
    assert scaling.wanted(9.9, 1, running=4, waiting=5) == 1
    assert scaling.wanted(10, 1, running=4, waiting=5) == 2
    assert scaling.wanted(11, 2, running=8, waiting=1) == 2
    assert scaling.wanted(20, 2, running=8, waiting=0) == 2  # the queue has been empty
    assert scaling.wanted(21, 2, running=8, waiting=1) == 2
    assert scaling.wanted(31, 2, running=8, waiting=1) == 3
    assert scaling.wanted(32, 3, running=12, waiting=9) == 3
    assert scaling.wanted(99, 3, running=12, waiting=9) == 3


def test_a_replica_is_removed_where_half_of_the_others_suffices() -> None:
    scaling = QueueScaling(1, 3, max_num_seqs=4, until_more=10, until_fewer=100)
    assert scaling.wanted(0, 3, running=4, waiting=0) == 3
    assert scaling.wanted(99, 3, running=4, waiting=0) == 3
    assert scaling.wanted(100, 3, running=4, waiting=0) == 2
    assert scaling.wanted(101, 2, running=3, waiting=0) == 2
    assert scaling.wanted(300, 2, running=3, waiting=0) == 2  # 3 are more than half of 4
    assert scaling.wanted(301, 2, running=2, waiting=0) == 2
    assert scaling.wanted(350, 2, running=2, waiting=1) == 2
    assert scaling.wanted(351, 2, running=2, waiting=0) == 2
    assert scaling.wanted(450, 2, running=0, waiting=0) == 2
    assert scaling.wanted(451, 2, running=0, waiting=0) == 1
    assert scaling.wanted(999, 1, running=0, waiting=0) == 1


def test_options() -> None:
    assert ReplicaOptions().count == ReplicaOptions().most == 1
    assert not ReplicaOptions(data_parallel=3).on_cluster
    chosen = ReplicaOptions(min_replicas=2, max_replicas=4)
    assert (chosen.count, chosen.fewest, chosen.most, chosen.on_cluster) == (2, 2, 4, True)
    assert ReplicaOptions(replicas=2).most == 2
    with pytest.raises(UsageError, match="give them in order"):
        ReplicaOptions(replicas=1, min_replicas=2)
    with pytest.raises(UsageError, match="max_replicas is 0"):
        ReplicaOptions(max_replicas=0)
    with pytest.raises(UsageError, match="leave one of them out"):
        ReplicaOptions(data_parallel=2, replicas=2)
