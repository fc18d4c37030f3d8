"""Starts a training run: in this process, in several processes of this machine, on a Ray cluster, or under torchrun."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from warpbus.cuda.devices import resolve_device
from warpbus.dist import Patience, Processes, ProcessStalledError, joined_group
from warpbus.dist.cluster import ClusterProcesses
from warpbus.dist.watchdog import check_limit
from warpbus.errors import DeviceError, StorageError, UsageError
from warpbus.formats.files import FileLock, check_kept, check_target
from warpbus.train.results import CONFIGS
from warpbus.train.run import Finished, Halted, TrainingProgress, TrainingStarted, TrainingTask, work
from warpbus.train.settings import TrainingSettings
from warpbus.train.state import StateFile
from warpbus.train.stopping import Signals, Stopped


def train(
    model: Path,
    output: Path,
    *,
    data: Path,
    valid: Path | None = None,
    settings: TrainingSettings,
    device: str = "auto",
    gpus: int = 1,
    processes: int = 1,
    cluster: str | None = None,
    workers: int = 1,
    overwrite: bool = False,
    rank_timeout: float = 300.0,
    begun: Callable[[TrainingStarted], None] = lambda begun: None,
    report: Callable[[TrainingProgress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Train the model in the directory `model`, or an adapter for it, and write the result to `output`.

    With method "full" the result is a model, trained in float32 and written in bfloat16; training starts from random
    weights if `model` has none. With "lora" it is an adapter in PEFT's format, with "ptuning" one in the format of
    ChatGLM's P-Tuning. `<output>.training` holds checkpoints of the run. On SIGINT or SIGTERM the run finishes its step
    and saves a checkpoint. The same call resumes an interrupted run from the last checkpoint, also with another number
    of processes or another sharding. The loss curve is independent of the number of processes, except for rounding and
    dropout.

    If torchrun or another launcher has set `WORLD_SIZE`, this process is one of that many.

    Args:
        model: directory with `config.json`, a tokenizer and, if any, weights. Its tokenizer, template and licence are
            copied to a full model's output (`formats.companions`).
        output: a new directory.
        data: `.jsonl` of conversations or texts, or `.txt`.
        valid: held-out data of the same form.
        settings: the hyperparameters.
        device: "auto", "cpu", "cuda" or "cuda:N".
        gpus: number of GPUs of this machine, one process per GPU.
        processes: number of processes on the CPU, or on a cluster.
        cluster: a Ray cluster: "auto", the one that this machine belongs to, or "ray://HOST:PORT". Each process gets
            one GPU, or one core with device "cpu". Paths have to refer to the same files on all machines.
        workers: number of processes that tokenize, shared by all training processes.
        overwrite: replace an existing `output`.
        rank_timeout: seconds after which the run ends if one of its processes sends no heartbeat. The log reports it
            after 30 s. Ignored under torchrun, which watches its processes itself.
        begun: called before the first step.
        report: called after each step.

    Returns:
        the content of `training.json` in `output`: settings, losses, tokens, seconds, device.

    Raises:
        UsageError: the settings do not fit the model or the processes, differ from those of the interrupted run,
            `output` has no name or would replace a file that is read, or `rank_timeout` is below 10 s.
        CheckpointError: the model is not supported, or the state of an interrupted run is damaged.
        DataError: a data file is missing or malformed.
        DeviceError: a device does not exist, the main memory is too small for training on the CPU, or a process died
            or made no progress for `rank_timeout` seconds.
        NumericError: the loss is not finite; the last checkpoint is kept.
        StorageError: the output exists, another process trains to it, or a file cannot be written. The trained state is
            then kept if there is room for it.
        Stopped: a `KeyboardInterrupt`, after SIGINT and SIGTERM.
    """
    check_arguments(valid, settings, device, gpus, processes, cluster)
    check_limit("rank_timeout", rank_timeout)
    patience = Patience(rank_timeout)
    if output.name in ("", ".."):
        raise UsageError(f"{output}: checkpoints are kept beside OUTPUT, by its name: name a new directory")
    state = StateFile(output)
    torchrun = "WORLD_SIZE" in os.environ
    if not torchrun and (summary := state.finished(settings)) is not None:
        state.remove()
        return summary
    check_target(output, overwrite=overwrite, configs=CONFIGS)
    if state.directory.exists() and not state.directory.is_dir():
        raise StorageError(f"{state.directory}: is a file, but checkpoints are kept there: name another output")
    check_kept(output, model, data, *(() if valid is None else (valid,)))
    task = TrainingTask(model, output, data, valid, settings, workers, overwrite, _processes_here(processes, cluster))
    messages: list[TrainingStarted | Halted | Finished] = []

    def receive(message: Any) -> None:
        if isinstance(message, TrainingProgress):
            report(message)
            return
        messages.append(message)
        if isinstance(message, TrainingStarted):
            begun(message)

    with _alone(state) if os.environ.get("RANK", "0") == "0" else nullcontext():
        if torchrun:
            with joined_group(device) as group:
                work(group, receive, task)
        elif cluster is None:
            devices = devices_of(device, gpus, processes)
            pool = Processes(work, devices=devices, receive=receive, patience=patience)
            _run(pool, task, messages, state) if len(devices) > 1 else _run_here(pool, task)
        else:
            on_gpus = device != "cpu"
            _run(
                ClusterProcesses(
                    work, processes=processes, address=cluster, gpus=on_gpus, receive=receive, patience=patience
                ),
                task,
                messages,
                state,
            )
    outcome = messages[-1]
    if isinstance(outcome, Halted):
        raise Stopped(outcome.number, outcome.step, state.path)
    assert isinstance(outcome, Finished)
    return outcome.summary


