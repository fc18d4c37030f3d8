"""Moving, suspending and resuming a process, with every step failing in every way."""

import itertools
import json

import pytest
from pool_processes_machine import GB, PID, FakeDriver, FakeMachine, cuda_process, gpu

from warpbus.cuda.checkpoint import State
from warpbus.errors import DeviceError, StateError, UsageError
from warpbus.pool.processes.processes import ProcessHost, migrate_process, resume_process, suspend_process
from warpbus.pool.processes.suspensions import Suspensions

STEPS = ("lock", "checkpoint", "restore", "unlock")
FAILURES = ("before", "after", "broken", "dies", "stopped")


@pytest.fixture
def make(tmp_path):
    """`make(machine, failures)` is a host whose driver fails so."""

    def host(machine=None, failures=()):
        machine = machine or FakeMachine()
        return ProcessHost(machine, FakeDriver(machine, failures), Suspensions(tmp_path))

    return host


def written(host):
    return [each.pid for each in host.suspensions.all()]


def see_where_it_is(host):
    """As Linux shows it: the process has the registers of its GPU mapped."""
    host.machine.living[PID] = cuda_process(mapped={"/lib/libcuda.so.1": 1, f"/dev/nvidia{host.driver.on[-1]}": 1})


def test_a_process_moves(make):
    host = make()
    carried = migrate_process(PID, 1, host)
    assert host.driver.calls == list(STEPS)
    assert (host.driver.on, host.driver.states) == ("GPU-1", State.RUNNING)
    assert (carried.source.index, carried.target.index, carried.freed) == (0, 1, 3 * GB)
    assert tuple(carried.seconds) == STEPS
    assert carried.pause == sum(carried.seconds.values())
    assert written(host) == []


@pytest.mark.parametrize(("step", "failure"), list(itertools.product(range(4), FAILURES)))
def test_one_failure_leaves_one_living_process_or_says_what_became_of_it(make, step, failure):
    host = make(failures={step: failure})
    with pytest.raises(KeyboardInterrupt if failure == "stopped" else DeviceError) as raised:
        migrate_process(PID, 1, host)
    text = str(raised.value)
    assert "\n" not in text
    if failure == "dies":
        assert "it has ended meanwhile" in text
    elif failure == "broken":
        assert "the driver has lost its GPU memory, so it cannot go on: end it" in text
        assert written(host) == [PID]
        return
    else:
        # It went back, unless it had arrived before the error came.
        arrived = STEPS[step] == "unlock" or (STEPS[step] == "restore" and failure != "before")
        assert (host.driver.on, host.driver.states) == ("GPU-1" if arrived else "GPU-0", State.RUNNING)
        if failure != "stopped":
            assert f"process {PID}: {STEPS[step]} failed (CUDA_ERROR" in text
            assert f"it goes on, on GPU {1 if arrived else 0}" in text
    assert written(host) == []


@pytest.mark.parametrize(("first", "second"), list(itertools.product(FAILURES[:4], FAILURES[:4])))
def test_restoring_and_bringing_back_both_fail(make, first, second):
    """The second failure is that of the step that brings it back."""
    host = make(failures={2: first, 3: second})
    with pytest.raises(DeviceError) as raised:
        migrate_process(PID, 1, host)
    text, state = str(raised.value), host.driver.states
    if PID not in host.machine.living:
        assert "it has ended meanwhile" in text
        assert written(host) == []
    elif state is State.RUNNING:
        assert "it goes on, on GPU" in text
        assert written(host) == []
    else:
        assert {
            State.LOCKED: f"its calls of CUDA wait, on GPU {host.driver.on[-1]}: try warpbus pool resume {PID}",
            State.CHECKPOINTED: f"free GPU 0 and give warpbus pool resume {PID}",
            State.FAILED: "it cannot go on: end it",
        }[state] in text
        assert written(host) == [PID]
        if state is State.LOCKED:
            host.machine.living[PID] = cuda_process(
                mapped={"/lib/libcuda.so.1": 1, f"/dev/nvidia{host.driver.on[-1]}": 1}
            )
        if state is not State.FAILED:
            resume_process(PID, host)
            assert host.driver.states is State.RUNNING
            assert written(host) == []


@pytest.mark.parametrize("killed_after", range(1, 4))
def test_a_mover_that_is_killed_leaves_a_process_that_can_be_resumed(make, killed_after):
    """Nothing of the mover runs any more: neither bringing back nor tidying up."""

    class KilledError(Exception):
        pass

    host = make()
    driver = host.driver

    dead = ProcessHost(host.machine, _Cut(driver, killed_after, KilledError), host.suspensions)
    with pytest.raises(KilledError):
        migrate_process(PID, 1, dead)
    assert len(driver.calls) == killed_after
    assert written(host) == [PID]
    if driver.states is State.LOCKED:
        see_where_it_is(host)
    resume_process(PID, host)
    assert driver.states is State.RUNNING
    assert written(host) == []


