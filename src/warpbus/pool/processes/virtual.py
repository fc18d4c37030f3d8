"""Any program on a part of a GPU, or on a whole one: `warpbus pool run`.

A part is a client of MPS, the only way to limit the memory of a program that is not changed. A whole GPU is one that
the program alone can see, without limits and without MPS; only such a program can be moved afterwards.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from warpbus.cuda import mps
from warpbus.cuda.inventory import InstalledGpu
from warpbus.cuda.runtime_directory import runtime_directory
from warpbus.errors import DeviceError, UsageError
from warpbus.pool.quota import Quota

TENANT = "WARPBUS_TENANT"
"""Variable by which the programs of a tenant are known."""

# Sent to this process they are meant for the program.
_FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
)
_FROM_KERNEL = 0x80  # si_code: the terminal sent it to the whole group of processes, the program among them


def outside_mps() -> dict[str, str]:
    """The environment variables that keep a process out of MPS, even with a daemon at the default location: a directory
    without pipes.

    Raises:
        StorageError: it cannot be made.
    """
    return {mps.PIPES: str(runtime_directory("mps", "none"))}


def whole_gpu_environment(gpu: InstalledGpu, tenant: str) -> dict[str, str]:
    """The environment variables that show a program only one GPU, outside of MPS. See `outside_mps`."""
    return {"CUDA_VISIBLE_DEVICES": gpu.uuid, TENANT: tenant, **outside_mps()}


def run(command: Sequence[str], gpu: InstalledGpu, quota: Quota | None, tenant: str) -> int:
    """Run a program to its end. Signals that reach this process are passed on to it.

    Args:
        quota: its part of the GPU, or `None` for the whole of it.
        tenant: for whom; it is shown in lists.

    Returns:
        its exit code, or 128 and the number of the signal that ended it.

    Raises:
        UsageError: there is no such program, or the GPU has less memory.
        DeviceError: there is no MPS, so that there are no parts; or it does not start.
    """
    if not command:
        raise UsageError("no program: give one after --, such as: warpbus pool run -- python train.py")
    if quota is None:
        return run_program(command, whole_gpu_environment(gpu, tenant), ())
    if quota.memory > gpu.memory:
        raise UsageError(f"memory is {quota.memory:,} bytes: GPU {gpu.index} has {gpu.memory:,}: give that or less")
    if gpu.mig:
        raise DeviceError(f"GPU {gpu.index} is cut into instances (MIG): give their limits there, not with --memory")
    missing = mps.available()
    if missing is not None:
        raise DeviceError(
            f"without MPS the memory of a program cannot be limited: {missing}: install it, or give a whole GPU, "
            "without --memory and --share"
        )
    daemon = mps.ControlDaemon.of_gpu(gpu)
    with daemon.client() as lock:
        environment = {**daemon.environment(), **mps.limits(quota.memory, quota.share), TENANT: tenant}
        return run_program(command, environment, (lock,))


def run_program(command: Sequence[str], environment: Mapping[str, str], kept: Sequence[int] = ()) -> int:
    """Run a program to its end. Signals that reach this process are passed on to it.

    Args:
        environment: variables besides those of this process.
        kept: descriptors that it inherits.

    Returns:
        its exit code, or 128 and the number of the signal that ended it.

    Raises:
        UsageError: there is no such program.
    """
    awaited = {*_FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        for descriptor in kept:
            os.set_inheritable(descriptor, True)
        sys.stdout.flush()
        try:
            pid = os.posix_spawnp(
                command[0],
                list(command),
                {**os.environ, **environment},
                setsigmask=before,
                # Python ignores it; programs expect to be ended by it.
                setsigdef=[signal.SIGPIPE],
            )
        except OSError as error:
            raise UsageError(f"{command[0]} cannot be started: {error.strerror}: give a program that exists") from None
        return _wait(pid, awaited)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(pid: int, awaited: set[signal.Signals]) -> int:
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code
        came = signal.sigwaitinfo(awaited)
        # waitpid sees the end of a child, and that it was stopped does not matter.
        if came.si_signo != signal.SIGCHLD and came.si_code != _FROM_KERNEL:
            os.kill(pid, came.si_signo)
