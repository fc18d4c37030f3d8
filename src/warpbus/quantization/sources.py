"""Reads a checkpoint: layers ahead of time, and hashes of all tensors.

A resumed run detects changed weights by hashes, because sizes and times of files are not reliable. So each finished
part records the hashes of the tensors from which it was made, and one hash of everything else that it depends on: the
embedding and the layers before it.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from warpbus.cuda.devices import default_dtype
from warpbus.cuda.staging import PinnedStaging
from warpbus.errors import NumericError, UsageError
from warpbus.formats import Checkpoint, FinishedParts
from warpbus.models import DecoderLayer, LayerLoader
from warpbus.quantization.output_parts import kept_end_parts, layer_part
from warpbus.quantization.preflight import Plan

_THREADS = 8
_DIGEST_BYTES = 16


class Reading:
    """Reads a checkpoint in a separate thread.

    The embedding and the first layer are read immediately; each further layer is read while the one before it is
    processed.

    Args:
        plan: of the run.
        device: where the embedding and the layers go.
        dtype: of the layers; that in which the algorithms compute on the device by default.
    """

    def __init__(self, plan: Plan, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self._plan, self._device = plan, device
        self._dtype = dtype or default_dtype(device, plan.dtype)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._loader: LayerLoader | None = None
        self._pool = ThreadPoolExecutor(1, "reading")
        self._table: Future[Tensor] | None = self._pool.submit(self._read_table)
        self._layer: Future[DecoderLayer] | None = self._pool.submit(self._read_layer, 0)

    def table(self) -> Tensor:
        """The embedding, once: it is not kept."""
        assert self._table is not None
        table, self._table = self._table.result(), None
        self._hand_over(table)
        return table

    def layers(self, begin: int = 0, end: int | None = None) -> Iterator[DecoderLayer]:
        """The layers from `begin` up to `end`, all by default, once."""
        end = len(self._plan.config.all_layers) if end is None else end
        with self._pool:
            if 0 < begin < end:
                self._layer = self._pool.submit(self._read_layer, begin)
            for index in range(begin, end):
                assert self._layer is not None
                layer, self._layer = self._layer.result(), None
                for tensor in layer.parameters():
                    self._hand_over(tensor)
                if index + 1 < end:
                    self._layer = self._pool.submit(self._read_layer, index + 1)
                yield layer

    def _read_table(self) -> Tensor:
        table = self._plan.checkpoint.tensor(self._plan.tensors["embedding.weight"][0])
        if self._stream is None:
            return table
        with torch.cuda.stream(self._stream):
            copied = torch.empty_like(table, device=self._device)
            PinnedStaging(self._device).put(copied, table)
        self._stream.synchronize()
        return copied

    def _read_layer(self, index: int) -> DecoderLayer:
        plan = self._plan
        with torch.cuda.stream(self._stream):
            if self._loader is None:
                self._loader = LayerLoader(plan.checkpoint, plan.config, device=self._device, dtype=self._dtype)
            layer = self._loader.load(index)
        if self._stream is not None:
            self._stream.synchronize()
        return layer

    def _hand_over(self, tensor: Tensor) -> None:
        """Memory that the thread's stream uses is not to be given to the current one before."""
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self._device))


@dataclass(frozen=True)
class Checked:
    """A message: the bytes that have been hashed again for the check of finished parts, and their total."""

    done: int
    total: int