class _Cut:
    """A driver that is called no more after some steps."""

    def __init__(self, driver, steps, error):
        self._driver, self._steps, self._error = driver, steps, error

    def __getattr__(self, name):
        if len(self._driver.calls) >= self._steps:
            raise self._error
        return getattr(self._driver, name)


def test_suspend_and_resume(make):
    host = make()
    carried = suspend_process(PID, host)
    assert (carried.target, carried.freed, tuple(carried.seconds)) == (None, 3 * GB, ("lock", "checkpoint"))
    assert host.driver.states is State.CHECKPOINTED
    assert [(each.gpu, each.memory) for each in host.suspensions.all()] == [("GPU-0", 3 * GB)]
    with pytest.raises(StateError, match=f"is checkpointed, not running: give warpbus pool resume {PID}"):
        migrate_process(PID, 1, host)
    carried = resume_process(PID, host)
    assert (carried.source.index, carried.target.index) == (0, 0)
    assert (host.driver.on, host.driver.states) == ("GPU-0", State.RUNNING)
    assert written(host) == []
    with pytest.raises(UsageError, match="is not suspended: it runs"):
        resume_process(PID, host)


def test_resume_on_another_gpu(make):
    host = make()
    suspend_process(PID, host)
    assert resume_process(PID, host, to=2).target.index == 2
    assert (host.driver.on, host.driver.states) == ("GPU-2", State.RUNNING)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("step", [0, 1])
def test_suspending_fails(make, step, failure):
    host = make(failures={step: failure})
    with pytest.raises(KeyboardInterrupt if failure == "stopped" else DeviceError) as raised:
        suspend_process(PID, host)
    if failure in ("before", "after", "stopped"):
        assert (host.driver.on, host.driver.states) == ("GPU-0", State.RUNNING)
        assert written(host) == []
    else:
        assert ("has ended" if failure == "dies" else "end it") in str(raised.value)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("step", [2, 3])
def test_resuming_fails(make, step, failure):
    host = make(failures={step: failure})
    suspend_process(PID, host)
    with pytest.raises(KeyboardInterrupt if failure == "stopped" else DeviceError) as raised:
        resume_process(PID, host, to=1)
    text, state = str(raised.value), host.driver.states
    if (step, failure) == (2, "before"):
        assert state is State.CHECKPOINTED
        assert "it stays suspended" in text
        assert resume_process(PID, host, to=1).target.index == 1
    elif failure == "dies":
        assert "it has ended meanwhile" in text
    elif failure == "broken":
        assert "end it" in text
    else:
        assert (host.driver.on, state) == ("GPU-1", State.RUNNING)
        assert written(host) == []


def test_no_room_is_seen_before_it_is_touched(make):
    host = make(FakeMachine(gpu(0, free=77 * GB), gpu(1, free=2 * GB)))
    with pytest.raises(StateError, match=r"stays as it is.*memory: it takes 3\.00 GB, GPU 1 has 2\.00 GB free"):
        migrate_process(PID, 1, host)
    assert host.driver.calls == []


def test_no_room_is_seen_before_the_restore_where_the_driver_did_not_tell(make):
    """After a restore without enough memory the driver may refuse all others."""
    host = make(FakeMachine(gpu(0, free=77 * GB), gpu(1, free=2 * GB), taken=None))
    with pytest.raises(DeviceError, match=r"it takes 3\.00 GB, GPU 1 has 2\.00 GB free: it goes on, on GPU 0"):
        migrate_process(PID, 1, host)
    assert host.driver.calls == ["lock", "checkpoint", "restore", "unlock"]
    assert (host.driver.on, host.driver.states) == ("GPU-0", State.RUNNING)


def test_a_gpu_that_was_filled_meanwhile_is_not_restored_to(make):
    machine = FakeMachine()
    host = make(machine, failures={2: "before"})
    real = host.driver.restore

    def restore(pid, gpus):
        machine.change("GPU-0", -79 * GB)
        real(pid, gpus)

    host.driver.restore = restore
    with pytest.raises(DeviceError, match=r"bringing it back failed too: it takes .* free GPU 0 and give warpbus pool"):
        migrate_process(PID, 1, host)
    assert host.driver.states is State.CHECKPOINTED
    machine.change("GPU-0", 79 * GB)
    host.driver.restore = real
    assert resume_process(PID, host).target.index == 0