def check_arguments(
    valid: Path | None, settings: TrainingSettings, device: str, gpus: int, processes: int, cluster: str | None
) -> None:
    """Check the arguments of a run before its model is read or downloaded; arguments and errors as `train`."""
    if settings.keep == "best" and valid is None:
        raise UsageError("--keep best needs validation data: give --valid FILE")
    if "WORLD_SIZE" in os.environ:
        world = int(os.environ["WORLD_SIZE"])
    elif cluster is None:
        world = len(devices_of(device, gpus, processes))
    elif device in ("auto", "cuda", "cpu") and gpus == 1:
        world = processes
    else:
        raise UsageError("--cluster: set the number of GPUs with --processes; drop --gpus and the number in --device")
    settings.check_shared(world)


def devices_of(device: str, gpus: int, processes: int) -> Sequence[torch.device]:
    """The device of each process on this machine.

    Raises:
        UsageError: the numbers do not fit the device.
        DeviceError: the machine has fewer GPUs.
    """
    first = resolve_device(device)
    if first.type == "cpu":
        if gpus > 1:
            found = "no GPU found on this machine" if device == "auto" else f"--device {device} selects the CPU"
            raise UsageError(f"--gpus {gpus}: {found}: drop --gpus to train on the CPU, or run warpbus doctor")
        return [first] * processes
    if processes > 1:
        raise UsageError(
            f"--processes {processes}: only for the CPU and for clusters; GPUs run one process each: use --gpus"
        )
    if gpus == 1:
        return [first]
    if ":" in device:
        raise UsageError(f"--gpus {gpus}: --device {device} is one GPU: give cuda or auto")
    there = torch.cuda.device_count()
    if gpus > there:
        raise DeviceError(f"--gpus {gpus}: this machine has {there}: use fewer")
    return [torch.device("cuda", index) for index in range(gpus)]


def _processes_here(processes: int, cluster: str | None) -> int:
    """How many processes of a run on the CPU this machine has, as far as is known; arguments as of `train`."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return processes if cluster is None else 1


@contextmanager
def _alone(state: StateFile) -> Iterator[None]:
    """Hold the lock of the output: no other process can train to it."""
    state.output.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(state.output.with_name(f".{state.output.name}.training.lock"), state.output)
    try:
        yield
    finally:
        lock.release()


def _run_here(process: Processes, task: TrainingTask) -> None:
    """Train in this process, which handles signals itself."""
    with process:
        process.run(task)


def _run(
    processes: Processes | ClusterProcesses, task: TrainingTask, messages: Sequence[object], state: StateFile
) -> None:
    """Train in worker processes and forward signals to them.

    Args:
        messages: those received from the workers so far.

    Raises:
        Stopped: after a signal, a worker made no progress, so that the step could not end: nothing more was saved.
    """

    def tell(number: int) -> None:
        if not messages:  # nothing is trained yet
            raise Stopped(number)
        processes.hurry()
        processes.tell(number)

    with processes, Signals(tell) as signals:
        try:
            processes.run(task)
        except ProcessStalledError as error:
            if not signals.caught:
                raise
            raise Stopped(signals.caught, None, state.path if state.exists() else None) from error
