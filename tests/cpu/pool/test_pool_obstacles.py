"""What cannot be carried is seen and named; what an ordinary training program has does not count."""

from pathlib import Path

import pytest
from pool_processes_machine import GB, cuda_process, gpu

from warpbus.pool.processes.obstacles import mps_pipes, obstacles, obstacles_to_target

USUAL = cuda_process()


def names(process, tree=(), sockets=None, mps_clients=()):
    return [each.name for each in obstacles(process, tree=tree, sockets=sockets or {}, mps_clients=mps_clients)]


def test_an_ordinary_program():
    """torch always maps NCCL's library, CUDA some of the device of unified memory, data loaders shared memory."""
    mapped = {**USUAL.mapped, "/lib/libnccl.so.2": 2**28, "/dev/shm/torch_12_34 (deleted)": 2**20}
    worker = cuda_process(pid=5, name="pt_data_worker", threads=frozenset({"pt_data_worker"}))
    assert names(cuda_process(mapped=mapped), tree=[worker], sockets={1: "/run/x"}, mps_clients={99}) == []


def test_a_program_without_cuda():
    shell = cuda_process(pid=3, mapped={"/bin/bash": 1}, threads=frozenset({"bash"}))
    (alone,) = obstacles(shell, tree=[], sockets={}, mps_clients=())
    assert str(alone) == "no CUDA: it uses no GPU"
    (parent,) = obstacles(shell, tree=[USUAL], sockets={}, mps_clients=())
    assert f"its child {USUAL.pid} does: give that" in parent.what


def test_a_child_that_uses_cuda():
    (found,) = obstacles(USUAL, tree=[cuda_process(pid=5, name="worker")], sockets={}, mps_clients=())
    assert (found.name, found.certain) == ("process tree", True)
    assert "its child 5 (worker) uses CUDA too" in found.what


@pytest.mark.parametrize("thread", ["pt_nccl_watchdg", "pt_nccl_heartbt", "NCCL Service 0"])
def test_nccl_by_its_threads(thread):
    assert names(cuda_process(threads=USUAL.threads | {thread})) == ["NCCL"]


def test_nccl_by_its_shared_memory_and_sockets():
    assert names(cuda_process(mapped={**USUAL.mapped, "/dev/shm/nccl-AbCdEf (deleted)": 2**20})) == ["NCCL"]
    connected = cuda_process(files=frozenset({"socket:[900]"}))
    assert names(connected, sockets={900: "@/tmp/nccl-socket-0-abc"}) == ["NCCL"]
    assert names(connected, sockets={901: "@/tmp/nccl-socket-0-abc"}) == []  # somebody else's


def test_a_client_of_mps():
    assert names(USUAL, mps_clients={USUAL.pid}) == ["MPS"]


def test_a_network_card():
    assert names(cuda_process(files=frozenset({"/dev/infiniband/uverbs0"}))) == ["RDMA"]


def test_what_cannot_be_decided():
    mapped = {**USUAL.mapped, "/dev/nvidia-uvm": 4 * GB, "/dev/shm/cuda.shm.0.1a.1": 2**20}
    found = obstacles(cuda_process(mapped=mapped), tree=[], sockets={}, mps_clients=())
    assert [(each.name, each.certain) for each in found] == [("CUDA IPC", False), ("managed memory", False)]


def test_all_of_them_are_named():
    everything = cuda_process(threads=USUAL.threads | {"pt_nccl_watchdg"}, files=frozenset({"/dev/infiniband/uverbs0"}))
    child = cuda_process(pid=5)
    assert names(everything, tree=[child], mps_clients={USUAL.pid}) == ["process tree", "MPS", "NCCL", "RDMA"]


def test_the_target():
    assert obstacles_to_target(gpu(0), gpu(1), 70 * GB) == []
    assert obstacles_to_target(gpu(0), gpu(1, free=GB), None) == []  # found out later
    assert [each.name for each in obstacles_to_target(gpu(0), gpu(1, memory=40 * GB, free=GB), 2 * GB)] == [
        "model",
        "memory",
    ]
    assert [each.name for each in obstacles_to_target(gpu(0, mig=True), gpu(0, mig=True), None)] == ["MIG"]


def test_whose_client_it_would_be():
    assert mps_pipes(USUAL) == Path("/tmp/nvidia-mps")
    assert mps_pipes(cuda_process(environment={"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"})) == Path("/run/mps")
