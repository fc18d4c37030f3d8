"""The states between two layers on the disk, so that a resumed run does not compute the finished layers again.

On a CPU the calibration data take as long through a finished layer as through a new one. A GPU computes the states in
less time than a disk takes them, so they are not saved there.

The states of each share are a part (`FinishedParts`) in `OUTPUT.quantization/states.quantization`, whose name has the
number of the layer that they enter. They only count if all shares are there, undamaged, and all layers before that one
are finished; otherwise the states are computed.
"""

import time
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from warpbus.dist import SHARES, Group
from warpbus.errors import CheckpointError, StorageError
from warpbus.formats import FinishedParts
from warpbus.formats.files import free_space
from warpbus.models import ModelConfig
from warpbus.models.latent_spec import LatentAttentionSpec
from warpbus.quantization.states import States

MOST_BYTES = 2**34
"""Bytes of saved states, at most."""

_RATE = 2e8
"""Bytes per second that the first save is expected to write."""

_LEAST_WORK = 20
"""States are saved after so many times the seconds that saving takes: it may cost 5 % of a run."""


class SavedStates:
    """The saved states of one process's shares; all processes of the group make the same calls.

    Args:
        parts: of the run.
        states: of this process, as `embed` gives them.
        config: of the model.
        group: the processes.
        reserved: bytes that the run still writes besides.
    """

    def __init__(
        self, parts: FinishedParts, states: Sequence[States], config: ModelConfig, group: Group, *, reserved: int
    ) -> None:
        self._parts = _states_of(parts)
        self._states, self._config, self._group = states, config, group
        self._reserved = reserved
        self._enabled, self._bytes = group.device.type == "cpu", 0
        if self._enabled:  # a GPU does not wait for its host
            own = sum(tensor.nbytes for share in group.shares() for tensor in self._tensors(share).values())
            self._bytes = int(group.sum(torch.tensor(own, dtype=torch.int64)))
            self._enabled = self._bytes <= MOST_BYTES
        self._seconds = self._bytes / _RATE
        self._since = time.monotonic()

    def load(self, finished: int) -> int:
        """Put the states into the place of those that enter the first layer.

        Args:
            finished: how many layers from the first one on are finished.

        Returns:
            the number of the layer that the states enter, at most `finished`; 0 if none are saved.
        """
        if not self._enabled:
            return 0
        for partial in self._parts.directory.glob(".*.partial-*") if self._group.is_first else ():
            partial.unlink(missing_ok=True)
        for index in range(finished, 0, -1):
            if self._agree(all(self._is_saved(index, share) for share in self._group.shares())):
                for share in self._group.shares():
                    self._read(index, share)
                return index
        return 0

    def is_due(self, index: int) -> bool:
        """Whether the states that enter a layer are worth saving now, and fit on the disk."""
        if not self._enabled:
            return False
        wanted = (
            _can_begin(self._config, index)
            and time.monotonic() - self._since >= _LEAST_WORK * self._seconds
            and free_space(self._parts.directory) >= self._reserved + self._bytes
        )
        return self._agree(wanted)

    def save(self, index: int) -> None:
        """Save the states that enter a layer, then remove those that enter others.

        All layers before have to be on the disk. If the states cannot be written, they are not saved any more.
        """
        started, written = time.monotonic(), True
        try:
            for share in self._group.shares():
                self._parts.write(_part(index, share), self._tensors(share))
        except (StorageError, OSError):
            written = False
        self._enabled = self._agree(written)
        with suppress(OSError):
            self._remove(keep=index if self._enabled else None, only=None if self._enabled else index)
        self._since = time.monotonic()
        self._seconds = self._since - started

    def remove(self) -> None:
        """Remove all states of this process's shares: no layer is left that they could enter."""
        if self._parts.directory.is_dir():
            with suppress(OSError):
                self._remove()

    def _agree(self, yes: bool) -> bool:
        """Whether all processes say yes."""
        return int(self._group.sum(torch.tensor(int(yes)))) == self._group.world

    def _own(self, share: int) -> list[States]:
        return [state for state in self._states if state.share == share]

    def _tensors(self, share: int) -> dict[str, Tensor]:
        found = {}
        for number, state in enumerate(self._own(share)):
            found[f"{number}.x"] = state.x.contiguous()
            if state.original is not None:
                found[f"{number}.original"] = state.original.contiguous()
        return found

    def _is_saved(self, index: int, share: int) -> bool:
        """Whether the states of a share are there, with the shapes and dtypes of those that it has."""
        try:
            entries, expected = self._parts.read(_part(index, share)), self._tensors(share)
        except (CheckpointError, OSError):
            return False
        return entries.keys() == expected.keys() and all(
            entry.shape == tuple(expected[name].shape) and entry.dtype == expected[name].dtype
            for name, entry in entries.items()
        )

    def _read(self, index: int, share: int) -> None:
        """Copied, so that the file can be removed."""
        entries = self._parts.read(_part(index, share))
        for number, state in enumerate(self._own(share)):
            state.x = entries[f"{number}.x"].read().clone()
            if state.original is not None:
                state.original = entries[f"{number}.original"].read().clone()

    def _remove(self, *, keep: int | None = None, only: int | None = None) -> None:
        for share in self._group.shares():
            for index in range(len(self._config.all_layers)):
                if index != keep and (only is None or index == only):
                    self._parts.remove(_part(index, share))


def saved_layer(parts: FinishedParts, finished: int) -> int:
    """The number of the layer at which a run on a CPU goes on, by the names of the files alone: see `SavedStates.load`.

    Args:
        parts: of the run.
        finished: how many layers from the first one on are finished.
    """
    there = set(_states_of(parts).parts())
    whole = (
        index for index in range(finished, 0, -1) if there.issuperset(_part(index, each) for each in range(SHARES))
    )
    return next(whole, 0)


def _states_of(parts: FinishedParts) -> FinishedParts:
    """Where the states of a run are."""
    return FinishedParts(parts.directory / "states")


def _part(index: int, share: int) -> str:
    return f"states-{index:05}-{share}"


def _can_begin(config: ModelConfig, index: int) -> bool:
    """Whether nothing but the states enters a layer: an indexer may be shared with layers before."""
    attention = config.all_layers[index].attention
    shared = isinstance(attention, LatentAttentionSpec) and attention.indexer is not None and attention.indexer.shared
    return not shared
