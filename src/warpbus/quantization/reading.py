"""Reading a checkpoint ahead: what is needed next is on the device when its turn comes."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from warpbus.cuda.devices import default_dtype
from warpbus.cuda.staging import PinnedStaging
from warpbus.models import DecoderLayer, load_layer, tensor_map
from warpbus.quantization.preflight import Plan


class Reading:
    """What is read of a checkpoint by a thread of its own, beside everything else.

    The embedding and the first layer are read at once, and while one layer is worked on, the next one.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._dtype = default_dtype(device, plan.dtype)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(1, "reading")
        self._table: Future[Tensor] | None = self._pool.submit(self._read_table)
        self._layer: Future[DecoderLayer] | None = self._pool.submit(self._read_layer, 0)

    def table(self) -> Tensor:
        """The embedding, once: it is not kept."""
        assert self._table is not None
        table, self._table = self._table.result(), None
        self._hand_over(table)
        return table

    def layers(self) -> Iterator[DecoderLayer]:
        """All layers, once."""
        count = len(self._plan.config.all_layers)
        with self._pool:
            for index in range(count):
                assert self._layer is not None
                layer, self._layer = self._layer.result(), None
                for tensor in layer.parameters():
                    self._hand_over(tensor)
                if index + 1 < count:
                    self._layer = self._pool.submit(self._read_layer, index + 1)
                yield layer

    def _read_table(self) -> Tensor:
        table = self._plan.checkpoint.tensor(tensor_map(self._plan.config)["embedding.weight"][0])
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
            layer = load_layer(plan.checkpoint, plan.config, index, device=self._device, dtype=self._dtype)
        if self._stream is not None:
            self._stream.synchronize()
        return layer

    def _hand_over(self, tensor: Tensor) -> None:
        """Memory that the thread's stream uses is not to be given to the current one before."""
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self._device))
