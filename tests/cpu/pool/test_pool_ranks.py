"""Distributed training over a pool, with one client process for each rank."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pool_daemons import serving

_RANKS = Path(__file__).parent / "pool_ranks.py"


@pytest.fixture(scope="module", params=["warpbus.pool.tenant.process", "pool_direct_tenant"])
def pool(request, tmp_path_factory):
    """The address, and whether leases have slots as on GPUs."""
    direct = request.param == "pool_direct_tenant"
    with serving(tmp_path_factory.mktemp("mill"), 2, request.param, spare=0, grace=3.0, gpu_links=direct) as mill:
        yield str(mill.address), direct


def _started(address: str, store: Path, program: str) -> list[subprocess.Popen]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen([sys.executable, str(_RANKS), address, str(store), str(rank), "2", program], **pipes)
        for rank in range(2)
    ]


def test_ddp_and_fsdp_train_as_over_gloo(pool, tmp_path):
    address, direct = pool
    for rank in _started(address, tmp_path / "store", "direct" if direct else "train"):
        said, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors
        assert said.splitlines()[-1] == "equal"


def test_a_rank_that_is_killed_ends_the_operation_of_the_others(pool, tmp_path):
    waiting, killed = _started(pool[0], tmp_path / "store", "wait")
    for rank in (waiting, killed):
        assert rank.stdout.readline() == "joined\n", rank.communicate()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    said, errors = waiting.communicate(timeout=120)
    assert "all_reduce: rank 1" in said, said + errors
    assert waiting.returncode == 0