class Sources:
    """The tensors of a checkpoint, hashed in the background. Use it in a `with` statement.

    Args:
        plan: of the run.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._embedding = plan.tensors["embedding.weight"]
        self._pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "hashing")
        self._hashes: dict[str, Future[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def begin(self, names: Collection[str]) -> None:
        """Start to hash tensors."""
        for name in names:
            if name not in self._hashes:
                self._hashes[name] = self._pool.submit(_hash, self._plan.checkpoint, name)

    def begin_layer(self, index: int) -> None:
        """Start to hash the tensors of a decoder layer; with the first layer, also the embedding."""
        self.begin((*self._embedding, *self._layer(index)))

    def layer_facts(self, index: int) -> dict[str, Any]:
        """The facts that the part of a layer records; waits for its hashes and those of all layers before it."""
        return {"sources": self._found(self._layer(index)), "before": self._before(index)}

    def end_facts(self, names: Collection[str]) -> dict[str, Any]:
        """The facts that a part with unchanged tensors records."""
        self.begin(names)
        return {"sources": self._found(names)}

    def check(self, parts: FinishedParts, finished: Collection[int], tell: Callable[[Checked], None]) -> None:
        """Hash the source tensors of the finished parts again.

        Args:
            parts: the finished parts of an earlier run.
            finished: the numbers of the finished layers.
            tell: called as the bytes are read.

        Raises:
            UsageError: if a tensor is not what it was; the message names it.
        """
        ends = [(part, names) for part, names in kept_end_parts(self._plan) if parts.facts(part) is not None]
        layers = range(max(finished, default=-1) + 1)
        needed = [name for _, names in ends for name in names]
        needed += [name for index in layers for name in self._layer(index)]
        if layers:
            needed += self._embedding
        self._wait(list(dict.fromkeys(needed)), tell)
        for part, names in ends:
            self._compare(parts, part, self.end_facts(names))
        for index in layers:
            if index in finished:
                self._compare(parts, layer_part(index), self.layer_facts(index))

    def _compare(self, parts: FinishedParts, part: str, found: Mapping[str, Any]) -> None:
        recorded = parts.facts(part)
        was = recorded.get("sources", {})
        changed = [name for name, digest in found["sources"].items() if was.get(name) != digest]
        if not changed and recorded.get("before") == found.get("before"):
            return
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        what = f"tensor {changed[0]}{more}" if changed else f"a tensor that {part} depends on"
        raise UsageError(
            f"{self._plan.checkpoint.directory}: {what} has changed since {part} in {parts.directory} was made: "
            "restore the weights to go on, or start anew with restart=True"
        )

    def _layer(self, index: int) -> list[str]:
        matrices = self._plan.layer(index).values()
        return sorted({*self._plan.kept[index], *(source for matrix in matrices for source in matrix.sources)})

    def _before(self, index: int) -> str:
        """One hash of the embedding and of all layers before one."""
        whole = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for names in (self._embedding, *map(self._layer, range(index))):
            self.begin(names)
            whole.update("".join(self._found(names).values()).encode())
        return whole.hexdigest()

    def _found(self, names: Collection[str]) -> dict[str, str]:
        return {name: self._hashes[name].result() for name in names}

    def _wait(self, names: Sequence[str], tell: Callable[[Checked], None]) -> None:
        self.begin(names)
        sizes = {self._hashes[name]: self._plan.checkpoint.nbytes(name) for name in names}
        done = 0
        for future in as_completed(sizes):
            done += sizes[future]
            tell(Checked(done, sum(sizes.values())))


def check_finite(checkpoint: Checkpoint, names: Collection[str]) -> None:
    """Refuse NaN and infinity in the floating tensors among `names`.

    Raises:
        NumericError: names the tensor.
    """
    for name in names:
        dtype = checkpoint.dtype(name)
        if not dtype.is_floating_point:
            continue
        for chunk in checkpoint.chunks(name):  # read and not mapped: it is read again when it is written
            numbers = torch.frombuffer(bytearray(chunk), dtype=dtype)
            # A sum is NaN or infinite if a part is; it may also overflow, so only then look closely.
            if not torch.isfinite(numbers.sum(dtype=torch.float32)) and not torch.isfinite(numbers.float()).all():
                raise NumericError(
                    f"{checkpoint.directory}: {name}: NaN or infinity among its numbers: use an undamaged checkpoint"
                )


def _hash(checkpoint: Checkpoint, name: str) -> str:
    header = f"{name}\0{checkpoint.dtype(name)}\0{checkpoint.shape(name)}\0"
    found = hashlib.blake2b(header.encode(), digest_size=_DIGEST_BYTES)
    for chunk in checkpoint.chunks(name):
        found.update(chunk)
    return found.hexdigest()
