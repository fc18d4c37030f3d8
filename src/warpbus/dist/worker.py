"""The main program of a process that `Processes` starts, once its interpreter is there (see `interpreters`)."""

import multiprocessing
from typing import NoReturn

import torch

from warpbus.dist.group import join
from warpbus.dist.interpreters import WorkerSpec, load
from warpbus.dist.outcome import Done, JobFailure, Job
from warpbus.dist.peers import lost_peer
from warpbus.dist.worker_pipe import WorkerPipe


def main(line: WorkerPipe, module: str) -> NoReturn:
    """Do a job's part, then wait for the end.

    Args:
        line: to the starting process.
        module: what to load while the processes find each other, before the starting one says more. If it has a
            function `get_ready(device)`, that is called then, too.
    """
    try:
        _work(line, module)
    except BaseException as error:
        # Of an exchange that nobody came to, CUDA says only that a launch failed.
        line.report(JobFailure.of(lost_peer() or error))
    else:
        line.report(Done())
    line.pulse.stop()
    # It stays until it is told to go: the others may still read from its memory and sockets, and what they would say of
    # its end should not hide why it failed.
    while True:
        line.received()


def _work(line: WorkerPipe, module: str) -> None:
    place: WorkerSpec = line.received()
    multiprocessing.current_process().authkey = place.key
    # To find each other is mostly to wait: the module is loaded meanwhile, and the job begins.
    group = join(place.meeting, place.rank, place.world, torch.device(place.device))
    get_ready = getattr(load(module), "get_ready", None)
    if get_ready is not None:
        get_ready(group.device)
    function: Job = line.received()
    arguments = line.received()
    function(group, line, *arguments)
