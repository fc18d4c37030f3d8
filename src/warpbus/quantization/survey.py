"""Checks of each process of a run: the model, its device and its machine."""

import hashlib
import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch

from warpbus.cuda.devices import free_memory
from warpbus.dist import Group
from warpbus.errors import CheckpointError
from warpbus.formats import Checkpoint


@dataclass(frozen=True)
class RankDevice:
    """The device of a rank, and its machine.

    Attributes:
        machine: its name in the network.
        device: the process's own.
        free: bytes of the device's memory that are free, of the main memory on the CPU; `None` where the system does
            not say.
        memory: bytes of the machine's main memory that are free; `None` likewise.
    """

    machine: str
    device: str
    free: int | None
    memory: int | None

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """That of this process."""
        memory = free_memory(torch.device("cpu"))
        free = memory if device.type == "cpu" else free_memory(device)
        return cls(socket.gethostname(), str(device), free, memory)

    def gathered(self, group: Group) -> tuple[Self, ...]:
        """Those of all processes, by rank, on every process; `self` is that of this one."""
        line = bytearray(json.dumps(asdict(self)).encode() + b"\n")
        lines = group.gather(torch.frombuffer(line, dtype=torch.uint8).to(group.device))
        return tuple(type(self)(**json.loads(found)) for found in bytes(lines.tolist()).splitlines())


def weight_files(directory: Path) -> list[Path]:
    """The files of a model that hold weights, sorted."""
    return sorted(file for file in directory.iterdir() if file.suffix in (".safetensors", ".bin"))


def model_hash(checkpoint: Checkpoint) -> str:
    """A hash that identifies a model without reading its weights: of config.json and the sizes of the weight files."""
    sizes = [(file.name, file.stat().st_size) for file in weight_files(checkpoint.directory)]
    return hashlib.sha256(json.dumps([checkpoint.config, sizes], sort_keys=True).encode()).hexdigest()


def check_model(checkpoint: Checkpoint, expected: str) -> None:
    """Refuse another model than the one that the run was planned for, which has the `model_hash` `expected`.

    Raises:
        CheckpointError: names this machine.
    """
    if model_hash(checkpoint) != expected:
        raise CheckpointError(
            f"{checkpoint.directory}: the model on {socket.gethostname()} is not the one on the machine of the command "
            "(config.json or the sizes of the weights differ): put it where all machines see the same files"
        )
