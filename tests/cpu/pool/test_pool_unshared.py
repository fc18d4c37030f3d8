"""Leases of one machine that exchange bytes with shared memory and without, as the daemon's log and the status tell."""

import json
from pathlib import Path

import jsonschema
import torch
from pool_daemons import serving, until

import warpbus
from warpbus.pool.protocol import link_memory

SCHEMA = json.loads((Path(__file__).parents[3] / "examples/kubernetes/pool_status.schema.json").read_text())


def connected(address, gpu):
    return warpbus.pool.connect(address, memory="50MB", share=0.2, on=gpu)


def copied(source, target):
    x = torch.randn(1000)
    return torch.equal(x.to(source.device).to(target.device).cpu(), x)


def logged(caplog):
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return [each for each in messages if "through sockets" in each]


def shared(control):
    status = control.ask("status")
    jsonschema.validate(status, SCHEMA)
    return {each.pop("host"): each for each in status["link_memory"]}


def test_memory_is_counted_while_leases_share_it_and_beyond_the_limit_they_use_sockets(tmp_path, caplog):
    program = "warpbus.pool.tenant.process"
    with (
        serving(tmp_path / "mill", program=program, spare=0) as mill,
        serving(tmp_path / "dam", spare=0, name="dam", peers=(str(mill.address),)) as dam,
        mill.control() as control,
    ):
        mill.daemon.host.link_memories.limit = link_memory.SIZE
        address, used = str(mill.address), {"used": link_memory.SIZE, "limit": link_memory.SIZE}
        first, second, third = (connected(address, "mill/0") for _ in range(3))
        assert copied(first, second)
        until(lambda: shared(control)["mill"] == {**used, "unshared": 0})
        assert not logged(caplog)
        for _ in range(2):
            assert copied(first, third)
        until(lambda: shared(control)["mill"] == {**used, "unshared": 1})
        (line,) = logged(caplog)
        leases = control.ask("status")["leases"]
        assert any(each["id"] in line for each in leases)
        assert "of tenant local on mill/0" in line
        assert "leases of this machine share 33.6 MB of host memory already, of 33.6 MB at most" in line
        limit = dam.daemon.host.link_memories.limit
        until(lambda: shared(control).get("dam") == {"used": 0, "limit": limit, "unshared": 0})
        assert 0 < limit <= 8 << 30
        for each in (third, second, first):
            each.close()
        until(lambda: shared(control)["mill"]["used"] == 0)


def test_a_process_that_cannot_pin_memory_is_logged_once_per_group(tmp_path, caplog):
    with serving(tmp_path, program="pool_unpinned_tenant", spare=0) as mill, mill.control() as control:
        first, second = (connected(str(mill.address), "mill/0") for _ in range(2))
        for source, target in ((first, second), (second, first)):
            assert copied(source, target)
        until(lambda: shared(control)["mill"]["unshared"] == 1)
        (line,) = logged(caplog)
        assert line.endswith("memory that two leases share cannot be pinned: CUDA error 2")
        assert "a training step took 172 ms instead of 74 on two H200s" in line
        until(lambda: shared(control)["mill"]["used"] == 0)
        second.close()
        first.close()
