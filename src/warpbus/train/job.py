"""Starting a training run: here, in several processes of this machine, on a cluster, or under torchrun."""

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
from warpbus.formats.files import FileLock, check_target
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
    """Train the model in the directory `model`, and write what was trained to `output`.

    With method "full" that is a model, trained in float32 and written in bfloat16, fresh where `model` holds no
    weights; with "lora" an adapter in PEFT's format, with "ptuning" one in that of ChatGLM's P-Tuning. While it runs,
    `<output>.training` keeps its state. SIGINT and SIGTERM let it finish its step and save; however it was ended,
    the same call goes on from what was saved last, also with another number of processes, or sharded otherwise.
    The loss curve does not depend on their number, but for rounding (and for dropout).

    Where torchrun or another launcher has set `WORLD_SIZE`, this is one of that many processes.

    Args:
        model: `config.json`, tokenizer, and weights if there are any; a full model's other files are copied.
        output: a new directory.
        data: `.jsonl` of conversations or texts, or `.txt`.
        valid: held-out data of the same form.
        settings: how to train.
        device: "auto", "cpu", "cuda" or "cuda:N".
        gpus: of this machine, a process for each.
        processes: on the CPU, or of a cluster.
        cluster: of Ray: "auto", the one that this machine belongs to, or "ray://HOST:PORT"; each process has a GPU of
            it, or with device "cpu" a core. Paths have to lead to the same files on all of its machines.
        workers: processes to tokenize with, shared by all that train.
        overwrite: replace what is in `output`.
        rank_timeout: seconds after which the run ends if one of its processes is stopped: sends no heartbeat any more.
            It is reported in the log after 30 s. Not under torchrun, which watches its processes itself.
        begun: called before the first step.
        report: called after each step.

    Returns:
        what `training.json` in `output` says: settings, losses, tokens, seconds, device.

    Raises:
        UsageError: if the settings do not fit the model, the processes or what is given, or an interrupted run there
            had others; if `rank_timeout` is below 10 s.
        CheckpointError: if the model is not understood, or the state of an interrupted run is damaged.
        DataError: if a data file is missing or malformed.
        DeviceError: if a device is not there, or a process died or stood still for `rank_timeout`.
        NumericError: if the loss is not finite; the state of the last checkpoint is kept.
        StorageError: if the output exists, or another process trains to it; if a file cannot be written, in which case
            what was trained is kept where there is room for it.
        Stopped: a `KeyboardInterrupt`, after SIGINT and SIGTERM.
    """
    check_arguments(valid, settings, device, gpus, processes, cluster)
    check_limit("rank_timeout", rank_timeout)
    patience = Patience(rank_timeout)
    state = StateFile(output)
    torchrun = "WORLD_SIZE" in os.environ
    if not torchrun and (summary := state.finished(settings)) is not None:
        state.remove()
        return summary
    check_target(output, overwrite=overwrite, configs=("config.json", "adapter_config.json"))
    task = TrainingTask(model, output, data, valid, settings, workers, overwrite)
    said: list[TrainingStarted | Halted | Finished] = []

    def receive(message: Any) -> None:
        if isinstance(message, TrainingProgress):
            report(message)
            return
        said.append(message)
        if isinstance(message, TrainingStarted):
            begun(message)

    with _alone(state) if os.environ.get("RANK", "0") == "0" else nullcontext():
        if torchrun:
            with joined_group(device) as group:
                work(group, receive, task)
        elif cluster is None:
            devices = devices_of(device, gpus, processes)
            crew = Processes(work, devices=devices, receive=receive, patience=patience)
            _run(crew, task, said, state) if len(devices) > 1 else _run_here(crew, task)
        else:
            on_gpus = device != "cpu"
            _run(
                ClusterProcesses(
                    work, processes=processes, address=cluster, gpus=on_gpus, receive=receive, patience=patience
                ),
                task,
                said,
                state,
            )
    outcome = said[-1]
    if isinstance(outcome, Halted):
        raise Stopped(outcome.number, outcome.step, state.path)
    assert isinstance(outcome, Finished)
    return outcome.summary


def check_arguments(
    valid: Path | None, settings: TrainingSettings, device: str, gpus: int, processes: int, cluster: str | None
) -> None:
    """What can be said against a run before its model is looked at, or fetched; arguments and errors as of `train`."""
    if settings.keep == "best" and valid is None:
        raise UsageError("--keep best: there is no validation to tell which step is best: give --valid FILE")
    if "WORLD_SIZE" in os.environ:
        world = int(os.environ["WORLD_SIZE"])
    elif cluster is None:
        world = len(devices_of(device, gpus, processes))
    elif device in ("auto", "cuda", "cpu") and gpus == 1:
        world = processes
    else:
        raise UsageError("--cluster: its GPUs are counted by --processes: leave --gpus and the GPU's number out")
    settings.check_shared(world)


def devices_of(device: str, gpus: int, processes: int) -> Sequence[torch.device]:
    """The device of each process on this machine.

    Raises:
        UsageError: counts that do not go with the device.
        DeviceError: more GPUs than there are.
    """
    first = resolve_device(device)
    if first.type == "cpu":
        if gpus > 1:
            raise UsageError(f"--gpus {gpus}: this would run on the CPU: leave it out, or see warpbus doctor")
        return [first] * processes
    if processes > 1:
        raise UsageError(
            f"--processes {processes}: that is for the CPU and for clusters; on GPUs there is one a GPU: use --gpus"
        )
    if gpus == 1:
        return [first]
    if ":" in device:
        raise UsageError(f"--gpus {gpus}: --device {device} is one GPU: give cuda or auto")
    there = torch.cuda.device_count()
    if gpus > there:
        raise DeviceError(f"--gpus {gpus}: this machine has {there}: give fewer")
    return [torch.device("cuda", index) for index in range(gpus)]


@contextmanager
def _alone(state: StateFile) -> Iterator[None]:
    """While it is open, no other process trains to the same output."""
    parent = next(directory for directory in state.output.resolve().parents if directory.is_dir())
    if not os.access(parent, os.W_OK):
        raise StorageError(f"{state.output}: {parent} may not be written to: choose another output")
    state.output.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(state.output.with_name(f".{state.output.name}.training.lock"), state.output)
    try:
        yield
    finally:
        lock.release()


def _run_here(process: Processes, task: TrainingTask) -> None:
    """Train in this process, which gets signals itself."""
    with process:
        process.run(task)


def _run(processes: Processes | ClusterProcesses, task: TrainingTask, said: Sequence[object], state: StateFile) -> None:
    """Train in other processes, which are told of signals that come here.

    Raises:
        Stopped: a signal came, and one of them stands still, so that they cannot end the step: nothing more is saved.
    """

    def tell(number: int) -> None:
        if not said:  # nothing is trained yet
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
