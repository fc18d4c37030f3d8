"""Live migration of an engine with all its requests to another GPU of the same process.

    move = EngineMigration(engine, torch.device("cuda:1"))
    move.prepare()                      # may run in a thread of its own
    while not move.copy_ahead():        # between two steps
        engine.step()
    pieces, moved = move.finish()       # the pause; the same engine object continues there
    move.release()                      # returns the memory on the first GPU

Weights never change: they are copied beforehand, kernels are loaded and graphs captured. Full blocks of the cache do
not change either and are copied while the engine continues. The pause copies the partly filled blocks, the last tokens
and the block tables; all other state of a request, its random numbers included, is on the host. So the answers are the
same as without the migration.
"""

import copy
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from warpbus.engine.engine import Engine
from warpbus.engine.expert_placement import offloading_layers
from warpbus.engine.offload import OffloadableModel
from warpbus.engine.sequence import Sequence, TextPiece
from warpbus.errors import DeviceError, UsageError
from warpbus.models import Decoder
from warpbus.models.layers import Rotary

BLOCKS_AT_ONCE = 32
"""Blocks copied between two steps: 29 MB for ChatGLM2-6B's shape in 16 bits."""

_GROWTH = 1024  # tokens that running sequences may grow by during the migration
_LITTLE = 2  # the pause begins when at most so many full blocks are not copied


@dataclass(frozen=True)
class Moved:
    """The cost of a migration.

    Attributes:
        weights: bytes of the model, copied beforehand.
        ahead: bytes of the cache that were copied while the engine answered.
        paused: bytes of the cache that were copied in the pause.
        preparing: seconds of `EngineMigration.prepare`.
        pause: seconds without computation, from the last result on one device until all data is on the other.
    """

    weights: int
    ahead: int
    paused: int
    preparing: float
    pause: float


class EngineMigration:
    """A migration of an engine. Its methods are called in the order of their definitions.

    Args:
        engine: continues until `finish`, and after it on the other device.
        device: of the same type as the engine's.

    Raises:
        UsageError: the engine sleeps, is on a remote GPU, is one of several that share a model, has offloaded experts,
            or is already on that device, or the device is of another type.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        if engine.device.type not in ("cpu", "cuda"):
            raise UsageError(f"an engine on {engine.device} moves with its lease: have the pool move that")
        if device.type != engine.device.type:
            raise UsageError(f"an engine on {engine.device} cannot move to {device}: give another {engine.device.type}")
        if device == engine.device and device.type == "cuda":
            raise UsageError(f"the engine is on {device} already: give another GPU")
        if engine.model.group is not None and engine.model.group.world > 1:
            raise UsageError("an engine whose model is shared by several processes cannot move: move one that is whole")
        if offloading_layers(engine.model):
            raise UsageError("an engine whose experts are partly offloaded cannot move: give it more memory")
        if engine.asleep:
            raise UsageError("an engine that sleeps cannot move: wake it first")
        self._engine = engine
        self._device = device
        self._replica: Engine | None = None
        self._copied: dict[int, bytes] = {}
        self._weights = self._ahead = 0
        self._preparing = 0.0

    def prepare(self) -> None:
        """Create a warm replica of the engine on the other device, without requests. The engine may step meanwhile.

        Raises:
            DeviceError: the other device has not enough memory.
        """
        started = time.perf_counter()
        engine = self._engine
        try:
            with torch.no_grad(), torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                model, self._weights = _copied(engine.model, engine.device, self._device)
                replica = engine.replica(model, offloadable=OffloadableModel(model) if engine.can_sleep else None)
                # Running sequences grow meanwhile.
                longest = engine.longest
                replica.warm(rows=engine.max_num_seqs, lengths=[longest, longest + _GROWTH] if longest else [])
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"{self._device}: out of memory for a copy of the model: end what else uses this GPU, or choose another"
            ) from error
        self._replica = replica
        self._preparing = time.perf_counter() - started

    def copy_ahead(self, blocks: int = BLOCKS_AT_ONCE) -> bool:
        """Copy some full blocks that are not copied yet; returns whether few enough are left to `finish`.

        Raises:
            DeviceError: the other device has not enough memory for the cache.
        """
        left = self._left()
        chosen = left[:blocks]
        self._ahead += self._copy(chosen)
        return len(left) - len(chosen) <= _LITTLE

    def finish(self) -> tuple[list[tuple[Sequence, TextPiece]], Moved]:
        """Read the launched steps, copy the remaining blocks, and continue on the other device.

        Returns:
            the results of the launched steps, and the cost of the migration.

        Raises:
            DeviceError: the other device has not enough memory for the cache; the engine stays where it is.
        """
        engine, replica = self._engine, self._prepared()
        # First everything that can fail, while nothing has changed.
        self._ahead += self._copy(self._left())
        pieces = engine.drain()
        started = time.perf_counter()
        left = {*self._left(), *(engine.used_blocks() - engine.filled_blocks().keys())}
        paused = self._copy(sorted(left))
        engine.swap_instance(replica)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        pause = time.perf_counter() - started
        return pieces, Moved(self._weights, self._ahead, paused, self._preparing, pause)

    def release(self) -> None:
        """Return the memory on the first device after `finish`, or that of the replica if `finish` did not succeed."""
        if self._replica is not None:
            self._replica.close()
            self._replica = None

    def _left(self) -> list[int]:
        return [block for block, key in self._engine.filled_blocks().items() if self._copied.get(block) != key]

    @torch.inference_mode()
    def _copy(self, blocks: list[int]) -> int:
        filled = self._engine.filled_blocks()
        copied = 0
        # One iteration even without blocks: it commits the memory of the replica's cache.
        for start in range(0, max(1, len(blocks)), BLOCKS_AT_ONCE):
            some = blocks[start : start + BLOCKS_AT_ONCE]
            try:
                copied += self._engine.copy_blocks(some, self._prepared())
            except torch.OutOfMemoryError as error:
                raise DeviceError(
                    f"out of memory for {len(some)} blocks of the cache on their way from {self._engine.device} to "
                    f"{self._device}: end what else uses these GPUs"
                ) from error
            self._copied.update((block, filled[block]) for block in some if block in filled)
        return copied

    def _prepared(self) -> Engine:
        if self._replica is None:
            raise UsageError("this move is not prepared, or over: call prepare first")
        return self._replica


def _copied(model: Decoder, source: torch.device, device: torch.device) -> tuple[Decoder, int]:
    """A copy of a model on another device, and the bytes copied. Tensors that are not on `source` are shared."""
    known: dict[int, object] = {id(model.rotary): Rotary(model.rotary.config), id(model.group): model.group}
    nbytes = 0
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device != source:
            known[id(tensor)] = tensor
            continue
        # Through memory of torch: the other device cannot read an arena.
        moved = tensor.detach().clone(memory_format=torch.preserve_format).to(device)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
        known[id(tensor)] = moved
        nbytes += tensor.nbytes
    return copy.deepcopy(model, known), nbytes