def test_resuming_without_room_leaves_it_suspended(make):
    host = make()
    suspend_process(PID, host)
    host.machine.change("GPU-0", -78 * GB)
    with pytest.raises(StateError, match=r"stays suspended: memory: it takes 3\.00 GB, GPU 0 has 2\.00 GB free"):
        resume_process(PID, host)
    assert host.driver.calls == ["lock", "checkpoint"]
    assert resume_process(PID, host, to=1).target.index == 1


def test_main_memory_has_to_hold_it(make):
    host = make()
    host.machine.main = 2 * GB
    for move in (lambda: migrate_process(PID, 1, host), lambda: suspend_process(PID, host)):
        with pytest.raises(StateError, match=r"main memory: its 3\.00 GB have to go .* 2\.00 GB are free"):
            move()
    assert host.driver.calls == []


def test_the_gpus_have_to_be_alike(make):
    host = make(FakeMachine(gpu(0), gpu(1, name="H100"), gpu(2, mig=True)))
    with pytest.raises(StateError, match=r"model: GPU 0 is H200 .*, GPU 1 is H100 .*: they have to be alike"):
        migrate_process(PID, 1, host)
    with pytest.raises(StateError, match="MIG: GPU 2 is cut into instances"):
        migrate_process(PID, 2, host)
    assert host.driver.calls == []


def test_where_it_is(make):
    host = make()
    with pytest.raises(UsageError, match="is on GPU 0 already"):
        migrate_process(PID, 0, host)
    with pytest.raises(UsageError, match=r"GPU 3: this machine has 3 GPU\(s\)"):
        migrate_process(PID, 3, host)
    host.machine.living[PID] = cuda_process(mapped={"/lib/libcuda.so.1": 1, "/dev/nvidia0": 1, "/dev/nvidia1": 1})
    assert migrate_process(PID, 2, host).source.index == 0  # as the driver says


def test_where_it_is_cannot_be_seen(make):
    host = make(FakeMachine(taken=None))
    host.machine.living[PID] = cuda_process(mapped={"/lib/libcuda.so.1": 1})
    with pytest.raises(StateError, match="it cannot be seen which GPU it is on: give it with --from"):
        migrate_process(PID, 1, host)
    host.machine.living[PID] = cuda_process(mapped={"/lib/libcuda.so.1": 1, "/dev/nvidia0": 1, "/dev/nvidia1": 1})
    with pytest.raises(StateError, match="uses GPUs 0, 1: one that uses a single GPU can be carried"):
        migrate_process(PID, 2, host)
    assert host.driver.calls == []
    assert migrate_process(PID, 2, host, source=0).target.index == 2


def test_what_another_program_suspended(make):
    host = make()
    host.driver.states = State.CHECKPOINTED
    with pytest.raises(UsageError, match="Warpbus did not suspend it: give the GPU that it was on with --from"):
        resume_process(PID, host)
    assert resume_process(PID, host, source=0, to=1).target.index == 1


def test_a_file_of_a_process_that_had_the_number_before_is_not_believed(make):
    host = make()
    suspend_process(PID, host)
    host.machine.living[PID] = cuda_process(started=78)
    with pytest.raises(UsageError, match="give the GPU that it was on"):
        resume_process(PID, host)


def test_uncertain_obstacles_can_be_tried(make):
    host = make()
    host.machine.living[PID] = cuda_process(mapped={**cuda_process().mapped, "/dev/nvidia-uvm": 5 * GB})
    with pytest.raises(StateError, match=r"managed memory: 5\.00 GB .*\(this is not certain: --force tries it\)"):
        migrate_process(PID, 1, host)
    assert host.driver.calls == []
    assert migrate_process(PID, 1, host, force=True).target.index == 1


def test_certain_obstacles_cannot(make):
    host = make()
    host.machine.clients = frozenset({PID})
    with pytest.raises(StateError, match="MPS: it is a client of MPS"):
        migrate_process(PID, 1, host, force=True)
    assert host.driver.calls == []


def test_a_damaged_file_is_named(make, tmp_path):
    host = make()
    (tmp_path / f"{PID}.json").write_text(json.dumps({"pid": PID}))
    host.driver.states = State.CHECKPOINTED
    with pytest.raises(OSError, match=f"{PID}.json: not a file that Warpbus wrote"):
        resume_process(PID, host)


def test_a_lost_process_is_said_to_be_lost(make):
    host = make()
    host.driver.states = State.FAILED
    with pytest.raises(StateError, match="it cannot go on: end it"):
        resume_process(PID, host)
    with pytest.raises(StateError, match="is failed, not running: end it"):
        migrate_process(PID, 1, host)
