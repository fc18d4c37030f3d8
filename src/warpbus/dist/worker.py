"""The main function of a worker process that `Processes` starts (see `interpreters`)."""

import multiprocessing
from typing import NoReturn

import torch

from warpbus.dist.group import join
from warpbus.dist.interpreters import WorkerSpec, load
from warpbus.dist.outcome import Done, Job, JobFailure
from warpbus.dist.peers import lost_peer
from warpbus.dist.worker_pipe import WorkerPipe


def main(pipe: WorkerPipe, module: str) -> NoReturn:
    """Run the job, then wait until the parent closes the pipe.

    Args:
        pipe: to the parent process.
        module: imported while the processes connect to each other, before the job arrives. If it has a function
            `get_ready(device)`, that is called as well.
    """
    try:
        _work(pipe, module)
    except BaseException as error:
        # If a peer GPU did not take part in an exchange, CUDA reports only a failed launch.
        pipe.report(JobFailure.of(lost_peer() or error))
    else:
        pipe.report(Done())
    pipe.pulse.stop()
    # Stay alive until the parent closes the pipe: other workers may still read this process's memory and sockets, and
    # their errors about its exit must not hide the original error.
    while True:
        pipe.received()


def _work(pipe: WorkerPipe, module: str) -> None:
    spec: WorkerSpec = pipe.received()
    multiprocessing.current_process().authkey = spec.key
    # Connecting the processes is mostly waiting: import the module meanwhile.
    group = join(spec.meeting, spec.rank, spec.world, torch.device(spec.device))
    get_ready = getattr(load(module), "get_ready", None)
    if get_ready is not None:
        get_ready(group.device)
    function: Job = pipe.received()
    arguments = pipe.received()
    function(group, pipe, *arguments)
