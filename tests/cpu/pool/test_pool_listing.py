"""Who is on the GPUs of a machine."""

from datetime import UTC, datetime

from pool_processes_machine import GB, PID, FakeDriver, FakeMachine, cuda_process

from warpbus.pool.processes.listing import gpu_processes
from warpbus.pool.processes.processes import ProcessHost, resume_process, suspend_process
from warpbus.pool.processes.suspensions import Suspensions


def test_processes_are_reported_apart(tmp_path):
    machine = FakeMachine()
    machine.living[PID] = cuda_process(
        environment={
            "WARPBUS_TENANT": "alice",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4096M",
        }
    )
    machine.children = [
        cuda_process(pid=5, threads=frozenset({"pt_data_worker"})),
        cuda_process(pid=6, name="nvidia-cuda-mps"),
        cuda_process(pid=7, command=(), mapped={"/lib/libcuda.so.1": 1, "/dev/nvidia2": 1}),
    ]
    first, second = gpu_processes(machine, Suspensions(tmp_path))
    assert (first.pid, first.command, first.gpus, first.memory, first.tenant) == (
        PID,
        "python train.py",
        (0,),
        3 * GB,
        "alice",
    )
    assert list(first.limits.values()) == ["25", "0=4096M"]
    # The driver did not name it, as in a container.
    assert (second.pid, second.command, second.gpus, second.memory, second.tenant) == (7, "python", (2,), None, None)
    assert first.suspended is None


def test_suspended_processes_are_listed_where_they_were(tmp_path):
    machine = FakeMachine()
    host = ProcessHost(machine, FakeDriver(machine), Suspensions(tmp_path))
    suspend_process(PID, host)
    machine.taken = None
    machine.living[PID] = cuda_process(mapped={}, threads=frozenset())
    (found,) = gpu_processes(machine, host.suspensions)
    assert (found.gpus, found.memory) == ((0,), 3 * GB)
    assert abs((datetime.now(UTC) - found.suspended).total_seconds()) < 60
    resume_process(PID, host)
    assert gpu_processes(machine, host.suspensions) == []


def test_what_ended_while_it_was_suspended_is_forgotten(tmp_path):
    machine = FakeMachine()
    suspensions = Suspensions(tmp_path)
    suspend_process(PID, ProcessHost(machine, FakeDriver(machine), suspensions))
    del machine.living[PID]
    assert gpu_processes(machine, suspensions) == []
    assert suspensions.all() == []
